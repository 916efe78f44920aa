"""What `baton config`, `baton logs` and `baton chat` print, and what they make of what is typed."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.chat import ChatMessage
from baton.errors import BatonError, Forbidden, InvalidRequest, NoWorker
from deploy.cli.app import app
from deploy.cli.conversation import talk
from deploy.local.log_files import follow, last_lines, log_files
from deploy.operator.client import Access
from deploy.operator.http_client import HttpClient, is_url
from deploy.operator.talk import HttpSpeaker
from deploy.operator.worker_log import new_lines
from deploy.operator.worker_log import read as read_worker_log


def baton(*words: str, **environ: str) -> tuple[int, str, BaseException | None]:
    done = CliRunner().invoke(app, words, env=environ)
    return done.exit_code, done.stdout, done.exception


# -- config ------------------------------------------------------------------------------------------------------------


def test_config_shows_settings_by_section_or_name_with_their_origin() -> None:
    status, shown, _ = baton("config", "cluster.grpc_port", "router", BATON_GRPC_PORT="3333")
    lines = shown.splitlines()
    assert status == 0
    (port,) = (line.split() for line in lines if line.startswith("cluster."))
    assert port == ["cluster.grpc_port", "3333", "BATON_GRPC_PORT"]
    assert len(lines) > 10
    assert all(line.startswith(("cluster.grpc_port", "router.")) for line in lines)


def test_config_shows_only_what_is_changed_and_no_secret() -> None:
    _, shown, _ = baton("config", "--changed", "--json", BATON_ROUTER_CACHE_SECRET="word", BATON_CACHE="/x")
    assert [each["name"] for each in json.loads(shown)] == ["router.cache_secret", "cluster.cache_dir"]
    assert "word" not in shown


def test_config_refuses_a_setting_that_is_none() -> None:
    _, _, error = baton("config", "clust")
    assert isinstance(error, InvalidRequest)
    assert "no setting 'clust'" in str(error)


# -- logs --------------------------------------------------------------------------------------------------------------


def test_the_log_files_are_those_of_the_latest_start(tmp_path: Path) -> None:
    assert log_files(tmp_path) == {}
    for folder, names in (("20260101-000000-7", ["ray"]), ("20260102-000000-5", ["router-0", "controller"])):
        (tmp_path / "logs" / folder).mkdir(parents=True)
        for name in names:
            (tmp_path / "logs" / folder / f"{name}.log").write_text("")
    assert list(log_files(tmp_path)) == ["controller", "router-0"]


def test_of_several_clusters_the_logs_are_those_of_the_one_that_is_asked(tmp_path: Path) -> None:
    """A router is a child of the `baton up` that has started it."""
    for folder in (f"20260101-000000-{os.getppid()}", "20260102-000000-5"):
        (tmp_path / "logs" / folder).mkdir(parents=True)
        (tmp_path / "logs" / folder / f"{folder[:8]}.log").write_text("")
    assert list(log_files(tmp_path, [os.getpid()])) == ["20260101"]
    assert log_files(tmp_path, [2**22 + 1]) == {}, "a router of another machine"
    assert list(log_files(tmp_path)) == ["20260102"]


def test_a_file_is_followed_from_its_last_lines_on_and_lines_come_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\ntwo\nthree\n")
    lines, size = last_lines(path, 2)
    assert (lines, size) == (["two", "three"], 14)
    assert last_lines(path, 0) == ([], 14)
    coming = follow(path, size)
    with path.open("a") as file:
        file.write("four\nfi")
    assert next(coming) == "four"
    with path.open("a") as file:
        file.write("ve\n")
    assert next(coming) == "five"
    path.write_text("anew\n")
    assert next(coming) == "anew"


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        ("", "ab", "ab"),
        ("ab", "ab", ""),
        ("ab", "abc", "c"),
        ("abc", "bcd", "d"),
        ("aab", "aba", "a"),
        ("abc", "xyz", "xyz"),
        ("aaa", "aaaa", "a"),
    ],
)
def test_of_a_log_that_only_grows_the_new_lines_are_known(before: str, now: str, new: str) -> None:
    assert new_lines(list(before), list(now)) == list(new)


def test_logs_of_this_machine_need_no_router(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "20260101-000000-7"
    folder.mkdir(parents=True)
    (folder / "controller.log").write_text("one\ntwo\n")
    assert baton("logs", "controller", "-n", "1", BATON_CACHE=str(tmp_path))[:2] == (0, "two\n")
    _, shown, _ = baton("logs", "controller", "--json", BATON_CACHE=str(tmp_path))
    assert [json.loads(line) for line in shown.splitlines()] == [
        {"part": "controller", "line": "one"}, {"part": "controller", "line": "two"}
    ]  # fmt: skip


# -- HTTP --------------------------------------------------------------------------------------------------------------


class Router(BaseHTTPRequestHandler):
    """As much of a router as these clients speak with."""

    asked: list[tuple[str, str | None, object]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("authorization"), None))
        if self.path.partition("?")[0] == "/api/workers/decode-0/log":
            self._send(200, json.dumps({"worker": "decode-0", "lines": ["one", "two"]}))
        else:
            self._send(403, json.dumps({"error": {"message": "operators only"}}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, self.headers.get("authorization"), body))
        events: list[dict[str, object]] = [
            {"choices": [{"delta": {"role": "assistant"}}]},
            {"choices": [{"delta": {"content": "Hel"}}]},
        ]
        if body["messages"][-1]["content"] == "break":
            events.append({"error": {"message": "it broke"}})
        events += [{"choices": [{"delta": {"content": "lo"}}]}, {"choices": [], "usage": {}}]
        self._send(200, ": a comment\n\n" + "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Keeps quiet."""

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


@pytest.fixture
def router() -> Iterator[str]:
    Router.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Router) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_chat_over_http_is_streamed_with_the_key_and_the_model(router: str) -> None:
    speaker = HttpSpeaker(HttpClient(router, Access("key"), 10), {"max_tokens": 3}, "a-model")
    said = ChatMessage(role="user", content="Hi")
    assert [piece for piece in speaker.answer([said]) if piece] == ["Hel", "lo"]
    assert Router.asked[0][:2] == ("/v1/chat/completions", "Bearer key")
    assert Router.asked[0][2] == {
        "model": "a-model",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "max_tokens": 3,
    }
    with pytest.raises(BatonError, match="it broke"):
        list(speaker.answer([ChatMessage(role="user", content="break")]))


def test_a_workers_log_comes_from_the_first_router_that_answers(router: str) -> None:
    endpoints = [HttpClient("http://127.0.0.1:1", Access(), 10), HttpClient(router, Access(), 10)]
    assert read_worker_log(endpoints, "decode-0") == ["one", "two"]
    assert read_worker_log(endpoints, "decode-0", "org/a b") == ["one", "two"]
    assert Router.asked[-1][0] == "/api/workers/decode-0/log?model=org%2Fa%20b"
    with pytest.raises(Forbidden, match="operators only"):
        read_worker_log(endpoints, "decode-1")
    with pytest.raises(NoWorker, match=r"no router answers at http://127\.0\.0\.1:1 "):
        read_worker_log(endpoints[:1], "decode-0")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host:1", "http://host:1/v1/models", "http://"])
def test_what_is_no_address_of_a_router_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="is not http://HOST:PORT"):
        HttpClient(url, Access(), 1)


def test_a_url_is_known_from_an_address() -> None:
    assert (is_url("https://host"), is_url("host:50051")) == (True, False)


# -- chat --------------------------------------------------------------------------------------------------------------


class Parrot:
    """Answers with what it heard last, and fails at `fail`."""

    def __init__(self) -> None:
        self.heard: list[list[str]] = []

    def answer(self, messages: Sequence[ChatMessage]) -> Iterator[str]:
        self.heard.append([f"{each.role}: {each.content}" for each in messages])
        last = str(messages[-1].content)
        if last == "fail":
            raise NoWorker("nobody is there")
        yield from last
        if last == "stop":
            raise KeyboardInterrupt

    def close(self) -> None:
        """Has nothing to close."""


def spoken(*lines: str, system: str = "") -> Parrot:
    parrot, coming = Parrot(), itertools.chain(lines, [None, "never read"])
    talk(parrot, system, lambda: next(coming))
    return parrot


def test_each_line_is_answered_with_all_that_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    parrot = spoken("one", "  ", "two", system="Be brief.")
    assert capsys.readouterr().out == "one\ntwo\n"
    assert parrot.heard == [
        ["system: Be brief.", "user: one"],
        ["system: Be brief.", "user: one", "assistant: one", "user: two"],
    ]


def test_commands_are_no_messages(capsys: pytest.CaptureFixture[str]) -> None:
    parrot = spoken("one", "/reset", "two", "/what", "/help", " /exit ", "three", system="s")
    assert parrot.heard == [["system: s", "user: one"], ["system: s", "user: two"]]
    assert "there is no command /what" in capsys.readouterr().err


def test_what_failed_is_not_remembered_and_what_was_stopped_is(capsys: pytest.CaptureFixture[str]) -> None:
    parrot = spoken("fail", "stop", "on")
    assert "error: nobody is there" in capsys.readouterr().err
    assert parrot.heard[1:] == [["user: stop"], ["user: stop", "assistant: stop", "user: on"]]

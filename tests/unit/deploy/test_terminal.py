"""No text of others commands a terminal or adds a line to a log: not a model's, a client's, a worker's, nor Redis'."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api import GenerateRequest, Text
from baton.chat import ChatMessage
from baton.telemetry import logs
from baton.visible import in_line, visible
from deploy.cli import conversation, options, part_logs
from deploy.doctor.checks import Check, show
from deploy.local.child_log import ChildLog
from deploy.models import Progress, ProgressDisplay
from deploy.operator import orders
from deploy.operator.answer import print_answer
from deploy.operator.explain import print_requests, print_timelines
from deploy.operator.tables import print_status
from deploy.operator.watch import View, picture
from deploy.ray_pools.node import Entry, Lines
from deploy.say import say
from deploy.terminal import Terminal
from tests.unit.deploy.operator.test_explain import TIMELINE
from tests.unit.deploy.operator.test_tables import WORKER
from tests.unit.deploy.operator.test_watch import STATUS
from worker.log import shown

TITLE, CLIPBOARD, CSI = "\x1b]0;evil\x07", "\x1b]52;c;ZXZpbA==\x1b\\", "\x9b2J"
EVIL = f"[/x][link=http://evil]a{TITLE}{CLIPBOARD}{CSI}\u202eb\u2066c\x08\r\x7f\x00\u2028:smile:"
FORGED = "x\n1999-11-21 20:38:24,123 ERROR 7 router: forged\x85\u2028\x0b1999-11-21 20:38:24,123 ERROR 7 router: forged"


class Screen(io.StringIO):
    """Standard output or error, on a terminal that shows no colours."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def on_a_terminal() -> Iterator[Screen]:
    """Takes what is written meanwhile, and sees to it that no terminal would obey any of it."""
    screen = Screen()
    with (
        mock.patch.dict(os.environ, {"TERM": "dumb"}),
        contextlib.redirect_stdout(screen),
        contextlib.redirect_stderr(screen),
    ):
        yield screen
    assert not [each for each in screen.getvalue() if is_command(each)]


def is_command(character: str) -> bool:
    """Whether a terminal obeys it, or it turns the direction of the text."""
    if character in "\n\t":
        return False
    is_control = unicodedata.category(character) in ("Cc", "Zl", "Zp")
    return is_control or unicodedata.bidirectional(character) in (
        "LRE",
        "RLE",
        "LRO",
        "RLO",
        "PDF",
        "LRI",
        "RLI",
        "FSI",
    )


def spoiled(value: Any) -> Any:
    """A value with all its texts but names that the program knows made evil."""
    match value:
        case str():
            return value if value in ("prefill", "decode", "ok", "queue", "recovery") or not value else EVIL
        case dict():
            return {name: spoiled(each) for name, each in value.items()}
        case list() | tuple():
            return type(value)(spoiled(each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: spoiled(getattr(value, f.name)) for f in dataclasses.fields(value)}
        )
    return value


@given(one=st.text(), other=st.text())
def test_controls_become_characters_that_are_seen(one: str, other: str) -> None:
    text = one + other
    assert not any(map(is_command, visible(text)))
    assert visible(one) + visible(other) == visible(text), "a sequence may come in pieces"
    assert [new for old, new in zip(text, visible(text), strict=True) if not is_command(old)] == [
        old for old in text if not is_command(old)
    ]
    assert in_line(text) == visible(text).replace("\n", "␊")


def test_what_is_said() -> None:
    assert visible("a\tb\nc\x1b[31m\x9b\x7f\r") == "a\tb\nc␛[31m\ufffd␡␍"
    assert in_line("a\tb\nc\x1b") == "a\tb␊c␛"
    arabic = "\u0627\u200f\u200d"
    assert visible(arabic) == arabic, "marks and joiners of scripts stay"


@dataclasses.dataclass(frozen=True)
class Chunk:
    text: str
    request_id: str = EVIL
    token_ids: tuple[int, ...] = (1,)
    finish_reason: str = EVIL
    usage: None = None
    timing: None = None


class Model:
    """A router whose model answers with these pieces."""

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces

    def generate(self, _: GenerateRequest) -> Iterator[Chunk]:
        return map(Chunk, self._pieces)

    def answer(self, messages: Sequence[ChatMessage]) -> Iterator[str]:
        self.heard = list(messages)
        return iter(self._pieces)

    def close(self) -> None: ...


PIECES = ["ab\n\tc", "\x1b", "]0;evil", "\x07", "\x9b", "2Jd", EVIL]


@pytest.mark.parametrize("as_json", [True, False])
def test_an_answer_on_a_terminal(as_json: bool) -> None:
    request = GenerateRequest(prompt=Text("hi"), sampling={})
    with on_a_terminal() as screen:
        print_answer(request, Model(*PIECES), as_json)  # type: ignore[arg-type]
    if not as_json:
        assert screen.getvalue() == f"ab\n\tc␛]0;evil␇\ufffd2Jd{visible(EVIL)}\n"


@pytest.mark.parametrize("as_json", [True, False])
def test_an_answer_to_a_program_is_what_the_model_said(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    request = GenerateRequest(prompt=Text("hi"), sampling={})
    print_answer(request, Model(*PIECES), as_json)  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert (json.loads(out)["text"] if as_json else out.removesuffix("\n")) == "".join(PIECES)


def test_a_conversation_on_a_terminal() -> None:
    lines = iter(["hi", "and?", None])
    model = Model(*PIECES)
    with on_a_terminal() as screen:
        conversation.talk(model, "", lambda: next(lines))
    assert screen.getvalue() == 2 * (visible("".join(PIECES)) + "\n")
    assert [each.content for each in model.heard] == ["hi", "".join(PIECES), "and?"], "the model hears what it said"


SUMMARY = dataclasses.replace(TIMELINE.summary, blamed_stage="")
REPORT = {
    **STATUS,
    "workers": [{**WORKER, "engine": "x", "sampler": "y", "self_check": "no", "connections": []}],
    "routers": [{"id": "r", "pid": 1, "grpc": "h:1", "http": "h:2"}],
    "controller": {"pid": 1, "address": "h:3"},
    "redis": {"address": "h:4", "ok": True, "garbage": [{"what": "a lease", "times": 1, "latest": "x"}]},
}
SAID: dict[str, Callable[[], object]] = {
    "status": lambda: print_status(spoiled(REPORT)),
    "status of pools": lambda: print_status({**REPORT, "pools": {EVIL: {"ready": 1, "desired": 1}}}),
    "watch": lambda: Terminal().print(picture(View(), spoiled(STATUS), EVIL, has_metrics=False, lost=EVIL)),
    "explain": lambda: print_timelines([spoiled(dataclasses.replace(TIMELINE, summary=SUMMARY))], "r", as_json=False),
    "requests": lambda: print_requests([spoiled(SUMMARY)], as_json=False),
    "doctor": lambda: show([Check("model", "fail", EVIL, EVIL)], Terminal()),
    "an error": lambda: options.print_error(EVIL),
    "a log": lambda: part_logs._print_lines([EVIL], EVIL, as_json=False),
    "a log as JSON": lambda: part_logs._print_lines([EVIL], EVIL, as_json=True),
    "names of logs": lambda: part_logs._list_logs([{"id": EVIL, "role": EVIL}], {EVIL: Path("x")}, as_json=False),
    "an order": lambda: orders._report({}, EVIL, as_json=False),
    "an order that waits": lambda: orders._wait(
        Waiting(), Terminal(), lambda status: (status["is_done"], EVIL), 10.0  # type: ignore[arg-type]
    ),
    "progress": lambda: shown_progress(),
    "a text": lambda: say(EVIL),
}  # fmt: skip


class Waiting:
    """A router whose order is done at the second look."""

    def __init__(self) -> None:
        self._num_looks = 0

    def status(self) -> dict[str, Any]:
        self._num_looks += 1
        return {"is_done": self._num_looks > 1}


def shown_progress() -> None:
    for console in (Terminal(stderr=True, force_terminal=True, color_system=None), Terminal(stderr=True)):
        with ProgressDisplay(console) as display:
            display.update(Progress(stage="download", done=1, total=2, detail=EVIL))


@pytest.mark.parametrize("name", SAID)
def test_words_of_others_on_a_terminal(name: str) -> None:
    with on_a_terminal() as screen:
        options.console.cache_clear()
        SAID[name]()
    if name != "an order that waits":  # its line is gone by now
        text = "".join(screen.getvalue().split())
        assert "[/x][lin" in text, "it is no markup"
        assert ":smile:" in text or name == "progress", "progress has one line, which ends with the terminal's"


def record(message: str, error: Exception | None = None) -> logging.LogRecord:
    values = {"msg": "%s", "args": (message,), "levelname": "INFO", "name": "router", "stack_info": None}
    info = (type(error), error, None) if error else None
    return logging.makeLogRecord({**values, "exc_info": info, "process": 7})


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("with_error", [True, False])
def test_a_message_is_one_line_of_a_log(form: str, with_error: bool, tmp_path: Path) -> None:
    """As its process writes it, as routers pass it on, and as `baton up` shows it."""
    formatter = logs.JsonFormatter("baton-router") if form == "json" else logs.TextFormatter()
    line = formatter.format(record(FORGED + EVIL, ValueError(FORGED + EVIL) if with_error else None))
    log = tmp_path / "router.log"
    log.write_text(line + "\n")
    terminal = Screen()
    ChildLog(log, terminal).show_new()
    passed_on = shown(log.read_bytes())
    node, text = tmp_path / "node.log", [*passed_on]
    with node.open("wb") as file:
        lines = Lines(file.fileno(), "text")
        lines.relay(line.split("\n")[0].encode(), "output", "worker-0")
        lines.write(Entry("INFO", "node", FORGED + EVIL, "worker-0"))
        lines.flush(60)
    text += node.read_text().split("\n")
    for each in [*text, *terminal.getvalue().split("\n")]:
        assert not any(map(is_command, each)), each
        assert not each.startswith("1999"), each
    assert sum("forged" in each and not each.startswith(" ") for each in passed_on) == 1
    if form == "text":
        assert sum("forged" in each for each in terminal.getvalue().split("\n")) == 1

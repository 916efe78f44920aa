"""The first process of a Ray node's container: what comes out of it, what probes find. A shell is Ray."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.errors import WorkerFailed
from baton.rpc import RpcServer, channel
from deploy.ray_pools.node import IDLE_S, MAX_KEPT_BYTES, MAX_KEPT_IDS, MAX_KEPT_LINES, WorkersHere
from deploy.ray_pools.node_link import NodeLink, end_in_words, why_away
from tests.support.waiting import wait_until
from worker.log import _kept, written

PATIENT_S = 60.0


class Running:
    """A node whose Ray is a shell's script: it says that it is up, and ends with status 3 when it may."""

    def __init__(self, folder: Path, log_format: str) -> None:
        self.folder, self._may_end = folder / "node", folder / "may-end"
        self.links: list[NodeLink] = []
        script = f"echo Ray is up; while [ ! -e {self._may_end} ]; do sleep 0.05; done; exit 3"
        arguments = ["--folder", str(self.folder), "--log-format", log_format, "--", "sh", "-c", script]
        command = [sys.executable, "-P", "-m", "deploy.ray_pools.node", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        wait_until(self._answers, PATIENT_S)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as tried:
            return tried.connect_ex(str(self.folder / "socket")) == 0

    def link(self, worker_id: str) -> NodeLink:
        """What the worker's actor has."""
        self.links.append(NodeLink(str(self.folder / "socket"), worker_id))
        return self.links[-1]

    def shows(self, words: str, *names: str) -> bool:
        """Whether those are the words for probes, and which of their files there are."""
        there = {name for name in ("ready", "started") if (self.folder / name).exists()}
        return words in (self.folder / "workers").read_text() and there == set(names)

    def wait_for(self, words: str, *names: str) -> None:
        """Waits until it shows that."""
        wait_until(lambda: self.shows(words, *names), PATIENT_S)

    def let_ray_end(self) -> None:
        self._may_end.touch()

    def end(self) -> str:
        """Has Ray end, and returns what the node has written."""
        self.let_ray_end()
        out, _ = self.process.communicate(timeout=PATIENT_S)
        assert self.process.returncode == 3, "Ray's own status"
        return out.decode()


@contextmanager
def node(folder: Path, log_format: str = "json") -> Iterator[Running]:
    """A node that does not outlive the block."""
    running = Running(folder, log_format)
    try:
        yield running
    finally:
        running.let_ray_end()  # else the shell would outlive the node
        running.process.kill()
        running.process.wait()
        assert running.process.stdout is not None
        running.process.stdout.close()
        for link in running.links:
            link.close()


def write(link: NodeLink, *lines: str) -> None:
    """Has a worker's process write lines, the last one without an end."""
    output = link.output()
    assert output is not None
    with output:
        subprocess.run(["printf", "%s", "\n".join(lines)], stdout=output.fileno(), check=True)


def test_what_ray_and_workers_write_comes_out_as_log_lines(tmp_path: Path) -> None:
    """A line of Baton's own keeps its level and says of which worker it is; any other one becomes a log line."""
    with node(tmp_path) as here:
        link = here.link("decode-0")
        link.say("starting")
        write(link, json.dumps({"level": "WARNING", "message": "slow"}), "Traceback (most", "  deeper")
        link.say("ended", end_in_words(-signal.SIGKILL))
        here.wait_for("killed")
        lines = [json.loads(line) for line in here.end().splitlines()]
    assert ("INFO", "ray", "Ray is up") in [(line["level"], line.get("logger"), line["message"]) for line in lines]
    assert sorted((line["level"], line["message"]) for line in lines if line.get("worker") == "decode-0") == [
        ("ERROR", "decode-0 was killed by SIGKILL (by the kernel, for want of memory?)"),
        ("INFO", "  deeper"),
        ("INFO", "Traceback (most"),
        ("INFO", "decode-0 starts"),
        ("WARNING", "slow"),
    ]


def test_the_latest_lines_of_a_worker_can_be_asked_for(tmp_path: Path) -> None:
    """Those of an earlier process with its id come first: they are why it is a new one."""
    with node(tmp_path, "text") as here:
        asked = here.folder / "socket"
        write(here.link("decode-0"), "Fatal Python error: Aborted", json.dumps({"message": "m"}))
        write(here.link("prefill-0"), "another's")
        write(here.link("decode-0"), "it starts again")
        ours = ["Fatal Python error: Aborted", '{"message": "m"}', "it starts again"]
        wait_until(lambda: written(asked, "decode-0") == ours, PATIENT_S)
        assert written(asked, "prefill-0") == ["another's"]
        assert written(asked, "decode-1") == []
        write(here.link("decode-0"), *map(str, range(MAX_KEPT_LINES + 5)), "y" * 2 * MAX_KEPT_BYTES)
        wait_until(lambda: written(asked, "decode-0")[-1].startswith("y"), PATIENT_S)
        lines = written(asked, "decode-0")
        assert len(_kept(asked, "decode-0").splitlines()) == MAX_KEPT_LINES
        assert (len(lines), lines[0], lines[-2]) == (MAX_KEPT_LINES, "6", str(MAX_KEPT_LINES + 4))
        for number in range(MAX_KEPT_IDS):
            write(here.link(f"decode-{number + 2}"), "one of many")
            wait_until(lambda number=number: written(asked, f"decode-{number + 2}") != [], PATIENT_S)  # type: ignore[misc]
        assert written(asked, "decode-0") == [], "of so many, the one that wrote first is forgotten"
    with pytest.raises(WorkerFailed, match="the output of decode-0 cannot be read"):
        written(asked, "decode-0")


def test_for_people_a_line_stays_as_it_is(tmp_path: Path) -> None:
    """Only the worker's id stands before it."""
    with node(tmp_path, "text") as here:
        write(here.link("prefill-1"), "2026-11-27 20:00:00,000 INFO 7 x: ready", "y" * 100_000, "z")
        here.wait_for("no worker")
        lines = here.end().splitlines()
    assert "Ray is up" in lines
    assert "[prefill-1] 2026-11-27 20:00:00,000 INFO 7 x: ready" in lines
    assert sum(line.count("y") for line in lines if line.startswith("[prefill-1] y")) == 100_000
    assert "[prefill-1] z" in lines


def test_a_node_is_ready_while_every_worker_on_it_takes_traffic(tmp_path: Path) -> None:
    """The words say which one does not, and why."""
    with node(tmp_path) as here:
        here.wait_for("no worker is here")
        one, other = here.link("decode-0"), here.link("prefill-0")
        one.say("starting")
        here.wait_for("decode-0 starts")
        one.say("ready")
        here.wait_for("decode-0 takes traffic", "ready", "started")
        other.say("starting")
        here.wait_for("decode-0 takes traffic; prefill-0 starts", "started")
        other.say("ready")
        here.wait_for("prefill-0 takes traffic", "ready", "started")
        one.say("away", "it takes no new work")
        here.wait_for("decode-0 takes no traffic: it takes no new work; prefill-0", "started")
        one.close()  # as when its actor is killed
        here.wait_for("prefill-0 takes traffic", "ready", "started")
        assert "decode-0 is gone with its actor" in here.end()


def test_a_node_without_a_worker_has_nothing_to_wait_for() -> None:
    """It counts as started after a while; a worker that begins before has its model covered."""
    here = WorkersHere(0.0)
    here.look(IDLE_S - 1)
    assert not here.is_started
    here.become("decode-0", "starting", "")
    here.look(IDLE_S + 1)
    assert not here.is_started
    here.forget("decode-0", IDLE_S + 1)
    here.look(IDLE_S + 2)
    assert not here.is_started
    here.look(2 * IDLE_S + 1)
    assert (here.is_started, here.is_ready) == (True, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_ray_s(tmp_path: Path, number: signal.Signals) -> None:
    """As a container's first process, it would otherwise have them ignored."""
    with node(tmp_path) as here:
        here.process.send_signal(number)
        assert here.process.wait(PATIENT_S) == 128 + number


def test_how_a_process_ended_in_words() -> None:
    """A signal has its name."""
    assert [end_in_words(status) for status in (0, 3, -signal.SIGSEGV, -99)] == [
        "",
        "ended with status 3",
        "crashed with SIGSEGV",
        "crashed with signal 99",
    ]


async def test_health_says_whether_a_worker_takes_new_work() -> None:
    """A worker that drains answers, and takes none."""
    rpc = RpcServer(("baton.v1.WorkerCalls",))
    port = rpc.bind("127.0.0.1", 0)
    await rpc.start()
    async with channel(f"127.0.0.1:{port}") as link:
        await rpc.set_serving(True)
        assert await why_away(link) == ""
        await rpc.set_serving(False)
        assert await why_away(link) == "it takes no new work"
        await rpc.stop(0)
        assert await why_away(link) == "it does not answer (UNAVAILABLE)"


def test_elsewhere_nothing_is_said() -> None:
    """On a laptop there is no such process, and a worker writes where its actor does."""
    link = NodeLink.of({}, "decode-0")
    link.say("ready")
    assert link.output() is None

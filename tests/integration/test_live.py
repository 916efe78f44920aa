"""`baton status --watch` on a terminal of its own, beside a cluster under load."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from functools import partial

import httpx2
import pytest

from tests.integration.cluster import Cluster
from tests.support.load import Clients, Requests
from tests.support.waiting import wait_until

HOME = "\x1b[H"
"""Before each picture: the cursor goes to the upper left corner."""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
pytestmark = pytest.mark.first

GOODPUT = re.compile(r"goodput\s+([\d.]+) requests/s")
PACE = re.compile(r"between tokens\s+p50 [\d.]+ ms")


@contextlib.contextmanager
def load(cluster: Cluster) -> Iterator[None]:
    """A client that asks one thing after the other, until the block is left."""

    def script(_: int) -> Requests:
        for number in itertools.count(1):
            yield partial(cluster.generate, text=f"request {number}", sampling={"max_tokens": 8, "ignore_eos": True})

    with Clients(script, 1):
        yield


def moves(text: str) -> bool:
    """Whether these pictures show goodput that changes, and all that there is under load."""
    goodput = {float(number) for number in GOODPUT.findall(text)}
    return len(goodput) > 2 and max(goodput) > 1.0 and "100.0%" in text and PACE.search(text) is not None


class Terminal:
    """A command on a terminal of 100 columns."""

    def __init__(self, *command: str) -> None:
        self.seen = ""
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")} | {"TERM": "xterm"}
        self.process = subprocess.Popen(
            command,
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which whoever runs the tests may ignore
        )
        os.close(inner)

    def read_for(self, seconds: float) -> None:
        deadline_s = time.monotonic() + seconds
        while (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([self._fd], [], [], left_s)[0]:
                try:
                    self.seen += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    return

    def read_until(self, shows: Callable[[str], bool], timeout_s: float = 60.0) -> None:
        """Until a whole picture that is drawn from now on is so. Everything up to then is forgotten."""
        self.seen = ""
        deadline_s = time.monotonic() + timeout_s
        while not any(shows(ESCAPES.sub("", picture)) for picture in self.seen.split(HOME)[1:-1]):
            assert time.monotonic() < deadline_s, self.text
            self.read_for(1)
        self.seen = ""

    def read_on_until(self, shows: Callable[[str], bool], timeout_s: float = 60.0) -> None:
        """Until all pictures since the last of `read_until` together are so. They are kept."""
        deadline_s = time.monotonic() + timeout_s
        while not shows(self.text):
            assert time.monotonic() < deadline_s, self.text
            self.read_for(1)

    @property
    def text(self) -> str:
        return ESCAPES.sub("", self.seen)

    def interrupt(self) -> int:
        """Ctrl-C. Its exit status."""
        self.process.send_signal(signal.SIGINT)
        self.read_for(60)  # to its end
        return self.process.wait(10)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)


def test_the_numbers_change_under_load_and_ctrl_c_ends_it(arithmetic_cluster: Cluster) -> None:
    terminal = Terminal(sys.executable, "-m", "deploy.cli", "status", "--watch", "--address", arithmetic_cluster.grpc)
    try:
        shown = [f"worker-{number}" for number in range(4)]
        terminal.read_until(lambda text: all(name in text for name in shown) and GOODPUT.findall(text) == ["0.0"])
        with load(arithmetic_cluster):
            terminal.read_on_until(moves)
        assert terminal.interrupt() == 0
    finally:
        terminal.close()
    text = terminal.text
    assert "Traceback" not in text
    for wanted in (*shown, "Redis ok", "controller ok"):
        assert wanted in text, wanted
    assert terminal.seen.rstrip().endswith("\x1b[?1049l"), "the screen is as it was before"


def test_a_router_that_is_gone_is_said_and_the_next_one_shown(arithmetic_cluster: Cluster) -> None:
    pid = arithmetic_cluster.client.status()["routers"][0]["pid"]
    terminal = Terminal(sys.executable, "-m", "deploy.cli", "status", "--watch", "--address", arithmetic_cluster.grpc)
    try:
        terminal.read_until(lambda text: "worker-0" in text and "lost: " not in text)
        os.kill(pid, signal.SIGKILL)
        terminal.read_until(lambda text: "lost: no router answers at" in text)
        terminal.read_until(lambda text: "goodput" in text and "lost: " not in text)
        assert terminal.interrupt() == 0
    finally:
        terminal.close()
    wait_until(lambda: is_served(arithmetic_cluster), 60.0)


def is_served(cluster: Cluster) -> bool:
    try:
        return httpx2.get(f"http://{cluster.http}/readyz", timeout=60).status_code == 200
    except httpx2.TransportError:
        return False


def test_the_page_and_its_metrics_are_there(arithmetic_cluster: Cluster) -> None:
    page = httpx2.get(f"http://{arithmetic_cluster.http}/")
    assert page.status_code == 200
    assert "page/app.js" in page.text
    assert 'ask("api/status")' in httpx2.get(f"http://{arithmetic_cluster.http}/page/app.js").text
    assert "baton_pool_workers" in httpx2.get(f"http://{arithmetic_cluster.http}/metrics").text

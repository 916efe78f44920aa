"""Child processes: which signals and which share of the processors are theirs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from deploy.embedded_redis import EmbeddedRedis
from deploy.local.child import Child


@contextlib.asynccontextmanager
async def redis(folder: Path) -> AsyncIterator[None]:
    with EmbeddedRedis(socket_path=folder / "redis.sock"):
        yield


@contextlib.asynccontextmanager
async def part_of_the_cluster(folder: Path) -> AsyncIterator[None]:
    child = Child("sleeper", "timeit", ["-n1", "-r1", "import time; time.sleep(60)"], {})
    await child.start()
    try:
        yield
    finally:
        await child.stop(10.0)


def ignores(pid: int, number: signal.Signals) -> bool:
    _, _, mask = Path(f"/proc/{pid}/status").read_text().partition("SigIgn:")
    return bool(int(mask.split()[0], 16) & 1 << number - 1)


@pytest.mark.parametrize("running", [redis, part_of_the_cluster])
async def test_a_child_is_out_of_ctrl_c_s_reach_and_in_our_session(
    running: Callable[[Path], contextlib.AbstractAsyncContextManager[None]], tmp_path: Path
) -> None:
    """Regression: in sessions of their own, Redis' answers took up to a second beside a busy session."""
    before = {process.pid for process in psutil.Process().children()}
    async with running(tmp_path):
        (child,) = {process.pid for process in psutil.Process().children()} - before
        assert os.getpgid(child) != os.getpgid(0)
        assert os.getsid(child) == os.getsid(0)


async def test_a_child_may_write_to_a_terminal_that_stops_others_for_it(tmp_path: Path) -> None:
    """Regression: after `stty tostop` the router was stopped at its first log line, and the cluster never ready."""
    before = {process.pid for process in psutil.Process().children()}
    async with part_of_the_cluster(tmp_path):
        (child,) = {process.pid for process in psutil.Process().children()} - before
        assert ignores(child, signal.SIGTTOU)

"""Child processes: which signals and which share of the processors are theirs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from baton.parent import NOT_RUN
from deploy.embedded_redis import EmbeddedRedis
from deploy.local.child import Child
from deploy.processes import tied
from tests.support.waiting import wait_until


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
        wait_until(lambda: ignores(child, signal.SIGTTOU), within_s=10)


def test_a_tied_program_is_run_as_without_the_tie() -> None:
    """Its arguments, its exit status, and the signals that Python ignores but programs do not."""
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(3)", "--", "-x", "", "two words"]
    shell = ["/bin/sh", "-c", "grep SigIgn /proc/self/status"]
    ended = subprocess.run(tied(command), capture_output=True, text=True)
    assert ended.returncode == 3
    assert ended.stdout == "['--', '-x', '', 'two words']\n"
    assert subprocess.run(tied(shell), capture_output=True).stdout == subprocess.run(shell, capture_output=True).stdout


def test_a_tied_program_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    ended = subprocess.run(tied([str(tmp_path / "missing")]), capture_output=True, text=True)
    assert ended.returncode == NOT_RUN
    assert ended.stderr == f"{tmp_path / 'missing'}: No such file or directory\n"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_tied_program_gets_its_signal_when_its_parent_dies(tmp_path: Path) -> None:
    """Also one whose parent died before the tie was made."""
    said, shell = tmp_path / "said", "trap 'echo told > \"$0\"; exit' TERM; echo ready; while :; do sleep 0.01; done"
    code = (
        "import signal, subprocess, sys; from deploy.processes import tied;"
        f"subprocess.Popen(tied(['/bin/sh', '-c', {shell!r}, {str(said)!r}], signal.SIGTERM)).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
    wait_until(said.exists, within_s=10)
    orphan = tied(["/bin/sh", "-c", f"echo > {tmp_path / 'orphan'}"])
    orphan[orphan.index("--") - 3] = "1"  # the parent's number
    assert subprocess.run(orphan).returncode == 1
    assert not (tmp_path / "orphan").exists()

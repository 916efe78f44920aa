"""A container's process and everything that comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import psutil

MARK = "MACHINE_CONTAINER"
"""Variable by which the processes of a container are known, whatever groups and sessions they have made."""
_BECOME = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
parent, program, *argv = sys.argv[1:]
prctl = ctypes.CDLL(None).prctl
prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(parent):  # it died before the call
    os._exit(1)
prctl(PR_SET_CHILD_SUBREAPER, 1)
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, which a program would inherit
    signal.signal(number, signal.SIG_DFL)
os.execve(program, argv, os.environ)
"""
"""A script that becomes the first process of a container. A `preexec_fn` is not safe in a process with threads: after a
fork children died of segmentation faults."""


class Process:
    """Number 1 of a container: it leads a process group of its own, and inherits the orphans among its descendants, as
    the first process of a container does.

    It stays in the session of the tests: Linux weighs sessions against each other (`sched_autogroup`), and a Redis in a
    small one answered nobody for seconds.

    Started on the event loop's thread, which must live as long as the process: it dies with that thread.
    """

    def __init__(self, argv: list[str], environment: Mapping[str, str], cwd: Path, log: Path) -> None:
        """Raises OSError: there is no such program, or it cannot be run."""
        self._loop = asyncio.get_running_loop()
        self.mark = uuid.uuid4().hex
        program = _found(argv[0], environment, cwd)
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), program, *argv],
                env={**environment, MARK: self.mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.pid = self._popen.pid
        self.ended = asyncio.Event()
        """It is over; its descendants may live."""
        self._reap_lock = asyncio.Lock()
        self._watch = os.pidfd_open(self.pid)
        self._loop.add_reader(self._watch, self._on_end)

    async def finish(self) -> int:
        """Waits for its end, kills what it has left behind and returns its exit status, 128 + N after signal N."""
        await self.ended.wait()
        return await self._reap()

    async def kill(self) -> int:
        """Ends it and all its descendants now."""
        if not self.ended.is_set():
            os.kill(self.pid, signal.SIGSTOP)  # number 1 starts no more of them
            await self._kill_others()
            if not self.ended.is_set():  # else another one may have reaped it, and the number is not its own
                os.kill(self.pid, signal.SIGKILL)
        return await self.finish()

    def terminate(self) -> None:
        """Tells it, and only it, to end."""
        if not self.ended.is_set():
            os.kill(self.pid, signal.SIGTERM)

    async def _reap(self) -> int:
        # Not before the others are gone, and nowhere else (Popen's own methods reap): till then the number is its own.
        async with self._reap_lock:
            if self._popen.returncode is None:
                await self._kill_others()
                self._popen.wait()
        status = self._popen.returncode
        assert status is not None
        return status if status >= 0 else 128 - status

    async def _kill_others(self) -> None:
        # One that is ending loses its mark before it is gone.
        known: dict[int, psutil.Process] = {}
        while True:
            known |= {process.pid: process for process in of_containers({self.mark}) if process.pid != self.pid}
            known = {pid: process for pid, process in known.items() if _is_left(process)}
            if not known:
                return
            for process in known.values():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            await asyncio.sleep(0.005)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._watch)
        os.close(self._watch)
        self.ended.set()


def of_containers(marks: set[str]) -> list[psutil.Process]:
    """What lives of some containers: what has their mark, and the descendants of that."""
    found = {process.pid: process for process in psutil.process_iter(["ppid", "status"])}
    members = {pid for pid in found if _mark_of(pid) in marks}
    while more := {pid for pid, p in found.items() if p.info["ppid"] in members} - members:
        members |= more
    return [found[pid] for pid in members if _lives(found[pid])]


def _lives(process: psutil.Process) -> bool:
    return process.info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _is_left(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _mark_of(pid: int) -> str | None:
    """None: it has none, or has ended."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    name = f"{MARK}=".encode()
    return next((each.removeprefix(name).decode() for each in variables if each.startswith(name)), None)


def _found(name: str, environment: Mapping[str, str], cwd: Path) -> str:
    """The file of a program. Raises OSError: there is none, or it cannot be run."""
    if "/" not in name:
        if found := shutil.which(name, path=environment.get("PATH", os.defpath)):
            return found
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    file = cwd / name
    if not file.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    if not os.access(file, os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
    return str(file)

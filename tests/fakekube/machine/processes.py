"""A container's process and everything that comes of it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


class Process:
    """Number 1 of a container: it leads a session of its own, and inherits the orphans among its descendants, as the
    first process of a container does.

    Started on the event loop's thread, which must live as long as the process: it dies with that thread.
    """

    def __init__(self, argv: list[str], environment: Mapping[str, str], cwd: Path, log: Path) -> None:
        """Raises OSError: there is no such program, or it cannot be run."""
        self._loop = asyncio.get_running_loop()
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                argv,
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_before_exec(),
            )
        self.pid = self._popen.pid
        self.ended = asyncio.Event()
        """It is over; its descendants may live."""
        self._known: list[psutil.Process] = []
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
            os.kill(self.pid, signal.SIGKILL)
        return await self.finish()

    def terminate(self) -> None:
        """Tells it, and only it, to end."""
        if not self.ended.is_set():
            self._known = descendants({self.pid})  # who has left the session cannot be found once it has ended
            os.kill(self.pid, signal.SIGTERM)

    async def _reap(self) -> int:
        # Not before its session is empty, and nowhere else (Popen's own methods reap): till then the number is its own.
        async with self._reap_lock:
            if self._popen.returncode is None:
                await self._kill_others()
                self._popen.wait()
        status = self._popen.returncode
        assert status is not None
        return status if status >= 0 else 128 - status

    async def _kill_others(self) -> None:
        while others := descendants({self.pid} | {process.pid for process in self._known if process.is_running()}):
            for process in others:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            await asyncio.sleep(0.005)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._watch)
        os.close(self._watch)
        self.ended.set()


def descendants(leaders: set[int]) -> list[psutil.Process]:
    """What lives of some sessions and of their members' descendants, without this process' own children."""
    found = {process.pid: process for process in psutil.process_iter(["ppid", "status"])}
    members = leaders | {pid for pid in found if _session_of(pid) in leaders}
    while more := {pid for pid, p in found.items() if p.info["ppid"] in members} - members:
        members |= more
    return [p for pid, p in found.items() if pid in members and p.info["ppid"] != os.getpid() and _lives(p)]


def of_sessions(leaders: set[int]) -> list[psutil.Process]:
    """What lives of some sessions."""
    found = psutil.process_iter(["status"])
    return [process for process in found if _session_of(process.pid) in leaders and _lives(process)]


def _lives(process: psutil.Process) -> bool:
    return process.info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _session_of(pid: int) -> int | None:
    """None: there is no such process any more."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _before_exec() -> Callable[[], None]:
    """A `preexec_fn`."""
    libc, parent = _libc, os.getpid()

    def in_child() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)

    return in_child

"""Pool of sandbox processes that evaluate input of clients or model folders, and can be killed.

Tenants are served in round-robin order, and one tenant never occupies all processes. If a question kills its process,
its tenant keeps the slot until a new process has started, so other tenants do not wait for the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from baton.config import child_environment
from baton.errors import Overloaded
from baton.sandbox import HEADER, ReplyKind
from baton.tasks import Flag, seen_through
from baton.turns import Turns

logger = logging.getLogger(__name__)
NUM_PROCESSES = 2
WAIT_S = 10.0
"""Time limit for a question in the queue."""
ANSWER_S = 10.0
"""Wall-time limit for an answer, in addition to the limit on processor time: the machine may be busy."""
START_S = 60.0
LONG_S = 0.1
"""A question that takes longer makes the pool start a spare process."""
MAX_PIECE_BYTES = 2**18
MAX_WAITING_BYTES = 32 * 2**20
OVERHEAD_BYTES = 1024
"""Bytes that a question counts in addition to its own."""


class Reply(NamedTuple):
    """Outcome of a question, with the process's answer."""

    kind: ReplyKind
    text: bytes = b""


class Sandboxes:
    """Pool of processes that run one module. Processes start on demand.

    Args:
        module: run as `python -m MODULE PARENT ARGUMENTS...`; it calls `baton.sandbox.serve`.
        setup: the first question to each process.
        name: a phrase for their work, for messages.
    """

    def __init__(self, module: str, arguments: Sequence[str] = (), *, setup: bytes = b"", name: str) -> None:
        self._command: list[str] = [sys.executable, "-P", "-m", module, str(os.getpid()), *arguments]
        self._setup = setup
        self._name = name
        self._turns = Turns(NUM_PROCESSES, MAX_WAITING_BYTES)
        self._idle: list[_Sandbox] = []
        self._all: set[_Sandbox] = set()
        self._renewals: set[asyncio.Task[None]] = set()
        self._spare: asyncio.Future[None] | None = None
        """A spare process that is starting; None: there is none."""
        self._is_closed = False

    def turn(self, owner: str, num_bytes: int) -> SandboxTurn:
        """Return an async context manager that holds a slot for one question.

        If the caller leaves before the answer, the slot is held until the process has finished the question.

        Args:
            owner: the tenant.
            num_bytes: size of the question.
        """
        return SandboxTurn(self, owner, num_bytes + OVERHEAD_BYTES)

    async def take_turn(self, owner: str, size: int) -> None:
        """Wait for a slot.

        Raises:
            Overloaded: too many questions of the tenant or of all tenants wait.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turns.take(owner, size)
        except TimeoutError:
            raise Overloaded(f"many requests wait for {self._name}; try again later") from None

    def end_turn(self, owner: str, asked: _Sandbox | None) -> None:
        """Free a slot: at once or, if the question is unanswered or has ended the process, when one is idle again."""
        if asked is None:
            self._turns.end(owner)
            return
        renewal = asyncio.create_task(self._renew(owner, asked))
        self._renewals.add(renewal)
        renewal.add_done_callback(self._renewals.discard)

    async def start(self) -> Reply:
        """Start a process before it is needed, and return its answer to the setup."""
        sandbox = _Sandbox(self._command)
        self._all.add(sandbox)
        reply = await sandbox.ask(self._setup, START_S)
        if reply.kind is ReplyKind.ANSWERED:
            self.give_back(sandbox)
        else:
            await self._forget(sandbox)
        return reply

    def close(self) -> None:
        """Kill the processes. No question is answered afterwards."""
        self._is_closed = True
        for sandbox in self._all:
            sandbox.end()
            sandbox.release()

    async def taken(self) -> _Sandbox:
        """Return an idle process or a new one, for the holder of a slot.

        Raises:
            Overloaded: the process does not start.
        """
        while True:
            while self._idle:
                sandbox = self._idle.pop()
                if sandbox.is_idle:
                    return sandbox
                await self._forget(sandbox)
            starting = self._spare or asyncio.ensure_future(self._start())
            await seen_through(starting)
            starting.result()

    def start_spare(self) -> None:
        """Start one more process, if there is room for one, because a question takes long and others may follow."""
        if len(self._all) < NUM_PROCESSES and self._spare is None:
            self._spare = asyncio.ensure_future(self._start())
            self._spare.add_done_callback(self._has_spare)

    def _has_spare(self, spare: asyncio.Future[None]) -> None:
        self._spare = None
        if not spare.cancelled():
            spare.exception()  # mark it as retrieved; the next question that needs a process gets an error itself

    def give_back(self, sandbox: _Sandbox) -> None:
        """Return an idle process to the pool."""
        self._idle.append(sandbox)

    async def _renew(self, owner: str, sandbox: _Sandbox) -> None:
        try:
            await sandbox.is_settled.wait()
            if sandbox.is_idle:
                self.give_back(sandbox)
                return
            await self._forget(sandbox)
            with contextlib.suppress(Overloaded):
                await self._start()
        finally:
            self._turns.end(owner)

    async def _start(self) -> None:
        """Start a process.

        Raises:
            Overloaded: the process does not start.
        """
        if self._is_closed:
            raise Overloaded(f"{self._name} has ended with its router")
        reply = await self.start()
        if reply.kind is ReplyKind.ANSWERED:
            return
        logger.error("the process for %s does not start: %s %s", self._name, reply.kind.name, reply.text)
        raise Overloaded(f"the process for {self._name} does not start; try again later")

    async def _forget(self, sandbox: _Sandbox) -> None:
        await asyncio.to_thread(sandbox.end)
        sandbox.release()
        self._all.discard(sandbox)


class SandboxTurn:
    """Async context manager: a slot for one question. Entering it raises `Overloaded` if too many questions wait."""

    def __init__(self, sandboxes: Sandboxes, owner: str, size: int) -> None:
        self._sandboxes = sandboxes
        self._owner = owner
        self._size = size
        self._asked: _Sandbox | None = None
        """The process that was asked; None: it is back in the pool, or no process was asked."""

    async def __aenter__(self) -> SandboxTurn:
        await self._sandboxes.take_turn(self._owner, self._size)
        return self

    async def __aexit__(self, *of_error: object) -> None:
        self._sandboxes.end_turn(self._owner, self._asked)

    async def ask(self, question: bytes) -> Reply:
        """Ask the question and wait for the answer.

        Raises:
            Overloaded: no process starts, or the answer takes longer than `ANSWER_S`.
        """
        sandbox = self._asked = await self._sandboxes.taken()
        reply = await sandbox.ask(question, ANSWER_S, self._sandboxes.start_spare)
        if reply.kind is ReplyKind.LATE:
            raise Overloaded(f"the machine is busy: no answer within {ANSWER_S:g} s; try again later")
        if sandbox.is_idle:
            self._sandboxes.give_back(sandbox)
            self._asked = None
        return reply


class _Sandbox:
    """One process and the socket to it. It belongs to the event loop in which it is created."""

    def __init__(self, command: list[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection, inner = socket.socketpair()
        self._connection.setblocking(False)
        with inner:
            # The process ends with the thread that starts it (`baton.parent`): here, the thread of the event loop.
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                command,
                env=child_environment(os.environ),  # others have written what it runs, so it gets no secret
                stdin=inner.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._loop.add_reader(self._connection, self._receive)
        self.is_settled = Flag()
        """Set while no question is being answered."""
        self.is_settled.set()
        self._reply: asyncio.Future[Reply] | None = None
        """Future of the answer; None: no caller waits for one."""
        self._timer: asyncio.TimerHandle | None = None
        self._unsent = memoryview(b"")
        self._received = bytearray()
        self._is_sending = self._is_late = self._has_ended = False

    @property
    def is_idle(self) -> bool:
        """True if the process can take a question."""
        return self.is_settled.is_set() and not self._has_ended and self._process.poll() is None

    async def ask(self, question: bytes, within_s: float, on_long: Callable[[], None] = lambda: None) -> Reply:
        """Return the answer. If the caller is cancelled, the process stays busy with the question.

        Args:
            on_long: called if it takes longer than LONG_S.
        """
        self.is_settled.clear()
        self._timer = self._loop.call_later(LONG_S, self._is_long, within_s, on_long)
        self._reply = self._loop.create_future()
        self._unsent = memoryview(HEADER.pack(ReplyKind.ANSWERED, len(question)) + question)
        self._send()
        found = await self._reply
        if found.kind is not ReplyKind.FATAL:
            return found
        status = await asyncio.to_thread(self._process.wait)
        if self._is_late:
            return Reply(ReplyKind.LATE)
        return Reply(ReplyKind.TOO_LONG) if status == -signal.SIGPROF else found

    def end(self) -> None:
        """Kill the process and wait for its end: freeing its memory may take a while."""
        self._process.kill()
        self._process.wait()

    def release(self) -> None:
        """Close the socket after the process has ended."""
        if not self._loop.is_closed():
            self._lost()
        self._connection.close()

    def _is_long(self, within_s: float, on_long: Callable[[], None]) -> None:
        self._timer = self._loop.call_later(within_s - LONG_S, self._is_overdue)
        on_long()

    def _is_overdue(self) -> None:
        self._is_late = True
        self._process.kill()

    def _send(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            self._loop.add_writer(self._connection, self._send)
            self._is_sending = True
        except OSError:
            self._lost()
        else:
            if self._is_sending:
                self._loop.remove_writer(self._connection)
            self._is_sending = False

    def _receive(self) -> None:
        try:
            data = self._connection.recv(MAX_PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        self._received += data
        if len(self._received) < HEADER.size:
            return
        kind, num_bytes = HEADER.unpack_from(self._received)
        if len(self._received) >= HEADER.size + num_bytes:
            text, self._received = bytes(self._received[HEADER.size :]), bytearray()
            self._has_ended |= kind == ReplyKind.EXHAUSTED
            self._settle(Reply(ReplyKind(kind), text))

    def _lost(self) -> None:
        """Record that the process has closed its end of the socket."""
        self._loop.remove_reader(self._connection)
        self._loop.remove_writer(self._connection)
        self._has_ended = True
        self._settle(Reply(ReplyKind.FATAL))

    def _settle(self, reply: Reply) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)
        self._timer = self._reply = None
        self.is_settled.set()

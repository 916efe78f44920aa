"""First process of a container that is a Ray node: runs Ray, and relays the workers' output to its standard output.

    python -P -m deploy.ray_pools.node --folder FOLDER [--log-format json] -- ray start --block ...

Ray writes the output of its actors and their children to files, which `kubectl logs` and log collectors do not see.
Instead, a worker's actor connects to a socket (`SOCKET` in Ray's environment; `deploy.ray_pools.node_link` is the
client):

output    the output of the worker and its children, line by line
state     `starting`, `ready`, `away` (it does not answer, or takes no new work), `ended`, with a reason
latest    returns the latest lines of workers with this id on this node (used by `worker.log`)

The folder has files for probes: `workers` with the state of each worker; `ready`, which exists while there is a worker
and all workers on this node accept traffic; and `started`, which exists since the node was first ready, or has had no
worker for `IDLE_S`.

SIGTERM and SIGINT are forwarded to Ray. The exit status is Ray's. As a container's first process it also reaps orphans.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from baton.visible import in_line

SOCKET = "NODE_SOCKET"
"""Environment variable with the path of the socket for actors."""
IDLE_S = 60.0
"""Time without a worker after which a node counts as started: there is no model to wait for."""
MAX_LINE = 2**16
"""Maximum bytes of a line; longer lines are split."""
MAX_KEPT_LINES, MAX_KEPT_BYTES, MAX_KEPT_IDS = 400, 4096, 16
"""Limits of the lines in memory: latest lines per worker, bytes per line, and latest worker ids."""
LAST_WORDS_S = 2.0
"""Timeout, after Ray's end, for the remaining output."""
TICK_S = 1.0
LEVELS = {"starting": "INFO", "ready": "INFO", "away": "WARNING", "ended": "ERROR", "left": "INFO"}


@dataclass(frozen=True, slots=True)
class Entry:
    """Line about a worker, or of a worker, that is not one of Baton's log lines."""

    level: str
    logger: str
    message: str
    worker: str = ""


class Lines:
    """Writer of whole lines to a file descriptor, in the format of `baton.telemetry.logs`."""

    def __init__(self, fd: int, log_format: str) -> None:
        self._fd = fd
        self._is_json = log_format == "json"

    def relay(self, line: bytes, logger: str, worker: str = "") -> None:
        """Write a line of another process. In JSON format, other lines are converted to JSON log lines."""
        text = line.decode(errors="replace").rstrip("\r\n")
        if not self._is_json:
            self._write(f"[{worker}] {text}" if worker else text)
            return
        with contextlib.suppress(ValueError):
            entry = json.loads(text)
            if isinstance(entry, dict) and "message" in entry:
                self._write(json.dumps({**entry, "worker": worker}) if worker else text)
                return
        if text.strip():
            self.write(Entry("INFO", logger, text, worker))

    def write(self, entry: Entry) -> None:
        """Write a line of this process."""
        now = datetime.now(UTC).isoformat(timespec="microseconds")
        if self._is_json:
            parts = {"timestamp": now, "level": entry.level, "logger": entry.logger, "process": os.getpid()}
            parts |= {"service": "baton-node", "message": entry.message}
            self._write(json.dumps(parts | ({"worker": entry.worker} if entry.worker else {})))
        else:
            prefix = f"[{entry.worker}] " if entry.worker else ""
            self._write(f"{prefix}{now} {entry.level} {os.getpid()} {entry.logger}: {entry.message}")

    def _write(self, text: str) -> None:
        left = memoryview(in_line(text).encode() + b"\n")
        while left:
            left = left[os.write(self._fd, left) :]


@dataclass(slots=True)
class WorkersHere:
    """States of the workers that Ray has placed on this node, by id, in words. Pure.

    Args:
        since_s: time since which there has been no worker.
    """

    since_s: float
    is_started: bool = False
    says: dict[str, str] = field(default_factory=dict)
    _ready: set[str] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        """True if there is a worker, and all workers accept traffic."""
        return bool(self.says) and self.says.keys() == self._ready

    def become(self, worker: str, state: str, reason: str) -> None:
        """Record a worker's state."""
        self.says[worker] = f"{worker} {in_words(state, reason)}"
        (self._ready.add if state == "ready" else self._ready.discard)(worker)
        self.is_started |= self.is_ready

    def forget(self, worker: str, now_s: float) -> None:
        """Record that a worker is gone."""
        self.says.pop(worker, None)
        self._ready.discard(worker)
        self.since_s = now_s

    def look(self, now_s: float) -> None:
        """Update the state for the current time."""
        self.is_started |= not self.says and now_s - self.since_s >= IDLE_S


def in_words(state: str, reason: str) -> str:
    """Return a worker's state as a predicate."""
    if state == "ended" and reason:
        return reason
    words = {"starting": "starts", "ready": "takes traffic", "away": "takes no traffic", "left": "has left"}
    return f"{words.get(state, state)}{': ' if reason else ''}{reason}"


class Node:
    """Server for the actors' reports, and writer of the probes' files.

    Args:
        folder: folder of the socket and the probes' files. It is recreated.
    """

    def __init__(self, folder: Path, lines: Lines) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        self._folder = folder
        self._lines = lines
        self._workers = WorkersHere(time.monotonic())
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._latest: dict[str, deque[bytes]] = {}
        """Latest lines by worker; the most recent writer comes last."""
        self._show()

    @property
    def address(self) -> Path:
        """Path of the socket for actors."""
        return self._folder / "socket"

    async def serve(self, ray: socket.socket) -> None:
        """Relay the output of actors and of Ray until Ray and the actors have ended."""
        server = await asyncio.start_unix_server(self._connected, self.address, limit=MAX_LINE)
        self.address.chmod(0o600)
        async with server:
            reader, _ = await asyncio.open_connection(sock=ray, limit=MAX_LINE)
            relaying = asyncio.create_task(self._relay(reader, "ray"))
            while not relaying.done():
                self._workers.look(time.monotonic())
                self._show()
                await asyncio.wait([relaying], timeout=TICK_S)
            if self._connections:
                await asyncio.wait(self._connections, timeout=LAST_WORDS_S)
            for writer in self._connections.values():
                writer.transport.abort()
            await asyncio.gather(*self._connections)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve an actor's connection, whose first line names the worker and the stream."""
        connection = asyncio.current_task()
        assert connection is not None
        self._connections[connection] = writer
        try:
            head = json.loads(await reader.readline() or b"{}")
            if head.get("stream") == "output":
                await self._relay(reader, "output", head["worker"])
            elif head.get("stream") == "latest":
                writer.writelines(self._latest.get(head["worker"], ()))
                await writer.drain()
            elif head.get("stream") == "state":
                await self._follow(reader, head["worker"])
        finally:
            del self._connections[connection]
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, logger: str, worker: str = "") -> None:
        while line := await _line(reader):
            self._lines.relay(line, logger, worker)
            if worker:
                self._keep(line, worker)

    def _keep(self, line: bytes, worker: str) -> None:
        kept = self._latest.pop(worker, None) or deque(maxlen=MAX_KEPT_LINES)
        kept.append(line.rstrip(b"\n")[:MAX_KEPT_BYTES] + b"\n")
        self._latest[worker] = kept
        if len(self._latest) > MAX_KEPT_IDS:
            del self._latest[next(iter(self._latest))]

    async def _follow(self, reader: asyncio.StreamReader, worker: str) -> None:
        state = ""
        while line := await _line(reader):
            said = json.loads(line)
            state = said["state"]
            self._note(worker, state, said["reason"])
        if state not in ("ended", "left"):
            self._note(worker, "ended", "is gone with its actor")
        self._workers.forget(worker, time.monotonic())
        self._show()

    def _note(self, worker: str, state: str, reason: str) -> None:
        self._workers.become(worker, state, reason)
        self._lines.write(Entry(LEVELS.get(state, "INFO"), "node", self._workers.says[worker], worker))
        self._show()

    def _show(self) -> None:
        """Write the probes' files."""
        text = "; ".join(self._workers.says.values()) or "no worker is here"
        temporary = self._folder / "workers.new"
        temporary.write_text(text + "\n")
        temporary.rename(self._folder / "workers")
        for name, holds in (("ready", self._workers.is_ready), ("started", self._workers.is_started)):
            if holds:
                (self._folder / name).touch()
            else:
                (self._folder / name).unlink(missing_ok=True)


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, or the first part of a line that is too long; empty: end of the stream."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        return await reader.readexactly(error.consumed)
    except asyncio.IncompleteReadError as error:
        return error.partial
    except ConnectionError:
        return b""


def run(command: Sequence[str], folder: Path, lines: Lines) -> int:
    """Run Ray until it ends, and return its exit status like a shell.

    Raises:
        OSError: the command cannot be run.
    """
    signals = Signals()
    node = Node(folder, lines)
    ours, rays = socket.socketpair()
    relaying = threading.Thread(target=_serve, args=(node, ours), daemon=True)
    relaying.start()
    with rays:
        environment = {**os.environ, SOCKET: str(node.address)}
        process = subprocess.Popen(command, stdout=rays.fileno(), stderr=rays.fileno(), env=environment)
    signals.pass_on_to(process.pid)
    status = _reap_until(process.pid)
    relaying.join(2 * LAST_WORDS_S)
    return status


class Signals:
    """Forwarder of signals to Ray, including those that arrive before Ray has started."""

    def __init__(self) -> None:
        self._pid = 0
        self._early: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)

    def pass_on_to(self, pid: int) -> None:
        """Forward signals to that process from now on."""
        self._pid = pid
        for number in self._early:
            os.kill(pid, number)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if self._pid:
            os.kill(self._pid, number)
        else:
            self._early.append(number)


def _serve(node: Node, ray: socket.socket) -> None:
    asyncio.run(node.serve(ray))


def _reap_until(pid: int) -> int:
    """Reap children, including adopted orphans, until the given one has ended."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return 128 - code if code < 0 else code


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.ray_pools.node", description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder of the socket and the probes' files")
    parser.add_argument("--log-format", choices=["text", "json"], default="text")
    parser.add_argument("command", nargs="+", help="command that runs Ray, after --")
    args = parser.parse_args()
    sys.exit(run(args.command, args.folder, Lines(sys.stdout.fileno(), args.log_format)))


if __name__ == "__main__":
    main()

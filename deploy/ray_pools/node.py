"""Node process: runs the workers of one Ray node, relays their output, and in a container also runs Ray.

    python -P -m deploy.ray_pools.node --folder FOLDER [--log-format json] [--names-releases] -- ray start --block ...

It is the first process of a worker's container, and the command after -- runs Ray. On one machine `baton up` starts it
without a command. On a Ray node without a node process, each actor starts its own. A worker's process is a child of the
node process, so the worker serves on when Ray fails (`deploy.ray_pools.supervisor`). If Ray ends while workers run, the
node process starts Ray again, and new actors adopt the workers. It also kills Ray if the raylet does not answer health
checks (`--raylet`).

A client connects to a socket, whose path is in Ray's environment (`SOCKET`). Its first line names a worker, the Ray
namespace of its cluster, and one of two streams:

worker    orders of the worker's actor (`deploy.ray_pools.node_link`): `start`, `adopt`, `signal`, and `state` with the
          state that it observes: `starting`, `ready`, or `away` (the worker does not answer, or takes no new work). The
          node process answers with the worker's report, its end, or an error
latest    the node process returns the latest lines of workers with this name on this node (`worker.log` reads them)

Lines begin with the worker's id. With --names-releases, and once workers of several clusters have run here, as those of
several models do, lines begin with the release of the worker's model and its id.

The folder has four files for probes. `workers` has the state of each worker. `ready` exists while there is a worker and
all workers on this node accept traffic. `started` exists once the node has been ready, or has had no worker for
`IDLE_S`. `alive` is touched every second.

The node process forwards SIGTERM and SIGINT to Ray, and kills the workers when Ray has ended. Its exit status is Ray's.
It also reaps orphaned processes, as a container's first process must.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import os
import queue
import resource
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton.errors import WorkerFailed
from baton.visible import in_line
from deploy.processes import last_line_of, tell_parent
from deploy.ray_pools.raylet import until_silent
from deploy.ray_pools.supervisor import StartOrder, Supervisor, WorkerName, WorkerProcess

SOCKET = "NODE_SOCKET"
"""Environment variable with the path of the socket for actors."""
FILES = frozenset({"socket", "workers", "workers.new", "ready", "started", "alive"})
"""Names in the folder."""
IDLE_S = 60.0
"""Time without a worker after which a node counts as started: there is no model to wait for."""
MAX_LINE = 2**16
"""Maximum bytes of a line of output; longer lines are split."""
MAX_ORDER = 2**22
"""Maximum bytes of an actor's order, which has the worker's environment."""
MAX_KEPT_LINES, MAX_KEPT_BYTES, MAX_KEPT_IDS = 400, 4096, 16
"""Limits of the lines in memory: latest lines per worker, bytes per line, and latest worker ids."""
MAX_QUEUED, FULL_S = 1000, 5.0
"""Maximum number of queued lines. If there are more, each further line of a worker waits, for at most `FULL_S`."""
LAST_WORDS_S = 2.0
"""Timeout, after the end of a process, for its remaining output."""
REPORT_S = 0.2
"""Timeout for the report of a worker that has ended."""
TICK_S = 1.0
"""Interval at which the probes' files are written."""
RESTART_S = (1.0, 2.0, 5.0, 10.0)
"""Waits before the restarts of Ray if it repeatedly ends."""
STABLE_S = 60.0
"""Time without an end of Ray after which the waits start from the first one again."""
MAX_FILES = 2**16
"""Maximum number of open files of a worker, unless the hard limit is lower."""
PR_SET_CHILD_SUBREAPER = 36
LEVELS = {"starting": "INFO", "ready": "INFO", "away": "WARNING", "ended": "ERROR", "left": "INFO"}


@dataclass(frozen=True, slots=True)
class Entry:
    """Log line of the node process, or a line of other output that becomes a log line."""

    level: str
    logger: str
    message: str
    worker: str = ""


class Lines:
    """Writer of whole lines to a file descriptor, in the format of `baton.telemetry.logs`.

    It writes in a thread, so that a stalled reader does not block the event loop.

    Args:
        names_releases: name workers by release and id, even while those of one cluster run here.
    """

    def __init__(self, fd: int, log_format: str, *, names_releases: bool = False) -> None:
        self._fd = fd
        self.names_releases = names_releases
        self._is_json, self._is_raw = log_format == "json", log_format == "raw"
        self._queue: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._write_queued, name="lines", daemon=True).start()

    async def room(self) -> None:
        """Wait for at most `FULL_S` if more than `MAX_QUEUED` lines are queued."""
        if self._queue.qsize() > MAX_QUEUED:
            await asyncio.to_thread(self.flush, FULL_S)

    def flush(self, timeout_s: float) -> None:
        """Block until the lines so far are written, for at most `timeout_s`."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(timeout_s)

    @property
    def file(self) -> str:
        """Path of the file to which the lines go; empty: they go to no file."""
        path = Path(f"/proc/self/fd/{self._fd}").resolve()
        return str(path) if path.is_file() else ""

    def relay(self, line: bytes, logger: str, worker: str = "") -> None:
        """Write a line of another process. In JSON format, a line that is not a log line is converted to one."""
        text = line.decode(errors="replace").rstrip("\r\n")
        if not self._is_json:
            self._write(f"[{worker}] {text}" if worker and not self._is_raw else text)
            return
        with contextlib.suppress(ValueError):
            entry = json.loads(text)
            if isinstance(entry, dict) and "message" in entry:
                self._write(json.dumps({**entry, "worker": worker}) if worker else text)
                return
        if text.strip():
            self.write(Entry("INFO", logger, text, worker))

    def write(self, entry: Entry) -> None:
        """Write a log line."""
        if self._is_json:
            now = datetime.now(UTC).isoformat(timespec="microseconds")
            parts = {"timestamp": now, "level": entry.level, "logger": entry.logger, "process": os.getpid()}
            parts |= {"service": "baton-node", "message": entry.message}
            self._write(json.dumps(parts | ({"worker": entry.worker} if entry.worker else {})))
        else:
            prefix = f"[{entry.worker}] " if entry.worker and not self._is_raw else ""
            now = f"{time.strftime('%Y-%m-%d %H:%M:%S')},{datetime.now(UTC).microsecond // 1000:03d}"
            self._write(f"{prefix}{now} {entry.level} {os.getpid()} {entry.logger}: {entry.message}")

    def _write(self, text: str) -> None:
        self._queue.put(text)

    def _write_queued(self) -> None:
        while True:
            text = self._queue.get()
            if isinstance(text, threading.Event):
                text.set()
                continue
            left = memoryview(in_line(text).encode() + b"\n")
            with contextlib.suppress(OSError):  # the reader is gone
                while left:
                    left = left[os.write(self._fd, left) :]


@dataclass(slots=True)
class WorkersHere:
    """States of the workers that Ray has placed on this node, by name, as predicates. Pure.

    Args:
        since_s: time since which there has been no worker.
    """

    since_s: float
    is_started: bool = False
    says: dict[WorkerName, str] = field(default_factory=dict)
    _ready: set[WorkerName] = field(default_factory=set)

    @property
    def is_ready(self) -> bool:
        """True if there is a worker, and all workers accept traffic."""
        return bool(self.says) and self.says.keys() == self._ready

    def become(self, worker: WorkerName, state: str, reason: str) -> None:
        """Record a worker's state, and the reason for it; empty: no reason."""
        self.says[worker] = in_words(state, reason)
        (self._ready.add if state == "ready" else self._ready.discard)(worker)
        self.is_started |= self.is_ready

    def forget(self, worker: WorkerName, now_s: float) -> None:
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
    """Server that carries out the actors' orders, and writes the probes' files.

    Args:
        folder: folder of the socket and the probes' files. The node owns it: it empties it now, and `serving` removes
            it.
        lines: writer of the workers' output and of log lines.
        tells_states: also write lines about the workers' states.

    Raises:
        OSError: the folder cannot be created, or has other files.
    """

    def __init__(self, folder: Path, lines: Lines, *, tells_states: bool) -> None:
        _remove(folder)
        folder.mkdir(parents=True, mode=0o700)
        self._folder = folder
        self._lines = lines
        self._tells_states = tells_states
        self._is_ending = False
        self._workers = WorkersHere(time.monotonic())
        self.supervisor = Supervisor(self._tell_orphaned)
        self._connections: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}
        self._outputs: dict[WorkerProcess, asyncio.Task[None]] = {}
        self._latest: dict[WorkerName, deque[bytes]] = {}
        """Latest lines of each worker; the worker that wrote last comes last."""
        self._clusters: set[str] = set()
        """Clusters of all workers that have run here."""
        self._show()

    @property
    def address(self) -> Path:
        """Path of the socket for actors."""
        return self._folder / "socket"

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Context manager: serves actors; at its end the workers are killed, and their last output is relayed."""
        server = await asyncio.start_unix_server(self._connected, self.address, limit=MAX_ORDER)
        self.address.chmod(0o600)
        async with server:
            ticking = asyncio.create_task(self._tick())
            try:
                yield
            finally:
                self._is_ending = True
                ticking.cancel()
                await self.supervisor.kill_all()
                if self._connections:
                    await asyncio.wait(self._connections, timeout=LAST_WORDS_S)
                for writer in self._connections.values():
                    writer.transport.abort()
                await asyncio.gather(*self._connections)
                self._lines.flush(LAST_WORDS_S)
                shutil.rmtree(self._folder, ignore_errors=True)

    def say(self, message: str, level: str = "WARNING", worker: WorkerName | None = None) -> None:
        """Write a log line of this process."""
        self._lines.write(Entry(level, "node", message, self.label(worker)))

    async def relay(self, output: socket.socket, logger: str, worker: WorkerName | None = None) -> None:
        """Write the lines that a process sends to this socket, until its end."""
        reader, writer = await asyncio.open_connection(sock=output, limit=MAX_LINE)
        while line := await _line(reader):
            self._lines.relay(line, logger, self.label(worker))
            if worker:
                self._keep(line, worker)
            await self._lines.room()
        writer.close()

    async def _tick(self) -> None:
        while True:
            self._workers.look(time.monotonic())
            self._show()
            with contextlib.suppress(OSError):
                (self._folder / "alive").touch()
            await asyncio.sleep(TICK_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection. Its first line names the worker and the stream."""
        connection = asyncio.current_task()
        assert connection is not None
        self._connections[connection] = writer
        try:
            head = json.loads(await reader.readline() or b"{}")
            worker = WorkerName(head.get("cluster", ""), head.get("worker", ""), head.get("release", ""))
            if head.get("stream") == "latest":
                writer.writelines(self._latest.get(worker, ()))
                await writer.drain()
            elif head.get("stream") == "worker":
                self._clusters.add(worker.cluster)
                await self._serve_actor(reader, writer, worker)
        except ConnectionError:
            pass  # the other process has ended
        finally:
            del self._connections[connection]
            writer.close()

    async def _serve_actor(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: WorkerName) -> None:
        """Carry out the orders of a worker's actor until the actor is gone."""
        worker: WorkerProcess | None = None
        following: asyncio.Task[None] | None = None
        try:
            while line := await reader.readline():
                order = json.loads(line)
                match order.pop("order"):
                    case "start" | "adopt" as kind:
                        try:
                            worker = await (self._start if kind == "start" else self._adopt)(name, writer, order)
                        except WorkerFailed as error:
                            _answer(writer, error=str(error))
                        else:
                            following = asyncio.create_task(self._follow(worker, writer))
                    case "signal" if worker is not None and worker.owner is writer:
                        self.supervisor.send_signal(worker, order["number"])
                    case "state" if worker in self._outputs:
                        self._note(name, order["state"], order["reason"])
        finally:
            if following:
                following.cancel()
            if worker:
                self.supervisor.release(worker, writer)

    async def _start(self, name: WorkerName, owner: object, order: dict[str, Any]) -> WorkerProcess:
        worker = await self.supervisor.start(name, StartOrder(**order), owner)
        self._outputs[worker] = asyncio.create_task(self._live(worker), name=str(name))
        return worker

    async def _adopt(self, name: WorkerName, owner: object, order: dict[str, Any]) -> WorkerProcess:
        worker = self.supervisor.adopt(name, owner, order["gpus"])
        self.say(f"{self.label(name)} is adopted by a new Ray actor", "INFO", name)
        return worker

    async def _live(self, worker: WorkerProcess) -> None:
        """Relay a worker's output and report until its end, and record its end."""
        relaying = asyncio.create_task(self.relay(worker.output, "output", worker.name))
        reader, writer = await asyncio.open_connection(sock=worker.reports, limit=MAX_ORDER)
        reporting = asyncio.create_task(reader.readline())
        first: list[asyncio.Future[Any]] = [reporting, worker.ended]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([reporting], timeout=REPORT_S)  # a child of the worker may still have the socket
        if reporting.done() and (line := reporting.result()):
            worker.report.set_result(line.decode())
        reporting.cancel()
        writer.close()
        status = await worker.ended
        await asyncio.wait([relaying], timeout=LAST_WORDS_S)
        relaying.cancel()  # a child of the worker may still have the socket
        if self.supervisor.workers.get(worker.name) in (None, worker):
            self._note(worker.name, "ended" if status else "left", end_in_words(status))
            self._workers.forget(worker.name, time.monotonic())
            self._show()
        del self._outputs[worker]

    async def _follow(self, worker: WorkerProcess, writer: asyncio.StreamWriter) -> None:
        """Send an actor its worker's report and end."""
        living = self._outputs[worker]
        first: list[asyncio.Future[Any]] = [worker.report, living]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if worker.report.done():
            _answer(writer, report=json.loads(worker.report.result()))
        await asyncio.wait([living])
        last = last_line_of(b"\n".join(line.rstrip() for line in self._latest.get(worker.name, ())))
        _answer(writer, ended=worker.ended.result(), last_line=last, log=self._lines.file)

    def _keep(self, line: bytes, worker: WorkerName) -> None:
        kept = self._latest.pop(worker, None) or deque(maxlen=MAX_KEPT_LINES)
        kept.append(line.rstrip(b"\n")[:MAX_KEPT_BYTES] + b"\n")
        self._latest[worker] = kept
        if len(self._latest) > MAX_KEPT_IDS:
            del self._latest[next(iter(self._latest))]

    def label(self, worker: WorkerName | None) -> str:
        """Return the worker's name in output; empty: no worker."""
        if worker is None:
            return ""
        return str(worker) if self._lines.names_releases or len(self._clusters) > 1 else worker.id

    def _tell_orphaned(self, worker: WorkerName, what: str) -> None:
        if not self._is_ending:
            self._keep(f"{worker.id} {what}".encode(), worker)
            self.say(f"{self.label(worker)} {what}", worker=worker)

    def _note(self, worker: WorkerName, state: str, reason: str) -> None:
        self._workers.become(worker, state, reason)
        if self._tells_states:
            self.say(f"{self.label(worker)} {self._workers.says[worker]}", LEVELS.get(state, "INFO"), worker)
        self._show()

    def _show(self) -> None:
        """Write the probes' files. If that is impossible, for instance on a full disk, they stay as they are."""
        with contextlib.suppress(OSError):
            self._write_files()

    def _write_files(self) -> None:
        states = self._workers.says.items()
        text = "; ".join(f"{self.label(worker)} {state}" for worker, state in states) or "no worker is here"
        temporary = self._folder / "workers.new"
        temporary.write_text(text + "\n")
        temporary.rename(self._folder / "workers")
        for name, holds in (("ready", self._workers.is_ready), ("started", self._workers.is_started)):
            if holds:
                (self._folder / name).touch()
            else:
                (self._folder / name).unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    """Remove the folder of an earlier node process. Raises OSError if it has other files, which are a user's."""
    if folder.exists() and (others := {path.name for path in folder.iterdir()} - FILES):
        raise FileExistsError(f"{folder} is no folder of a node process: it has {', '.join(sorted(others)[:3])}")
    shutil.rmtree(folder, ignore_errors=True)


def _answer(writer: asyncio.StreamWriter, **values: object) -> None:
    writer.write(json.dumps(values).encode() + b"\n")


def end_in_words(status: int) -> str:
    """Return the end of a process as a predicate, from its exit status in `subprocess`; empty: it exited normally."""
    if status == 0:
        return ""
    if status > 0:
        return f"ended with status {status}"
    killed = "was killed by" if -status == signal.SIGKILL else "crashed with"
    hint = " (by the kernel, out of memory?)" if -status == signal.SIGKILL else ""
    try:
        return f"{killed} {signal.Signals(-status).name}{hint}"
    except ValueError:
        return f"{killed} signal {-status}"


async def _line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, or the first part of a line that is too long; empty: the stream has ended."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        return await reader.readexactly(error.consumed)
    except asyncio.IncompleteReadError as error:
        return error.partial
    except ConnectionError:
        return b""


class Stop:
    """Request to end the node process: SIGTERM or SIGINT. It is forwarded to Ray."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.ray_pid = 0
        self._number = 0

    def ask(self, number: int) -> None:
        """Record the signal, and forward it."""
        self._number = number
        self.asked.set()
        self.forward()

    def forward(self) -> None:
        """Send Ray the signal, if there was one and Ray runs."""
        if self.ray_pid and self._number:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ray_pid, self._number)


async def run(
    command: Sequence[str], folder: Path, lines: Lines, *, raylet: str = "", ready_fd: int | None = None
) -> int:
    """Run workers, and Ray if there is a command, until a signal arrives or Ray ends and no worker runs.

    Args:
        command: command that runs Ray; empty: Ray is not run here.
        folder: see `Node`.
        raylet: host:port of the raylet, to check its health; empty: it is not checked.
        ready_fd: descriptor to which the socket's path is written; None: it is not.

    Returns:
        Ray's last exit status as a shell shows it; 0 without a command.

    Raises:
        OSError: the command cannot be run, or the folder has other files.
    """
    node, stop = Node(folder, lines, tells_states=bool(command)), Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.ask, number)
    loop.add_signal_handler(signal.SIGCHLD, node.supervisor.reap)
    async with node.serving():
        if ready_fd is not None:
            tell_parent(ready_fd, socket=str(node.address))
        if command:
            return await _keep_ray(command, node, stop, raylet)
        await stop.asked.wait()
        return 0


async def _keep_ray(command: Sequence[str], node: Node, stop: Stop, raylet: str) -> int:
    """Run Ray, and start it again if it ends while workers run. Return its last exit status as a shell shows it."""
    num_failures = 0
    while True:
        began_s = time.monotonic()
        status = await _run_ray(command, node, stop, raylet)
        if stop.asked.is_set() or not node.supervisor.workers:
            return status
        num_failures = 0 if time.monotonic() - began_s > STABLE_S else num_failures + 1
        wait_s = RESTART_S[min(num_failures, len(RESTART_S) - 1)]
        names = ", ".join(sorted(node.label(each) for each in node.supervisor.workers))
        node.say(
            f"Ray has ended with status {status}, and these workers serve on: {names}; starting Ray again in "
            f"{wait_s:g} s"
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.asked.wait(), wait_s)
            return status


async def _run_ray(command: Sequence[str], node: Node, stop: Stop, raylet: str) -> int:
    """Run Ray until it ends or the raylet hangs, kill its remaining processes, and return its exit status."""
    ours, rays = socket.socketpair()
    with rays:
        environment = {**os.environ, SOCKET: str(node.address)}
        pid, ended = node.supervisor.popen(command, stdout=rays.fileno(), stderr=rays.fileno(), env=environment)
    relaying = asyncio.create_task(node.relay(ours, "ray"))
    watching = asyncio.create_task(until_silent(raylet)) if raylet else asyncio.get_running_loop().create_future()
    stop.ray_pid = pid
    stop.forward()
    try:
        first: list[asyncio.Future[Any]] = [ended, watching]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            node.say("the raylet does not answer health checks: Ray is killed")
            os.kill(pid, signal.SIGKILL)
        code = await ended
    finally:
        stop.ray_pid = 0
        watching.cancel()
    _kill_strays(node.supervisor)
    await asyncio.wait([relaying], timeout=LAST_WORDS_S)
    relaying.cancel()
    return 128 - code if code < 0 else code


def _kill_strays(supervisor: Supervisor) -> None:
    """Kill the remaining processes of Ray, whose parent has ended.

    They would keep Ray's ports. They are children of this process now (`_prepare`).
    """
    import psutil

    for child in psutil.Process().children():
        if not supervisor.is_own(child.pid):
            for process in (child, *child.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def _prepare() -> None:
    """Become the parent of orphaned descendants, and allow workers many open files."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.ray_pools.node", description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder of the socket and the probes' files")
    parser.add_argument("--log-format", choices=["text", "json", "raw"], default="text", help="raw: without worker ids")
    parser.add_argument("--raylet", default="", help="host:port of the raylet; Ray is killed if it does not answer")
    parser.add_argument("--names-releases", action="store_true", help="name workers by the release of their model, too")
    parser.add_argument("--ready-fd", type=int, help="inherited descriptor to which the socket's path is written")
    parser.add_argument("command", nargs="*", help="after --: command that runs Ray; none: Ray is not run here")
    args = parser.parse_args()
    _prepare()
    lines = Lines(sys.stdout.fileno(), args.log_format, names_releases=args.names_releases)
    sys.exit(asyncio.run(run(args.command, args.folder, lines, raylet=args.raylet, ready_fd=args.ready_fd)))


if __name__ == "__main__":
    main()

"""Worker processes of one Ray node. They are children of the node process, and therefore survive the end of Ray.

    RUNNING ── its actor is gone ──> ORPHANED ── a new actor adopts it ──> RUNNING
                                         └── after `orphan_timeout_s`: SIGTERM, it drains ──> ended
                                                                      └── after `end_timeout_s`: SIGKILL

A Ray actor orders its worker's start and end (`deploy.ray_pools.node_link`). Ray ends its actors when its raylet, its
head or the head's GCS fails. The worker then serves on as an orphan. When Ray is back, the controller creates a new
actor on this node, which adopts the worker. A worker that is not ready yet is killed, because the controller starts it
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.errors import WorkerFailed
from deploy.processes import tied
from deploy.ray_pools.gpus import free_gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that a process may use. Ray sets it for an actor."""
MAX_OOM_SCORE = "1000"
"""The highest `oom_score_adj`, as Ray sets it for its actors."""


@dataclass(frozen=True, slots=True)
class WorkerName:
    """Name of a worker on its node. Workers of several clusters, and so of several models, may share a node."""

    cluster: str
    """Ray namespace of its cluster; empty: its actor's release does not report it."""
    id: str
    """Worker id, unique in the cluster."""
    release: str = field(default="", compare=False)
    """Release of its model, for people. It is not part of the identity, because the next release takes over the id."""

    def __str__(self) -> str:
        return f"{self.release}/{self.id}" if self.release else self.id


OnOrphaned = Callable[[WorkerName, str], None]
"""Callback with the name of a worker that has no actor, and a predicate for the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOrder:
    """Order of an actor to start its worker."""

    command: Sequence[str]
    """The worker's command. `--ready-fd N` is appended."""
    environment: Mapping[str, str]
    """The whole environment of the process."""
    gpus: Sequence[str]
    """GPUs that Ray has assigned to the actor, as in CUDA_VISIBLE_DEVICES."""
    gpu_share: float
    """Share of each of its GPUs that the worker may use; 0: it uses none."""
    orphan_timeout_s: float
    """Maximum time in seconds for which the worker serves on without an actor."""
    end_timeout_s: float
    """Maximum time in seconds from SIGTERM to the end of a worker without an actor."""


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerProcess:
    """Process of one worker, from its start to its end. The node process owns its sockets."""

    name: WorkerName
    pid: int
    ended: asyncio.Future[int]
    """Exit status, as in `subprocess`."""
    output: socket.socket
    """Socket from which the node process reads the worker's output."""
    reports: socket.socket
    """Socket from which the node process reads the worker's report: one line, after it is ready or has failed."""
    gpu_share: float
    """Share of each of its GPUs that it uses; 0: it uses none."""
    gpus: Sequence[str]
    """GPUs that the process uses."""
    assigned: Sequence[str]
    """GPUs that Ray has assigned to its current actor. After a restart of Ray they may differ from `gpus`."""
    orphan_timeout_s: float
    """Maximum time in seconds for which it serves on without an actor."""
    end_timeout_s: float
    """Maximum time in seconds from SIGTERM to its end without an actor."""
    report: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The worker's report. It is never done if the process ends before the report."""
    owner: object = None
    """Connection of its actor; None: it is an orphan."""
    orphaned: asyncio.Task[None] | None = None
    """Task that ends the orphan after its timeouts."""
    is_leaving: bool = False
    """True after a signal to it. A worker that is leaving cannot be adopted."""


class Supervisor:
    """All worker processes of this node, by name. Use it from one event loop, in the process's main thread.

    Args:
        on_orphaned: called when a worker loses its actor, and again when its time without an actor is over.
    """

    def __init__(self, on_orphaned: OnOrphaned) -> None:
        self.workers: dict[WorkerName, WorkerProcess] = {}
        self._on_orphaned = on_orphaned
        self._children: dict[int, tuple[subprocess.Popen[bytes], asyncio.Future[int]]] = {}

    async def start(self, name: WorkerName, order: StartOrder, owner: object) -> WorkerProcess:
        """Start a worker. If a process still has this name, it is killed first, because the controller has given it up.

        Args:
            owner: connection of its actor.

        Raises:
            WorkerFailed: its GPUs are in use, or its command cannot be run.
        """
        if before := self.workers.get(name):
            self.send_signal(before, signal.SIGKILL)
            await asyncio.wait([before.ended])
        others = [*self.workers.values()]
        in_use: dict[str, float] = {}
        for gpu, share in ((gpu, other.gpu_share) for other in others for gpu in other.gpus):
            in_use[gpu] = in_use.get(gpu, 0.0) + share
        known = [gpu for other in others for gpu in (*other.assigned, *other.gpus)]
        gpus = free_gpus(order.gpus, order.gpu_share, in_use, known)
        if gpus is None:
            raise WorkerFailed(
                f"the GPUs {','.join(order.gpus)} that Ray has assigned to {name.id} are in use; this node runs "
                f"{', '.join(sorted(map(str, self.workers)))}; {name.id} can start when the orphans among them are "
                "adopted or have ended"
            )
        environment = {**order.environment, **({VISIBLE: ",".join(gpus)} if gpus else {})}
        worker = self._spawn(name, order, environment)
        worker.gpus, worker.assigned, worker.owner = gpus, order.gpus, owner
        self.workers[name] = worker
        worker.ended.add_done_callback(lambda _: self._forget(worker))
        return worker

    def adopt(self, name: WorkerName, owner: object, assigned: Sequence[str]) -> WorkerProcess:
        """Make the caller the owner of a running worker.

        Args:
            owner: connection of the new actor.
            assigned: GPUs that Ray has assigned to the new actor.

        Raises:
            WorkerFailed: no such worker runs here, or it is leaving.
        """
        worker = self.workers.get(name)
        if worker is None or worker.is_leaving:
            raise WorkerFailed(f"{name.id} {'is leaving' if worker else 'does not run on this node'}")
        if worker.orphaned:
            worker.orphaned.cancel()
        worker.owner, worker.orphaned, worker.assigned = owner, None, assigned
        return worker

    def release(self, worker: WorkerProcess, owner: object) -> None:
        """Record that an actor is gone. Its worker becomes an orphan, unless another actor has adopted it."""
        if worker.owner is not owner:
            return
        worker.owner = None
        if worker.ended.done():
            return
        if not worker.report.done():
            self._on_orphaned(worker.name, "has lost its Ray actor before it was ready: it is killed")
            self.send_signal(worker, signal.SIGKILL)
            return
        if not worker.is_leaving:
            limit = f"for up to {worker.orphan_timeout_s:g} s (cluster.orphan_timeout_s)"
            self._on_orphaned(worker.name, f"has lost its Ray actor; it serves on {limit} until it is adopted")
        worker.orphaned = asyncio.create_task(self._end_orphan(worker), name=f"orphan {worker.name}")

    def send_signal(self, worker: WorkerProcess, number: int) -> None:
        """Send a signal to the worker, if it still runs. From then on it is leaving, and cannot be adopted."""
        worker.is_leaving = True
        if worker.pid in self._children:  # not reaped yet, so the pid is still its own
            os.kill(worker.pid, number)

    def reap(self) -> None:
        """Collect the exit statuses of all children that have ended. Call it at SIGCHLD.

        They include orphaned processes, whose parent is a container's first process.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if child := self._children.pop(pid, None):
                child[0].returncode = os.waitstatus_to_exitcode(status)
                child[1].set_result(child[0].returncode)

    def popen(self, command: Sequence[str], **options: Any) -> tuple[int, asyncio.Future[int]]:
        """Start a child. Return its process id, and a future of its exit status. Raises OSError."""
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._children[process.pid] = (process, ended)
        return process.pid, ended

    def is_own(self, pid: int) -> bool:
        """Return whether `popen` has started this child."""
        return pid in self._children

    async def kill_all(self) -> None:
        """Kill all workers, and wait for their end."""
        workers = [*self.workers.values()]
        for worker in workers:
            self.send_signal(worker, signal.SIGKILL)
        if workers:
            await asyncio.wait([worker.ended for worker in workers])

    def _spawn(self, name: WorkerName, order: StartOrder, environment: Mapping[str, str]) -> WorkerProcess:
        output, workers_output = socket.socketpair()
        reports, workers_reports = socket.socketpair()
        try:
            with workers_output, workers_reports:
                descriptor = workers_reports.fileno()
                pid, ended = self.popen(
                    tied([*order.command, "--ready-fd", str(descriptor)]),
                    env=environment,
                    pass_fds=[descriptor],
                    stdout=workers_output.fileno(),
                    stderr=workers_output.fileno(),
                )
            _prefer_for_oom(pid)
        except (OSError, ValueError) as error:
            output.close()
            reports.close()
            raise WorkerFailed(f"{name.id} cannot be started: {error}") from error
        return WorkerProcess(
            name=name,
            pid=pid,
            ended=ended,
            output=output,
            reports=reports,
            gpu_share=order.gpu_share,
            gpus=(),
            assigned=(),
            orphan_timeout_s=order.orphan_timeout_s,
            end_timeout_s=order.end_timeout_s,
        )

    def _forget(self, worker: WorkerProcess) -> None:
        if worker.orphaned is not None:
            worker.orphaned.cancel()
        if self.workers.get(worker.name) is worker:
            del self.workers[worker.name]

    async def _end_orphan(self, worker: WorkerProcess) -> None:
        if not worker.is_leaving:
            await asyncio.sleep(worker.orphan_timeout_s)
            self._on_orphaned(
                worker.name, f"has had no Ray actor for {worker.orphan_timeout_s:g} s: it drains and ends"
            )
            self.send_signal(worker, signal.SIGTERM)
        await asyncio.sleep(worker.end_timeout_s)
        self._on_orphaned(worker.name, f"has not ended {worker.end_timeout_s:g} s after SIGTERM: it is killed")
        self.send_signal(worker, signal.SIGKILL)


def _prefer_for_oom(pid: int) -> None:
    """Let the kernel kill this worker first if memory is short, and not the node process, which would end all workers.

    It also kills a worker rather than Ray's actors, which have the same score and less memory.
    """
    with contextlib.suppress(OSError):  # not Linux, or it has ended
        Path(f"/proc/{pid}/oom_score_adj").write_text(MAX_OOM_SCORE)

"""Process of one worker: an engine that serves both roles; its role determines which calls routers send.

    python -m worker ROLE ID HOST [--ready-fd N] [--keys FINGERPRINT] [--node SOCKET --cluster NAMESPACE]

The configuration is in BATON_CONFIG_JSON. In a cluster, a Ray actor manages each process (`deploy.ray_pools.actor`).
When the worker is ready, or has failed to start, it writes one line of JSON to the descriptor: `{"pid": ..., "address":
..., "incarnation": ...}`, or `{"kind": ..., "message": ...}`, an error of Baton's tree.

SIGTERM drains it: its work migrates to other workers, for at most `cluster.drain_timeout_s`; then it leaves the cluster
and exits. A second SIGTERM ends it at once. A worker with NCCL communicators that cannot be aborted drains by itself.

If its GPU is lost for this process, or hangs (`baton.errors.DeviceLost`), the worker leaves the cluster at once and
exits with a non-zero status; its manager starts another one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from baton import garbage
from baton.cluster import VERSION, Role
from baton.config import Config, process_config
from baton.errors import BatonError, ConfigError, DeviceLost, Fenced, first_of
from baton.rpc import RpcServer, members_only
from baton.rpc.errors import to_failed
from baton.rpc.member_auth import WORKERS_RULES, member_auth, require_keys
from baton.rpc.model_files import ModelFilesServicer
from baton.tasks import cancel_and_wait
from baton.telemetry import logs, tracing
from baton.tls import member_tls
from baton.trust import Principal, open_keys
from baton.v1 import kv_pb2_grpc, worker_pb2_grpc
from baton.visible import in_line
from decode_worker.service import DecodeService
from deploy.models import cache_dir
from deploy.processes import FENCED, tell_parent
from engine.core.pool_sizes import in_words
from engine.core.serving import ServingEngine
from engine.engines import make_engine
from kvstore.transfer.transport.nccl_log import private_log
from prefill_worker.service import PrefillService
from worker.adapters import AdapterChecks
from worker.calls import CallServicer, max_message_bytes
from worker.control import WorkerControl
from worker.kernel_caches import own_kernel_caches
from worker.log import NodeProcess, WorkerLog
from worker.member import Member

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

LAST_WORDS_S = 0.2
"""Seconds for the last events of calls to reach the routers."""
LOST_S = 5.0
"""Seconds in which a process with a lost device must end. Freeing the device's memory may block."""
SERVICE_NAMES = (
    "baton.v1.WorkerCalls",
    "baton.v1.WorkerControl",
    "baton.v1.WorkerLog",
    "baton.v1.ModelFiles",
    "baton.v1.KvControl",
)


@contextlib.asynccontextmanager
async def running(
    config: Config, role: Role, worker_id: str, host: str, engine: ServingEngine, *, node: NodeProcess | None = None
) -> AsyncGenerator[tuple[WorkerControl, asyncio.Task[None]]]:
    """Context manager: runs a worker that takes traffic. Yields its control, and the task of `Member.joined`.

    Args:
        node: see `WorkerLog`.
    """
    member = Member(role, worker_id, host, config, engine)
    interceptors = (*member_auth(member.keys, member.incarnation, WORKERS_RULES), *members_only(member.tls))
    max_bytes = max_message_bytes(engine.max_model_len, takes_images=engine.takes_images)
    rpc = RpcServer(SERVICE_NAMES, interceptors, max_message_bytes=max_bytes, describes_itself=False)
    prefill, decode = PrefillService(member.context), DecodeService(member.context)
    calls = CallServicer(
        prefill=prefill.prefill,
        decode=decode.decode,
        fetch=decode.fetch,
        checks=AdapterChecks(engine.check_adapter if engine.max_adapters else None),
        look=engine.look if engine.takes_images else None,
        max_model_len=engine.max_model_len,
    )
    control = WorkerControl(member, calls)
    worker_pb2_grpc.add_WorkerCallsServicer_to_server(calls, rpc.server)
    worker_pb2_grpc.add_WorkerControlServicer_to_server(control, rpc.server)
    worker_pb2_grpc.add_WorkerLogServicer_to_server(WorkerLog(worker_id, node), rpc.server)
    worker_pb2_grpc.add_ModelFilesServicer_to_server(ModelFilesServicer(member.files.read), rpc.server)
    kv_pb2_grpc.add_KvControlServicer_to_server(member.kv, rpc.server)
    port = rpc.bind(host, 0, member.tls)
    async with member.joined(rpc, port) as ended:
        logger.info("%s joins at %s, as a %s worker of release %s", worker_id, member.info.address, role, VERSION)
        logger.info("each rank has %s", in_words(engine.spec, engine.num_blocks))
        yield control, ended


def require_clusters_keys(config: Config, host: str, fingerprint: str) -> None:
    """Raise ConfigError if this worker could not be a member of its cluster, or would accept unauthenticated calls."""
    path = config.cluster.secret
    keys = open_keys(path, Principal.WORKER)
    require_keys(keys, host, "this worker's address")
    if fingerprint and (keys is None or fingerprint not in keys.keys.fingerprints):
        raise ConfigError(
            f"the keys in {path or 'no file'} on {socket.gethostname()} are not those of this cluster's controller: "
            "cluster.secret must name a file with the same secret on every machine"
        )


async def serve(
    config: Config,
    role: Role,
    worker_id: str,
    host: str,
    *,
    ready_fd: int | None = None,
    fingerprint: str = "",
    node: NodeProcess | None = None,
    make: Callable[[Config, Path], ServingEngine] = make_engine,
) -> None:
    """Serve until SIGTERM, then drain.

    Args:
        fingerprint: fingerprint of the cluster's keys, which this worker's keys must match; empty: any keys do.
        node: see `WorkerLog`.

    Raises:
        ConfigError: its keys differ from the cluster's, or it has none although other machines could reach it.
        Fenced: a newer incarnation has this worker's id.
        DeviceLost: the device cannot compute any more. The process exits within `LOST_S`.
    """
    stop, stop_now = asyncio.Event(), asyncio.Event()
    tracer: TracerProvider | None = None
    try:
        async with contextlib.AsyncExitStack() as stack:
            try:
                require_clusters_keys(config, host, fingerprint)
                tls = member_tls(config.cluster)
                tracer = tracing.configure(f"baton-{role}", worker_id, config.telemetry, tls)
                engine = await asyncio.to_thread(make, config, cache_dir(config.cluster))
                stack.callback(engine.close)
                stack.push(_end_if_lost)
                garbage.keep_what_is_loaded()
                control, ended = await stack.enter_async_context(
                    running(config, role, worker_id, host, engine, node=node)
                )
                # Not earlier, however long Redis is away: until there is work to drain, the signal may end the process
                # at once.
                asyncio.get_running_loop().add_signal_handler(
                    signal.SIGTERM, lambda: (stop_now if stop.is_set() else stop).set()
                )
            except BatonError as error:
                if ready_fd is not None:
                    tell_parent(ready_fd, **dataclasses.asdict(to_failed(error)))
                raise
            if ready_fd is not None:
                info = control.member.info
                tell_parent(ready_fd, pid=os.getpid(), address=info.address, incarnation=info.incarnation)
            try:
                await _first(ended, stop.wait(), control.member.kv.stuck())
                await _first(ended, stop_now.wait(), control.drain(config.cluster.drain_timeout_s))
                await asyncio.sleep(LAST_WORDS_S)
            except* DeviceLost:
                _end_within(LOST_S)
                await asyncio.sleep(LAST_WORDS_S)
                raise
    finally:
        if tracer is not None:
            await asyncio.to_thread(tracer.shutdown)


async def _first(ended: asyncio.Task[None], *others: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them is done. Raise the error with which the worker ended, if it did."""
    tasks = [asyncio.create_task(other) for other in others]
    try:
        await asyncio.wait((ended, *tasks), return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(tasks)
    if ended.done():
        ended.result()


def _end_if_lost(kind: object, error: BaseException | None, traceback: object) -> None:
    """Schedule the end of this process if leaving the cluster shows that its device is lost."""
    if isinstance(error, BaseExceptionGroup) and error.subgroup(DeviceLost):
        _end_within(LOST_S)


def _end_within(limit_s: float) -> None:
    """End this process after `limit_s`, whatever its threads are waiting for."""
    timer = threading.Timer(limit_s, os._exit, (1,))
    timer.daemon = True
    timer.start()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__.split("\n")[0])
    parser.add_argument("role", choices=[role.value for role in Role])
    parser.add_argument("id")
    parser.add_argument("host", help="address at which routers and other workers reach this worker")
    parser.add_argument("--ready-fd", type=int, help="inherited descriptor to which the worker writes when it is ready")
    parser.add_argument("--keys", default="", help="fingerprint of the cluster's keys; the worker's keys must match it")
    parser.add_argument("--node", type=Path, help="socket of the node process that runs this worker and has its output")
    parser.add_argument(
        "--cluster", default="", help="Ray namespace of its cluster, which its name on the node includes"
    )
    args = parser.parse_args()
    config = process_config()
    logs.configure(config.telemetry.log_level, config.telemetry.log_format, f"baton-{args.role}")
    with private_log() as of_nccl, own_kernel_caches(os.environ) as of_kernels:
        os.environ.update(of_nccl | of_kernels)
        try:
            whose = (Role(args.role), args.id, args.host)
            node = NodeProcess(args.node, args.cluster) if args.node else None
            serving = serve(config, *whose, ready_fd=args.ready_fd, fingerprint=args.keys, node=node)
            uvloop.run(serving)
        except* Fenced as fenced:
            sys.stderr.write(f"{in_line(str(first_of(fenced)))}\n")
            sys.exit(FENCED)
        except* BatonError as errors:
            sys.exit(in_line(str(first_of(errors))))

"""Puts the router's parts together and runs them until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Generator
from pathlib import Path

import uvicorn

from baton.api import ModelCard
from baton.blocks import content_id
from baton.cluster import VERSION, RouterInfo, ServedModel
from baton.config import Config
from baton.errors import ConfigError
from baton.rpc import RpcServer
from baton.rpc.server import CLIENTS_PING_TIMEOUT_S
from baton.telemetry import tracing
from baton.telemetry.instruments import Instruments
from baton.v1 import admin_pb2_grpc, inference_pb2_grpc
from kvstore.index import Connection, GarbageBook, Mirror, MirrorFollower, RedisIndex
from kvstore.leases import RedisLeases, RedisRecords
from router.admission import Limiter, ModelFacts, SloCounts
from router.admission.tenants import TenantBook
from router.api.controller_client import OrdersClient
from router.api.grpc_api import SERVICE_NAMES, AdminServicer, Authentication, InferenceServicer
from router.api.http import create_app
from router.cluster.readiness import Readiness
from router.cluster.registry import Registry
from router.dispatch.decisions import DecisionLog
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.worker_client import WorkerCalls
from router.placement.pool_view import UNKNOWN_LENGTH, PoolView
from router.placement.stale_hints import HintBook
from router.prompt import Tokenizer
from router.request.resume_journal import Journal
from router.service import Door, LoadedModel, RouterService

logger = logging.getLogger(__name__)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process has one owner of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


async def serve(config: Config, stop: asyncio.Event) -> None:
    """Runs a router until `stop` is set, and requests in flight for `router.drain_timeout_s` more.

    Raises:
        ConfigError: a port is taken, no Redis is configured, or the tenants' file is wrong.
        ModelLoadError: the model's folder has no tokenizer.
    """
    if not config.index.redis_url:
        raise ConfigError("the router needs index.redis_url (BATON_INDEX_REDIS_URL)")
    tenants = TenantBook.configured(config.router.tenants_file)
    for slo_class in tenants.slo_classes:
        config.router.slo_class(slo_class)
    tracer = tracing.configure("baton-router", config.router.id, config.telemetry)
    tokenizer = Tokenizer.load(Path(config.model.path))
    name = config.model.served_name or Path(config.model.path).name
    max_model_len = min(tokenizer.max_model_len or UNKNOWN_LENGTH, config.engine.max_model_len or UNKNOWN_LENGTH)

    content = content_id(config.model.revision)
    mirror = Mirror()
    pools = PoolView(mirror.lookup, time.monotonic, max_model_len)
    garbage = GarbageBook()
    redis = Connection(config.index.redis_url, garbage)
    index = RedisIndex(Connection(config.index.redis_url, garbage), content)
    leases = RedisLeases(redis, content, lease_s=config.index.lease_s)
    follower = MirrorFollower(
        index,
        mirror,
        poll_s=config.index.poll_s,
        lease_s=config.index.lease_s,
        blocks_ttl_s=config.index.blocks_ttl_s,
    )
    calls = WorkerCalls()
    journal = Journal(RedisRecords(Connection(config.index.redis_url, garbage), content))

    shares_ports = config.cluster.routers > 1
    rpc = RpcServer(
        SERVICE_NAMES,
        [Authentication(tenants)],
        shares_port=shares_ports,
        max_connection_age_s=config.router.max_connection_age_s,
        ping_timeout_s=CLIENTS_PING_TIMEOUT_S,
    )
    grpc_port = rpc.bind(config.cluster.host, config.cluster.grpc_port)
    http_sockets = bound(config.cluster.host, config.cluster.http_port, shares_ports)
    http = _HttpServer(
        uvicorn.Config(
            app=None,  # type: ignore[arg-type]  # set below: the app needs what comes in between
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=math.ceil(config.router.drain_timeout_s),
        )
    )
    found_at = config.cluster.advertise_host or config.cluster.host
    me = RouterInfo(
        id=config.router.id,
        pid=os.getpid(),
        grpc=f"{found_at}:{grpc_port}",
        http=f"{found_at}:{config.cluster.http_port}",
        mirror_lag_s=0.0,
        version=VERSION,
    )
    slo_counts = SloCounts()
    models = (ServedModel(name, config.model.path),)
    registry = Registry(
        leases,
        pools,
        calls,
        follower,
        me,
        slo_counts,
        models,
        redis,
        config.index.poll_s,
        config.index.lease_s,
    )
    readiness = Readiness(pools, config.router.mode == "split", config.router.worker_wait_s, time.monotonic)
    decisions = DecisionLog()
    instruments = Instruments(registry.status, config.router.slo_classes, name if config.telemetry.vllm_aliases else "")
    facts = ModelFacts(
        id=name,
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
        default_sampling=tokenizer.default_sampling,
        default_max_tokens=config.router.default_max_tokens,
    )
    service = RouterService(
        LoadedModel(ModelCard(name, config.model.path, max_model_len, int(time.time())), tokenizer, content),
        facts,
        Dispatcher(pools, calls, HintBook(mirror, instruments), decisions, config.router, instruments),
        Limiter(config.router.max_in_flight),
        journal,
        instruments,
        config.router,
        slo_counts,
        pools.max_model_len,
    )
    door = Door(config.cluster.host, grpc_port)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceServicer(service, door), rpc.server)
    admin = AdminServicer(registry.status, decisions.explain, OrdersClient(registry.controller))
    admin_pb2_grpc.add_AdminServicer_to_server(admin, rpc.server)
    http.config.app = create_app(service, tenants, readiness.why_not, instruments.exposition)

    try:
        await rpc.start()
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(follower.run(), name="mirror"),
                tasks.create_task(registry.run(), name="registry"),
                tasks.create_task(journal.run(), name="journal"),
                tasks.create_task(_report_health(rpc, readiness, config.index.poll_s), name="health"),
            ]
            serving = tasks.create_task(http.serve(http_sockets), name="http")
            await stop.wait()
            logger.info("router %s stops", config.router.id)
            readiness.stop()
            http.should_exit = True  # both doors close at once, and both give running requests the same time
            await asyncio.gather(rpc.stop(config.router.drain_timeout_s), serving)
            for task in background:
                task.cancel()
    finally:
        await rpc.stop(0)
        await calls.close()
        await journal.close()
        await index.close()
        await leases.close()
        if tracer is not None:
            tracer.shutdown()


def bound(host: str, port: int, shares_port: bool) -> list[socket.socket]:
    """A socket for every address of `host`, not listening yet.

    Raises:
        ConfigError: the port is taken, or the host is not one of this machine's.
    """
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sockets.append(opened := socket.socket(family, kind, protocol))
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            opened.bind(address)
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise ConfigError(f"cannot listen on {host}:{port}; is another program using the port?") from error
    return sockets


async def _report_health(rpc: RpcServer, readiness: Readiness, poll_s: float) -> None:
    while True:
        await rpc.set_serving(not readiness.why_not())
        await asyncio.sleep(min(poll_s, 0.2))

"""Puts the router's parts together and runs them until the process is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from opentelemetry.sdk.trace import TracerProvider

from baton.api import ModelCard
from baton.blocks import content_id
from baton.cluster import VERSION, RouterInfo, ServedModel
from baton.config import Config, IndexConfig
from baton.errors import ConfigError
from baton.rpc import RpcServer
from baton.rpc.server import CLIENTS_PING_TIMEOUT_S
from baton.telemetry import tracing
from baton.telemetry.instruments import Instruments
from baton.v1 import admin_pb2_grpc, inference_pb2_grpc
from kvstore.index import GarbageBook, Mirror, MirrorFollower, RedisConnection, RedisIndex
from kvstore.leases import RedisLeases, RedisRecords
from router.admission import Accounts, Ledger, Limiter, ModelFacts, RedisLedger, SloCounts
from router.admission.tenants import TenantBook
from router.admission.tenants_file import TenantsFile
from router.answer import AnswerFormat
from router.api.connections import BoundedProtocol, ConnectionLimits, OpenConnections
from router.api.controller_client import ControllerClient
from router.api.exchange import MAX_BODY_BYTES
from router.api.grpc_api import SERVICE_NAMES, AdminServicer, Authentication, InferenceServicer
from router.api.http import create_app
from router.cluster.readiness import Readiness
from router.cluster.registry import Registry
from router.dispatch.decisions import DecisionLog
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.worker_client import WorkerClient
from router.placement.pool_view import UNKNOWN_LENGTH, PoolView
from router.placement.stale_hints import HintTracker
from router.prompt import Tokenizer
from router.request.model import Ingress, LoadedModel
from router.request.resume import Journal
from router.request.usage_log import UsageBook, UsageFile
from router.request.usage_marks import MarkStore, RedisMarks
from router.service import RouterService

logger = logging.getLogger(__name__)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process has one owner of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Store:
    """What the router reads from Redis and writes to it."""

    redis: RedisConnection
    leases: RedisLeases
    index: RedisIndex
    mirror: Mirror
    follower: MirrorFollower
    journal: Journal
    ledger: Ledger
    """Closed by the accounts, which own it."""
    marks: MarkStore
    """Closed by the usage book, which owns them."""

    @staticmethod
    def connect(config: IndexConfig, content: str) -> _Store:
        garbage, mirror = GarbageBook(), Mirror()
        redis = RedisConnection(config.redis_url, garbage)
        index = RedisIndex(RedisConnection(config.redis_url, garbage), content)
        follower = MirrorFollower(
            index,
            mirror,
            poll_s=config.poll_s,
            lease_s=config.lease_s,
            blocks_ttl_s=config.blocks_ttl_s,
        )
        return _Store(
            redis=redis,
            leases=RedisLeases(redis, content, lease_s=config.lease_s),
            index=index,
            mirror=mirror,
            follower=follower,
            journal=Journal(RedisRecords(RedisConnection(config.redis_url, garbage), content)),
            ledger=RedisLedger(RedisConnection(config.redis_url, garbage), content),
            marks=RedisMarks(RedisConnection(config.redis_url, garbage), content),
        )

    async def close(self) -> None:
        await self.journal.close()
        await self.index.close()
        await self.leases.close()


async def serve(config: Config, stop: asyncio.Event) -> None:
    """Runs a router until `stop` is set, and requests in flight for `router.drain_timeout_s` more.

    Raises:
        ConfigError: a port is taken, no Redis is configured, the tenants' file is wrong, or the usage log cannot be
            written.
        ModelLoadError: the model's folder has no tokenizer.
    """
    await build(config).run(stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The parts of a router that have to be run or closed."""

    config: Config
    tracer: TracerProvider | None
    store: _Store
    client: WorkerClient
    registry: Registry
    readiness: Readiness
    rpc: RpcServer
    http: _HttpServer
    http_sockets: list[socket.socket]
    service: RouterService
    tenants_file: TenantsFile
    accounts: Accounts
    usage_book: UsageBook

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then lets requests in flight end, for `router.drain_timeout_s` at most."""
        try:
            await self.rpc.start()
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self.store.follower.run(), name="mirror"),
                    tasks.create_task(self.registry.run(), name="registry"),
                    tasks.create_task(self.store.journal.run(), name="journal"),
                    tasks.create_task(self.tenants_file.run(), name="tenants"),
                    tasks.create_task(self.accounts.run(), name="accounts"),
                    tasks.create_task(self.usage_book.run(), name="usage"),
                    tasks.create_task(self._report_health(), name="health"),
                ]
                serving = tasks.create_task(self.http.serve(self.http_sockets), name="http")
                await stop.wait()
                logger.info("router %s stops", self.config.router.id)
                self.readiness.stop()
                self.http.should_exit = True  # gRPC and HTTP close at once, and give requests the same time
                await asyncio.gather(self.rpc.stop(self.config.router.drain_timeout_s), serving)
                for task in background:
                    task.cancel()
        finally:
            await self.rpc.stop(0)
            await self.client.close()
            await self.accounts.close()
            await self.usage_book.close()
            await self.store.close()
            self.service.close()
            if self.tracer is not None:
                self.tracer.shutdown()

    async def _report_health(self) -> None:
        while True:
            await self.rpc.set_serving(not self.readiness.why_not())
            await asyncio.sleep(min(self.config.index.poll_s, 0.2))


def build(config: Config) -> Router:
    """Puts a router's parts together, and binds its ports.

    Raises:
        ConfigError: a port is taken, no Redis is configured, the tenants' file is wrong, or the usage log cannot be
            written.
        ModelLoadError: the model's folder has no tokenizer.
    """
    if not config.index.redis_url:
        raise ConfigError("the router needs index.redis_url (BATON_INDEX_REDIS_URL)")
    tenants = TenantsFile.load(config.router)
    usage_file = UsageFile(config.router.usage_log) if config.router.usage_log else None
    tracer = tracing.configure("baton-router", config.router.id, config.telemetry, faces_clients=True)
    model = _load_model(config)
    store = _Store.connect(config.index, model.content_id)
    pools = PoolView(store.mirror.lookup, time.monotonic, model.facts.max_model_len, config.index.lease_s)
    client, slo_counts, decisions = WorkerClient(), SloCounts(), DecisionLog()
    rpc, grpc_port, http_sockets = _bind(config, tenants)
    registry = _registry(config, model, store, pools, client=client, slo_counts=slo_counts, grpc_port=grpc_port)
    readiness = Readiness(pools, config.router.mode == "split", config.router.worker_wait_s, time.monotonic)
    aliases = model.facts.id if config.telemetry.vllm_aliases else ""
    instruments = Instruments(registry.status, config.router.slo_classes, aliases)
    accounts = Accounts(store.ledger, instruments, registry.num_routers, config.index.lease_s)
    usage_book = UsageBook(usage_file, store.marks, instruments, registry.num_routers)
    service = RouterService(
        model,
        dispatcher=_dispatcher(config, store, pools, client=client, decisions=decisions, instruments=instruments),
        limiter=Limiter(config.router.max_in_flight),
        accounts=accounts,
        journal=store.journal,
        usage_book=usage_book,
        instruments=instruments,
        config=config.router,
        slo_counts=slo_counts,
        worker_limit=pools.max_model_len,
    )
    inference = InferenceServicer(service, Ingress(config.cluster.host, grpc_port))
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, rpc.server)
    admin = AdminServicer(registry.status, decisions.explain, ControllerClient(registry.controller))
    admin_pb2_grpc.add_AdminServicer_to_server(admin, rpc.server)
    http = _http_server(config, create_app(service, tenants, readiness.why_not, instruments.exposition))
    return Router(
        config=config,
        tracer=tracer,
        store=store,
        client=client,
        registry=registry,
        readiness=readiness,
        rpc=rpc,
        http=http,
        http_sockets=http_sockets,
        service=service,
        tenants_file=TenantsFile(config.router, tenants, instruments),
        accounts=accounts,
        usage_book=usage_book,
    )


def _load_model(config: Config) -> LoadedModel:
    tokenizer = Tokenizer.load(Path(config.model.path))
    name = config.model.served_name or Path(config.model.path).name
    max_model_len = min(tokenizer.max_model_len or UNKNOWN_LENGTH, config.engine.max_model_len or UNKNOWN_LENGTH)
    return LoadedModel(
        card=ModelCard(
            id=name,
            path=config.model.path,
            max_model_len=max_model_len,
            created=int(time.time()),
            weights=config.model.weights,
            kv_dtype=config.engine.kv_dtype,
        ),
        tokenizer=tokenizer,
        format=AnswerFormat.load(tokenizer),
        content_id=content_id(config.kv_identity),
        facts=ModelFacts(
            id=name,
            vocab_size=tokenizer.vocab_size,
            max_model_len=max_model_len,
            default_sampling=tokenizer.default_sampling,
            default_max_tokens=config.router.default_max_tokens,
        ),
    )


def _registry(
    config: Config,
    model: LoadedModel,
    store: _Store,
    pools: PoolView,
    *,
    client: WorkerClient,
    slo_counts: SloCounts,
    grpc_port: int,
) -> Registry:
    return Registry(
        leases=store.leases,
        pools=pools,
        client=client,
        follower=store.follower,
        me=_announcement(config, grpc_port),
        slo_counts=slo_counts,
        models=(ServedModel(model.facts.id, config.model.path),),
        redis=store.redis,
        poll_s=config.index.poll_s,
        lease_s=config.index.lease_s,
    )


def _http_server(config: Config, app: FastAPI) -> _HttpServer:
    limits = ConnectionLimits(
        max_connections=config.router.max_connections, max_per_client=config.router.max_connections_per_client
    )
    protocol: Any = partial(BoundedProtocol, OpenConnections(limits))
    return _HttpServer(
        uvicorn.Config(
            app=app,
            http=protocol,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(config.router.drain_timeout_s),
        )
    )


def _dispatcher(
    config: Config,
    store: _Store,
    pools: PoolView,
    *,
    client: WorkerClient,
    decisions: DecisionLog,
    instruments: Instruments,
) -> Dispatcher:
    return Dispatcher(
        pools=pools,
        client=client,
        hints=HintTracker(store.mirror, instruments),
        decisions=decisions,
        config=config.router,
        instruments=instruments,
    )


def _bind(config: Config, tenants: TenantBook) -> tuple[RpcServer, int, list[socket.socket]]:
    """The gRPC server and its port, and the sockets of the HTTP server."""
    shares_ports = config.cluster.routers > 1
    rpc = RpcServer(
        SERVICE_NAMES,
        [Authentication(tenants)],
        shares_port=shares_ports,
        max_message_bytes=MAX_BODY_BYTES,
        max_connection_age_s=config.router.max_connection_age_s,
        ping_timeout_s=CLIENTS_PING_TIMEOUT_S,
    )
    grpc_port = rpc.bind(config.cluster.host, config.cluster.grpc_port)
    return rpc, grpc_port, bound(config.cluster.host, config.cluster.http_port, shares_ports)


def _announcement(config: Config, grpc_port: int) -> RouterInfo:
    """What this router announces of itself."""
    host = config.cluster.advertise_host or config.cluster.host
    return RouterInfo(
        id=config.router.id,
        pid=os.getpid(),
        grpc=f"{host}:{grpc_port}",
        http=f"{host}:{config.cluster.http_port}",
        mirror_lag_s=0.0,
        version=VERSION,
    )


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

"""Builds the router from its parts and runs it until the process must stop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton import garbage
from baton.addresses import address_of
from baton.api import ModelCard
from baton.blocks import content_id
from baton.cluster import VERSION, Role, RouterInfo, ServedModel
from baton.config import Config
from baton.errors import ConfigError
from baton.rpc import RpcServer
from baton.rpc.member_auth import MemberLink, require_keys
from baton.rpc.server import CLIENTS_PING_TIMEOUT_S, ClientLimits
from baton.telemetry import tracing
from baton.telemetry.instruments import Instruments
from baton.tls import Tls, endpoint_tls, member_tls
from baton.trust import KeyFile, Principal, open_keys
from baton.v1 import admin_pb2_grpc
from kvstore.adapters import RedisAdapters
from kvstore.index import GarbageBook, Mirror, MirrorFollower, RedisConnection, RedisIndex, Seal
from kvstore.leases import RedisLeases, RedisRecords, ReportedLoads
from router.admission import Accounts, Ledger, Limiter, ModelFacts, RedisLedger, SloCounts
from router.admission.tenants import TenantBook, TenantsFile
from router.answer import AnswerFormat
from router.api.grpc_api import MAX_MESSAGE_BYTES, SERVICE_NAMES, AdminServicer, Authentication, InferenceServicer
from router.api.http import HttpServer, connection_limits, http_servers
from router.api.operations import Operations
from router.api.orders import AdapterOrders, ControllerClient
from router.api.places import OpenConnections
from router.cluster.history import ClusterHistory, HistoryStore, RedisHistory
from router.cluster.registry import Dependencies, Readiness, Registry
from router.cluster.watch import AlertBook, AlertWatch, LoadMeter
from router.placement.pool_view import UNKNOWN_LENGTH, HintTracker, PoolView
from router.prompt import Tokenizer
from router.request.model import LoadedModel
from router.request.resume import Journal
from router.serve.driver import ChoiceDriver
from router.serve.images import ImageLooker
from router.serve.worker_client import WorkerClient
from router.service import RouterService
from router.timeline.log import Ingress
from router.timeline.usage_log import UsageBook, UsageFile
from router.timeline.usage_marks import MarkStore, RedisMarks

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Store:
    """The router's connections to Redis and the stores that use them."""

    redis: RedisConnection
    leases: RedisLeases
    index: RedisIndex
    mirror: Mirror
    follower: MirrorFollower
    journal: Journal
    ledger: Ledger
    """The accounts own and close it."""
    marks: MarkStore
    """The usage book owns and closes them."""
    dependencies: Dependencies
    history: HistoryStore
    """The cluster's history owns and closes it."""
    adapters: RedisAdapters

    @staticmethod
    def connect(config: Config, content: str, keys: KeyFile | None, tls: Tls | None, endpoint: Tls | None) -> _Store:
        garbage, mirror, settings = GarbageBook(), Mirror(), config.index
        seal = Seal(config.router.cache_secret) if config.router.cache_secret else None
        connections = (RedisConnection(settings.url, garbage, tls=tls) for _ in range(6))
        redis, own, records, counts, marks, history = connections
        index = RedisIndex(own, content, keys=keys)
        loads = ReportedLoads(redis)
        follower = MirrorFollower(
            index,
            mirror,
            poll_s=settings.poll_s,
            lease_s=settings.lease_s,
            blocks_ttl_s=settings.blocks_ttl_s,
            on_load=loads.report,
        )
        return _Store(
            redis=redis,
            leases=RedisLeases(redis, content, lease_s=settings.lease_s, keys=keys, loads=loads),
            index=index,
            mirror=mirror,
            follower=follower,
            journal=Journal(RedisRecords(records, content, seal=seal)),
            ledger=RedisLedger(counts, content),
            marks=RedisMarks(marks, content, seal=seal),
            dependencies=Dependencies(redis, {"members": tls, "routers": endpoint}),
            history=RedisHistory(history, content, seal=seal),
            adapters=RedisAdapters(redis, content, keys=keys),
        )

    async def close(self) -> None:
        await self.journal.close()
        await self.index.close()
        await self.leases.close()


async def serve(config: Config, stop: asyncio.Event) -> None:
    """Run a router until `stop` is set, then give requests in flight up to `router.drain_timeout_s` to complete.

    Raises:
        ConfigError, ModelLoadError: see `build`.
    """
    router = build(config)
    garbage.keep_what_is_loaded()
    await router.run(stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The parts of a router that must be run or closed."""

    config: Config
    tracer: TracerProvider | None
    store: _Store
    client: WorkerClient
    registry: Registry
    readiness: Readiness
    rpc: RpcServer
    http: tuple[HttpServer, ...]
    service: RouterService
    tenants_file: TenantsFile
    accounts: Accounts
    usage_book: UsageBook
    operations: Operations

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then give requests in flight up to `router.drain_timeout_s` to complete."""
        try:
            await self.service.start()
            await self.rpc.start()
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self.store.follower.run(), name="mirror"),
                    tasks.create_task(self.registry.run(), name="registry"),
                    tasks.create_task(self.store.journal.run(), name="journal"),
                    tasks.create_task(self.tenants_file.run(), name="tenants"),
                    tasks.create_task(self.accounts.run(), name="accounts"),
                    tasks.create_task(self.usage_book.run(), name="usage"),
                    tasks.create_task(self.operations.history.run(), name="history"),
                    tasks.create_task(self.operations.load.run(), name="load"),
                    tasks.create_task(self.operations.alerts.run(), name="alerts"),
                    tasks.create_task(self._report_health(), name="health"),
                    tasks.create_task(garbage.keep_small(), name="memory"),
                ]
                serving = [tasks.create_task(each.serve_all(), name="http") for each in self.http]
                await stop.wait()
                logger.info("router %s stops", self.config.router.id)
                self.readiness.stop()
                for each in self.http:
                    each.should_exit = True  # gRPC and HTTP drain at the same time, with the same timeout
                await asyncio.gather(self.rpc.stop(self.config.router.drain_timeout_s), *serving)
                for task in background:
                    task.cancel()
        finally:
            await self.rpc.stop(0)
            await self.client.close()
            await self.accounts.close()
            await self.usage_book.close()
            await self.operations.history.close()
            await self.store.close()
            self.service.close()
            if self.tracer is not None:
                self.tracer.shutdown()

    async def _report_health(self) -> None:
        while True:
            await self.rpc.set_serving(not self.readiness.why_not())
            await asyncio.sleep(min(self.config.index.poll_s, 0.2))


def build(config: Config) -> Router:
    """Build a router and bind its ports.

    Raises:
        ConfigError: a port is taken, no Redis is configured, the router listens beyond this machine without keys, the
            keys or the tenants' file are invalid, or the usage log cannot be written.
        ModelLoadError: the model's folder has no tokenizer.
    """
    if not config.index.redis_url:
        raise ConfigError("index.redis_url is not set, and the router needs Redis; set it or BATON_INDEX_REDIS_URL")
    keys = _keys(config)
    tenants = TenantsFile.load(config.router)
    usage_file = UsageFile(config.router.usage_log) if config.router.usage_log else None
    link, endpoint = MemberLink(keys, member_tls(config.cluster)), endpoint_tls(config)
    tracer = tracing.configure("baton-router", config.router.id, config.telemetry, link.tls, faces_clients=True)
    model = _load_model(config)
    store = _Store.connect(config, model.content_id, keys, link.tls, endpoint)
    pools = PoolView(store.mirror.lookup, time.monotonic, model.facts.max_model_len, config.index.lease_s)
    client, slo_counts = WorkerClient(keys, link.tls), SloCounts()
    rpc, grpc_port = _bind(config, tenants, endpoint)
    registry = _registry(config, model, store, pools, client=client, slo_counts=slo_counts, bound=(rpc, grpc_port))
    readiness = Readiness(pools, config.router.mode == "disaggregated", config.router.worker_wait_s, time.monotonic)
    aliases = model.facts.id if config.telemetry.vllm_aliases else ""
    instruments = Instruments(registry.status, config.router.slo_classes, aliases)
    accounts = Accounts(store.ledger, instruments, registry.num_routers, config.index.lease_s)
    usage_book = UsageBook(usage_file, store.marks, instruments, registry.num_routers)
    service = RouterService(
        model,
        driver=_driver(config, store, pools, client=client, instruments=instruments, keys=keys),
        looker=ImageLooker(pools=pools, client=client, config=config.router),
        limiter=Limiter(config.router.max_in_flight),
        accounts=accounts,
        journal=store.journal,
        usage_book=usage_book,
        instruments=instruments,
        config=config.router,
        slo_counts=slo_counts,
        worker_limit=pools.max_model_len,
        adapters=lambda: store.adapters.adapters,
    )
    inference = InferenceServicer(service, Ingress(config.cluster.host, grpc_port), stall_s=config.router.stall_s)
    operations = _operations(config, store, registry, service, client=client, instruments=instruments, link=link)
    _add_services(rpc, service, inference, operations)
    return Router(
        config=config,
        tracer=tracer,
        store=store,
        client=client,
        registry=registry,
        readiness=readiness,
        rpc=rpc,
        http=http_servers(config, service, tenants, readiness.why_not, instruments.exposition, operations=operations),
        service=service,
        tenants_file=TenantsFile(config.router, tenants, instruments),
        accounts=accounts,
        usage_book=usage_book,
        operations=operations,
    )


def _load_model(config: Config) -> LoadedModel:
    tokenizer = Tokenizer.load(Path(config.model.path), config.model.chat_template)
    name = config.model.served_name or Path(config.model.path).name
    max_model_len = min(tokenizer.max_model_len or UNKNOWN_LENGTH, config.engine.max_model_len or UNKNOWN_LENGTH)
    return LoadedModel(
        card=ModelCard(
            id=name,
            path=config.model.path,
            max_model_len=max_model_len,
            created=int(time.time()),
            weights=config.model.weights,
            kv_dtype=config.engine_of(Role.DECODE).kv_dtype,
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


def _keys(config: Config) -> KeyFile | None:
    """Return the cluster's keys.

    Raises:
        ConfigError: the router listens beyond this machine without keys, or the keys are invalid.
    """
    keys = open_keys(config.cluster.secret, Principal.ROUTER)
    require_keys(keys, config.cluster.host, "cluster.host")
    return keys


def _registry(
    config: Config,
    model: LoadedModel,
    store: _Store,
    pools: PoolView,
    *,
    client: WorkerClient,
    slo_counts: SloCounts,
    bound: tuple[RpcServer, int],
) -> Registry:
    rpc, grpc_port = bound
    return Registry(
        leases=store.leases,
        pools=pools,
        client=client,
        follower=store.follower,
        me=_announcement(config, grpc_port),
        slo_counts=slo_counts,
        models=(ServedModel(model.facts.id, config.model.path),),
        redis=store.redis,
        adapters=store.adapters,
        malformed=rpc.malformed,
        dependencies=store.dependencies,
        poll_s=config.index.poll_s,
        lease_s=config.index.lease_s,
        engines={role: config.differing_settings(role) for role in Role},
    )


def _add_services(
    rpc: RpcServer,
    service: RouterService,
    inference: InferenceServicer,
    operations: Operations,
) -> None:
    inference.add_to(rpc.server)
    admin = AdminServicer(operations.status, service.requests, operations.orders, operations.adapters)
    admin_pb2_grpc.add_AdminServicer_to_server(admin, rpc.server)


def _operations(
    config: Config,
    store: _Store,
    registry: Registry,
    service: RouterService,
    *,
    client: WorkerClient,
    instruments: Instruments,
    link: MemberLink,
) -> Operations:
    history = ClusterHistory(store.history, f"{config.router.id}/{uuid.uuid4().hex[:12]}", instruments)
    connections = OpenConnections(limits=connection_limits(config.router))
    load = LoadMeter(lambda: connections.filled, lambda: service.in_flight)
    return Operations(
        router_id=config.router.id,
        status=registry.status,
        history=history,
        load=load,
        alerts=AlertBook(AlertWatch(config.router.id, registry.status, load, history)),
        connections=connections,
        classes=config.router.slo_classes,
        orders=ControllerClient(registry.controller, link.keys, link.tls),
        workers=client,
        adapters=AdapterOrders(store.adapters, client, lambda: registry.status().workers, service.model.facts.id),
    )


def _driver(
    config: Config,
    store: _Store,
    pools: PoolView,
    *,
    client: WorkerClient,
    instruments: Instruments,
    keys: KeyFile | None,
) -> ChoiceDriver:
    return ChoiceDriver(
        pools=pools,
        client=client,
        hints=HintTracker(store.mirror, instruments),
        config=config.router,
        instruments=instruments,
        keys=keys,
    )


def _bind(config: Config, tenants: TenantBook, tls: Tls | None) -> tuple[RpcServer, int]:
    """Create the gRPC server, bind it, and return it with its port."""
    rpc = RpcServer(
        SERVICE_NAMES,
        [Authentication(tenants)],
        shares_port=config.cluster.routers > 1,
        max_message_bytes=MAX_MESSAGE_BYTES,
        clients=ClientLimits(config.router.max_connections, config.router.max_streams_per_client),
        max_connection_age_s=config.router.max_connection_age_s,
        ping_timeout_s=CLIENTS_PING_TIMEOUT_S,
    )
    return rpc, rpc.bind(config.cluster.host, config.cluster.grpc_port, tls)


def _announcement(config: Config, grpc_port: int) -> RouterInfo:
    """Return the entry under which this router registers itself."""
    host = config.cluster.advertise_host or config.cluster.host
    return RouterInfo(
        id=config.router.id,
        pid=os.getpid(),
        grpc=address_of(host, grpc_port),
        http=address_of(host, config.cluster.http_port),
        mirror_lag_s=0.0,
        version=VERSION,
    )

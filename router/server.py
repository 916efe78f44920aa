"""Builds the router from its parts and runs it until the process must stop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton import garbage
from baton.addresses import address_of
from baton.cache_folder import cache_dir, own_part
from baton.cluster import VERSION, RouterInfo
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
from kvstore.index import GarbageBook, RedisConnection, Seal
from kvstore.index.keys import endpoint_namespace
from kvstore.leases import EndpointStore, RedisEndpoint
from router.admission import Accounts, Ledger, RedisLedger
from router.admission.tenants import TenantBook, TenantsFile
from router.api.grpc_api import MAX_MESSAGE_BYTES, SERVICE_NAMES, AdminServicer, Authentication, InferenceServicer
from router.api.http import HttpServer, connection_limits, http_servers
from router.api.operations import Operations
from router.api.places import OpenConnections
from router.api.sessions import opening_of
from router.cluster.history import ClusterHistory, HistoryStore, RedisHistory
from router.cluster.registry import Dependencies, EndpointWatch, Readiness
from router.cluster.watch import AlertBook, AlertWatch, LoadMeter
from router.models.entry import ModelEntry, ModelStores, Shared, load_model, own_announcement
from router.models.files import ModelFileCache
from router.models.follower import ModelFollower
from router.models.operated import OperatedModels
from router.models.table import ModelTable
from router.picker import Picker, Request, Sources, Wanted
from router.request.resume import STOP_S
from router.service import Front
from router.timeline.log import Ingress
from router.timeline.usage_log import UsageBook, UsageFile
from router.timeline.usage_marks import MarkStore, RedisMarks

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)


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
    table: ModelTable
    follower: ModelFollower
    endpoint: EndpointStore
    watch: EndpointWatch
    readiness: Readiness
    rpc: RpcServer
    picker: Picker | None
    """None: `router.picker_port` is not set."""
    http: tuple[HttpServer, ...]
    tenants_file: TenantsFile
    accounts: Accounts
    usage_book: UsageBook
    operations: Operations

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then give requests in flight up to `router.drain_timeout_s` to complete."""
        try:
            await self.follower.start()
            await self.rpc.start()
            if self.picker is not None:
                await self.picker.start()
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self.follower.run(), name="models"),
                    tasks.create_task(self.watch.run(), name="endpoint"),
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
                stopping = tasks.create_task(self._stop_requests(), name="requests")
                grace_s = self.config.router.drain_timeout_s + STOP_S
                picking = () if self.picker is None else (self.picker.stop(grace_s),)
                await asyncio.gather(self.rpc.stop(grace_s), *picking, *serving)
                for task in (*background, stopping):
                    task.cancel()
        finally:
            await self.rpc.stop(0)
            if self.picker is not None:
                await self.picker.stop(0)
            await self.follower.close()
            await self.accounts.close()
            await self.usage_book.close()
            await self.operations.history.close()
            await self.endpoint.close()
            if self.tracer is not None:
                self.tracer.shutdown()

    async def _stop_requests(self) -> None:
        await asyncio.sleep(self.config.router.drain_timeout_s)
        logger.info("router %s ends the requests that are left", self.config.router.id)
        self.table.stop_requests()

    async def _report_health(self) -> None:
        while True:
            is_ready = not self.readiness.why_not()
            await self.rpc.set_serving(is_ready)
            if self.picker is not None:
                await self.picker.set_serving(is_ready)
            await asyncio.sleep(min(self.config.index.poll_s, 0.2))


def build(config: Config) -> Router:
    """Build a router and bind its ports.

    Raises:
        ConfigError: a port is taken, no Redis is configured, the router listens beyond this machine without keys, the
            keys or the tenants' file are invalid, or the usage log cannot be written.
        ModelLoadError: the folder of the router's own model has no tokenizer.
    """
    if not config.index.redis_url:
        raise ConfigError("index.redis_url is not set, and the router needs Redis; set it or BATON_INDEX_REDIS_URL")
    keys = _keys(config)
    tenants = TenantsFile.load(config.router)
    usage_file = UsageFile(config.router.usage_log) if config.router.usage_log else None
    link, tls = MemberLink(keys, member_tls(config.cluster)), endpoint_tls(config)
    tracer = tracing.configure("baton-router", config.router.id, config.telemetry, link.tls, faces_clients=True)
    rpc, grpc_port = _bind(config, tenants, tls)
    stores = _EndpointStores.connect(config, link)
    watch = EndpointWatch(
        stores.endpoint,
        lambda: [each.watch for each in follower.entries],
        me=_announcement(config, grpc_port),
        redis=stores.redis,
        malformed=rpc.malformed,
        dependencies=Dependencies(stores.redis, {"members": link.tls, "routers": tls}),
        poll_s=config.index.poll_s,
    )
    instruments = Instruments(watch.status, config.router.slo_classes, config.telemetry.vllm_aliases)
    accounts = Accounts(stores.ledger, instruments, watch.num_routers, config.index.lease_s)
    usage_book = UsageBook(usage_file, stores.marks, instruments, watch.num_routers)
    front = Front.of(config.router, instruments, accounts, usage_book)
    shared = Shared(config=config, link=link, front=front, garbage=stores.garbage)
    table = ModelTable(front, config.router.default_model)
    files = ModelFileCache(own_part(cache_dir(config.cluster), "model-files"), link)
    follower = ModelFollower(table, shared, stores.endpoint, files, _own_entry(shared))
    readiness = _readiness(config, follower)
    operations = _operations(config, stores, watch, table, follower, instruments=instruments)
    InferenceServicer(table, Ingress(config.cluster.host, grpc_port), stall_s=config.router.stall_s).add_to(rpc.server)
    admin_pb2_grpc.add_AdminServicer_to_server(
        AdminServicer(watch.status, table.requests, operations.models), rpc.server
    )
    return Router(
        config=config,
        tracer=tracer,
        table=table,
        follower=follower,
        endpoint=stores.endpoint,
        watch=watch,
        readiness=readiness,
        rpc=rpc,
        picker=_picker(config, watch, table, tenants, tls),
        http=http_servers(config, table, tenants, readiness.why_not, instruments.exposition, operations=operations),
        tenants_file=TenantsFile(config.router, tenants, instruments),
        accounts=accounts,
        usage_book=usage_book,
        operations=operations,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndpointStores:
    """The router's connections to the stores of its endpoint, which all models share."""

    garbage: GarbageBook
    redis: RedisConnection
    """The connection of `endpoint`, which owns it."""
    endpoint: EndpointStore
    ledger: Ledger
    """The accounts own and close it."""
    marks: MarkStore
    """The usage book owns and closes them."""
    history: HistoryStore
    """The cluster's history owns and closes it."""

    @staticmethod
    def connect(config: Config, link: MemberLink) -> _EndpointStores:
        garbage, settings, namespace = GarbageBook(), config.index, endpoint_namespace(config.cluster.endpoint)
        seal = Seal(config.router.cache_secret) if config.router.cache_secret else None
        redis, counts, marks, history = (RedisConnection(settings.url, garbage, tls=link.tls) for _ in range(4))
        return _EndpointStores(
            garbage=garbage,
            redis=redis,
            endpoint=RedisEndpoint(redis, config.cluster.endpoint, lease_s=settings.lease_s, keys=link.keys),
            ledger=RedisLedger(counts, namespace),
            marks=RedisMarks(marks, namespace, seal=seal),
            history=RedisHistory(history, namespace, seal=seal),
        )


def _own_entry(shared: Shared) -> ModelEntry | None:
    """Return the entry of the model of the router's own configuration; None: it has none. Raises ModelLoadError."""
    config = shared.config
    if not config.router.own_model:
        return None
    folder, announced = Path(config.model.path), own_announcement(config)
    model = load_model(folder, config.model.chat_template, announced, config.router.default_max_tokens)
    return ModelEntry.build(shared, model, ModelStores.connect(shared, model.content_id), announced)


def _readiness(config: Config, follower: ModelFollower) -> Readiness:
    return Readiness(
        lambda: [each.pools for each in follower.entries],
        config.router.mode == "disaggregated",
        config.router.worker_wait_s,
        time.monotonic,
        has_read=lambda: follower.has_read,
        is_starting=lambda: follower.is_starting,
    )


def _picker(
    config: Config, watch: EndpointWatch, table: ModelTable, tenants: TenantBook, tls: Tls | None
) -> Picker | None:
    """Create the endpoint picker, and bind it; None: the configuration wants none. Raises ConfigError."""
    if not config.router.picker_port:
        return None

    def lookup(request: Request, model: str, body: Mapping[str, Any]) -> Wanted:
        tenant = tenants.identify(request.api_key)
        opening = request.session or opening_of(body)
        release = table.release(model, tenant, lambda: opening)
        return Wanted(f"{tenant.id}\0{opening}".encode("utf-8", "surrogatepass"), frozenset({release.content_id}))

    picker = Picker(config, Sources(routers=lambda: watch.routers, lookup=lookup, is_crowded=table.is_crowded))
    picker.bind(config.cluster.host, config.router.picker_port, tls)
    return picker


def _keys(config: Config) -> KeyFile | None:
    """Return the cluster's keys.

    Raises:
        ConfigError: the router listens beyond this machine without keys, or the keys are invalid.
    """
    keys = open_keys(config.cluster.secret, Principal.ROUTER)
    require_keys(keys, config.cluster.host, "cluster.host")
    return keys


def _operations(
    config: Config,
    stores: _EndpointStores,
    watch: EndpointWatch,
    table: ModelTable,
    follower: ModelFollower,
    *,
    instruments: Instruments,
) -> Operations:
    history = ClusterHistory(stores.history, f"{config.router.id}/{uuid.uuid4().hex[:12]}", instruments)
    connections = OpenConnections(limits=connection_limits(config.router))
    load = LoadMeter(lambda: connections.filled, lambda: table.in_flight)
    return Operations(
        router_id=config.router.id,
        status=watch.status,
        history=history,
        load=load,
        alerts=AlertBook(AlertWatch(config.router.id, watch.status, load, history)),
        connections=connections,
        classes=config.router.slo_classes,
        models=OperatedModels(lambda: follower.entries),
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

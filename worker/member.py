"""A worker as a member of the cluster: an engine with a lease and published blocks.

Workers of both roles are the same: the role in the lease only determines which calls routers send.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import AsyncGenerator
from dataclasses import replace

from baton import wire
from baton.addresses import address_of
from baton.blocks import content_id
from baton.cluster import MAX_LISTED_ADAPTERS, VERSION, Role, WorkerInfo, WorkerLoad, WorkerState, fallback
from baton.config import Config
from baton.errors import DeviceLost, StoreUnavailable
from baton.rpc import MalformedCount, RpcServer
from baton.serving_files import ProvidedFiles
from baton.tasks import cancel_and_wait
from baton.tls import member_tls
from baton.trust import Principal, open_keys
from engine.core.block_pool import Removed, Stored
from engine.core.outputs import EngineEvent, Idle
from engine.core.runner import KVSpec
from engine.core.serving import ServingEngine
from kvstore.index import IndexPublisher, RedisConnection, RedisIndex, StreamBounds
from kvstore.leases import LeaseKeeper, LeaseStore, RedisLeases
from kvstore.leases.codec import encode_load
from kvstore.transfer.copy.kernel_choice import kernels_of, why_not_kernels
from kvstore.transfer.endpoint import KvEndpoint, WorkerContext
from kvstore.transfer.local_worker import LocalWorker
from worker.ahead import peers_of

WIRE_VERSION = 2
"""Version of the KV transfer's protocol. Workers of different versions do not connect."""
LOOK_AROUND_S = 5.0
"""Interval at which a prefill worker looks for decode workers to which it has no connection yet."""


class Member:
    """Engine, KV endpoint, lease and index publisher of one worker process."""

    def __init__(self, role: Role, worker_id: str, host: str, config: Config, engine: ServingEngine) -> None:
        self.worker_id = worker_id
        self.host = host
        self.config = config
        self.keys = open_keys(config.cluster.secret, Principal.WORKER)
        """Keys with which it authenticates to other members; they are read again when their file changes. None: the
        cluster has no secret."""
        self.incarnation = os.urandom(8).hex()
        """Random identity of this process. KV transfers and call authentication are bound to it."""
        self.content_id = content_id(config.kv_identity)
        self.tls = member_tls(config.cluster)
        """TLS credentials for other members; None: the cluster uses plain text."""
        self.files = ProvidedFiles.of_model(config.model.path, config.model.chat_template)
        """Files of its model that routers and the controller may read."""
        self.wire_compat = wire_compat(config.kv_identity, engine.spec)
        self.engine = engine
        local = LocalWorker(
            worker_id=worker_id,
            incarnation=self.incarnation,
            caches=engine.caches,
            wire_compat=self.wire_compat,
            host=host,
            tls=self.tls,
            keys=self.keys,
            testing=config.testing,
        )
        self.kv = KvEndpoint(local, engine, config.transfer)
        self.context = WorkerContext(worker_id, engine, self.kv)
        """Context for the RPC handlers."""
        self._keeper: LeaseKeeper | None = None
        self._publisher: IndexPublisher | None = None
        self._role = role
        self._state = WorkerState.STARTING
        self._has_become = asyncio.Event()
        """Set whenever the state has changed."""
        self._info: WorkerInfo | None = None
        self._malformed = MalformedCount()
        self._measured_last: WorkerLoad | None = None
        self._num_loads = 0

    @property
    def info(self) -> WorkerInfo:
        assert self._info is not None, "the member has not joined yet"
        return self._info

    @property
    def role(self) -> Role:
        return self._role

    @property
    def state(self) -> WorkerState:
        return self._state

    def become(self, state: WorkerState, role: Role | None = None) -> None:
        """Change the state, and optionally the role, and renew the lease at once so that others see it."""
        self._state = state
        self.context.is_draining = state is WorkerState.DRAINING
        if role is not None:
            self._role = role
            self._info = replace(self.info, role=role)
        self._has_become.set()
        if self._keeper is not None:
            self._keeper.renew_soon()

    @contextlib.asynccontextmanager
    async def joined(self, rpc: RpcServer, port: int) -> AsyncGenerator[asyncio.Task[None]]:
        """Context manager: runs the engine and takes traffic.

        Yields:
            A task that ends with an error when the worker can no longer be part of the cluster: a newer incarnation has
                fenced it, or a part of it failed.

        Raises:
            DeviceLost: in a group, on exit: the step that was waited for hangs.
        """
        settings, self._malformed = self.config.index, rpc.malformed
        async with contextlib.AsyncExitStack() as stack:
            index = RedisIndex(
                RedisConnection(settings.url, tls=self.tls),
                self.content_id,
                blocks_ttl_s=settings.blocks_ttl_s,
                stream=StreamBounds(
                    max_events=settings.stream_max_events,
                    max_bytes=settings.stream_max_bytes,
                    max_age_s=settings.stream_max_age_s,
                ),
                keys=self.keys,
            )
            stack.push_async_callback(index.close)
            leases = RedisLeases(
                RedisConnection(settings.url, tls=self.tls),
                self.content_id,
                lease_s=settings.lease_s,
                blocks_ttl_s=settings.blocks_ttl_s,
                keys=self.keys,
            )
            stack.push_async_callback(leases.close)
            stack.push_async_callback(self.kv.close)
            keeper = self._keeper = LeaseKeeper(leases, self.worker_id, renew_s=settings.renew_s, report=self._report)
            epoch = await keeper.acquire()
            stack.push_async_callback(keeper.close)
            self._info = self._introduced(epoch, port)
            self.kv.receiver.kv_address = self.info.address
            self._publisher = self._publisher_of(epoch, index)
            await rpc.start()
            stack.push_async_callback(rpc.stop, 0)
            self._state = WorkerState.READY
            await rpc.set_serving(True)
            running = asyncio.create_task(self._run(keeper, index, leases, rpc), name="member")
            stack.push_async_callback(_end, running)
            yield running

    async def _run(self, keeper: LeaseKeeper, index: RedisIndex, leases: LeaseStore, rpc: RpcServer) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._answer_health(rpc), name="health")
            tasks.create_task(self.engine.run(self._on_engine_event), name="engine")
            tasks.create_task(self._watch_device(), name="device")
            tasks.create_task(self._belong(keeper, index), name="lease")
            if self.kv.sender.opens_slowly:
                tasks.create_task(self._open_ahead(leases), name="ahead")

    async def _answer_health(self, rpc: RpcServer) -> None:
        """Report in health checks whether the worker takes new work; its pod's readiness follows."""
        while True:
            self._has_become.clear()
            await rpc.set_serving(self._state is WorkerState.READY)
            await self._has_become.wait()

    async def _watch_device(self) -> None:
        """Stop the engine, as after a failed step, once a transfer has found that its device is lost."""
        self.engine.lose(await self.kv.device_lost())

    async def _open_ahead(self, leases: LeaseStore) -> None:
        """Open connections to decode workers before a KV transfer needs them, while this worker computes prompts.

        Each is chosen from a fresh view of the cluster, because connecting to the one before may have taken a minute.
        """
        while True:
            is_opened = False
            if self._role is Role.PREFILL and self._state is WorkerState.READY:
                with contextlib.suppress(StoreUnavailable):
                    is_opened = await self.kv.sender.open_ahead(peers_of(self.info, await leases.list_workers()))
            if not is_opened:
                await asyncio.sleep(LOOK_AROUND_S)

    async def _belong(self, keeper: LeaseKeeper, index: RedisIndex) -> None:
        """Keep the lease and publish under its epoch; after an expired lease, under the next epoch.

        The engine continues meanwhile: open streams do not depend on the index.
        """
        while True:
            async with asyncio.TaskGroup() as tasks:
                if self._publisher is not None:
                    publishing = tasks.create_task(self._publisher.run(), name="index")
                await keeper.run(lambda: (self._described(), self._load()))
                if self._publisher is not None:
                    publishing.cancel()  # before the next epoch exists, which would fence it
            epoch = await keeper.acquire()
            self._info = replace(self.info, epoch=epoch)
            self._publisher = self._publisher_of(epoch, index)

    def _publisher_of(self, epoch: int, index: RedisIndex) -> IndexPublisher | None:
        """Return the publisher of an epoch; None: blocks of this model cannot be reused."""
        if not self.engine.spec.supports_prefix_reuse:
            return None
        return IndexPublisher(index, self.worker_id, epoch, self.engine.keys)

    def _introduced(self, epoch: int, port: int) -> WorkerInfo:
        """Return the member's description, without how its KV is copied."""
        return WorkerInfo(
            id=self.worker_id,
            role=self._role,
            address=address_of(self.host, port),
            pid=os.getpid(),
            node=socket.gethostname(),
            epoch=epoch,
            content_id=self.content_id,
            wire_compat=self.wire_compat,
            block_size=self.engine.spec.block_size,
            max_model_len=self.engine.max_model_len,
            chunk_tokens=self.engine.max_step_tokens,
            version=VERSION,
            known_fields=wire.KNOWN_FIELDS,
            engine=self.engine.name,
            sampler=self.engine.sampler,
            incarnation=self.incarnation,
            computes=self.engine.computes,
            resumes_anywhere=self.engine.spec.resumes_anywhere,
            max_adapters=self.engine.max_adapters,
            takes_images=self.engine.takes_images,
            image_placeholder=self.engine.image_placeholder or 0,
            files=self.files.digest,
        )

    def _described(self) -> WorkerInfo:
        """Return the member's description, including how its KV is copied."""
        device = self.engine.caches[0].device
        computes, is_by_torch = self.engine.computes, kernels_of(device) is None
        fallbacks = computes.fallbacks
        if is_by_torch and device.type == "cuda":
            reason = why_not_kernels(device) or "its kernels do not run or move other bytes; the worker's log says more"
            fallbacks += (fallback("KV is copied by torch", reason),)
        copies = "torch" if is_by_torch else "kernels"
        return replace(self.info, computes=replace(computes, kv_copies=copies, fallbacks=fallbacks))

    def _report(self, load: WorkerLoad) -> bool:
        """Report a load with the next event; returns False if the lease must be renewed instead."""
        return self._publisher is not None and self._publisher.report(load.number, encode_load(load))

    def _load(self) -> WorkerLoad:
        """Return the present load, with a number that rises whenever it has changed."""
        load = self._measured()
        if load != self._measured_last:
            self._measured_last = load
            self._num_loads += 1
        return replace(load, number=self._num_loads)

    def _measured(self) -> WorkerLoad:
        load = self.engine.load()
        return WorkerLoad(
            state=self._state,
            running=load.running,
            waiting=load.waiting,
            queued_tokens=load.queued_tokens,
            blocks=load.blocks,
            state_rows=load.state_rows,
            preemptions=load.preemptions,
            costs=load.costs,
            busy_s=load.busy_s,
            computed_tokens=load.computed_tokens,
            drafted_tokens=load.drafted_tokens,
            accepted_tokens=load.accepted_tokens,
            model_drafted_tokens=load.model_drafted_tokens,
            model_accepted_tokens=load.model_accepted_tokens,
            self_check=self.engine.self_check,
            transfers=self.kv.counts(),
            connections=self.kv.connections(),
            malformed=self._malformed.total,
            expert_tokens=load.expert_tokens,
            adapters=load.adapters[-MAX_LISTED_ADAPTERS:],
            adapter_load_s=load.adapter_load_s,
        )

    def _on_engine_event(self, event: EngineEvent) -> None:
        """Publish blocks. When the engine becomes idle, renew the lease early to show it."""
        match event:
            case Idle():
                if self._keeper is not None:
                    self._keeper.renew_soon()
            case Stored(key):
                if self._publisher is not None:
                    self._publisher.stored([key])
            case Removed(key):
                if self._publisher is not None:
                    self._publisher.removed([key])


async def _end(running: asyncio.Task[None]) -> None:
    """Stop the tasks of a member. Their errors are dropped, except that the device is lost."""
    if running.done():
        return
    await cancel_and_wait([running])
    if not running.cancelled() and isinstance(error := running.exception(), BaseExceptionGroup):
        lost, _ = error.split(DeviceLost)
        if lost is not None:
            raise lost


def wire_compat(model_identity: str, spec: KVSpec) -> str:
    """Return the identity of what two workers must share to connect: the model and the structure of its KV.

    Block size, KV data type and tensor-parallel degree are not part of it: the transfer plan converts between them, or
    refuses with a message (`kvstore.transfer.protocol.plan.mismatch`). Pages of int8 have another structure, since
    their scales count among the dimensions.
    """
    groups = "|".join(f"{g.name}:{len(g.layers)}:{g.k_dim}:{g.v_dim}:{g.window}" for g in spec.groups)
    states = "|".join(f"{s.name}:{s.shape}:{s.dtype}" for s in spec.states)
    text = f"{WIRE_VERSION}\0{model_identity}\0{groups}\0{states}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

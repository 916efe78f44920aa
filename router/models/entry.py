"""A router's entry for one model: stores, pools, placement and service."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path

from baton.api import ModelCard
from baton.blocks import content_id
from baton.cluster import ModelAnnouncement, Role
from baton.config import Config
from baton.rpc.member_auth import MemberLink
from baton.v1 import admin_pb2
from kvstore.adapters import RedisAdapters
from kvstore.index import GarbageBook, Mirror, MirrorFollower, RedisConnection, RedisIndex, Seal
from kvstore.leases import RedisLeases, RedisRecords, ReportedLoads
from router.admission import ModelFacts, SloCounts
from router.answer import AnswerFormat
from router.cluster.orders import AdapterOrders, ControllerClient
from router.cluster.registry import ModelWatch
from router.models.table import Release
from router.placement.pool_view import UNKNOWN_LENGTH, HintTracker, PoolView
from router.prompt import Tokenizer
from router.request.model import LoadedModel
from router.request.resume import Journal
from router.serve import ChoiceDriver, Holding, ImageLooker, Waker
from router.serve.worker_client import WorkerClient
from router.service import Front, RouterService


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Dependencies that the entries of one router share."""

    config: Config
    link: MemberLink
    front: Front
    garbage: GarbageBook

    def connection(self) -> RedisConnection:
        """Return a new connection to Redis, which its owner closes."""
        return RedisConnection(self.config.index.url, self.garbage, tls=self.link.tls)

    @property
    def seal(self) -> Seal | None:
        """Cipher of the values in Redis that only routers may read; None: `router.cache_secret` is not set."""
        return Seal(secret) if (secret := self.config.router.cache_secret) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStores:
    """A model's stores in Redis, all under its content id."""

    leases: RedisLeases
    index: RedisIndex
    mirror: Mirror
    follower: MirrorFollower
    journal: Journal
    adapters: RedisAdapters

    @staticmethod
    def connect(shared: Shared, content: str) -> ModelStores:
        """Return the stores of a model, which connect when they are first used."""
        settings, keys, mirror = shared.config.index, shared.link.keys, Mirror()
        redis, own, records = (shared.connection() for _ in range(3))
        index, loads = RedisIndex(own, content, keys=keys), ReportedLoads(redis)
        follower = MirrorFollower(
            index,
            mirror,
            poll_s=settings.poll_s,
            lease_s=settings.lease_s,
            blocks_ttl_s=settings.blocks_ttl_s,
            on_load=loads.report,
        )
        return ModelStores(
            leases=RedisLeases(redis, content, lease_s=settings.lease_s, keys=keys, loads=loads),
            index=index,
            mirror=mirror,
            follower=follower,
            journal=Journal(RedisRecords(records, content, seal=shared.seal)),
            adapters=RedisAdapters(redis, content, keys=keys),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self.journal.close()
        await self.index.close()
        await self.leases.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model that a router serves. `run` keeps its view of the pools current."""

    model: LoadedModel
    stores: ModelStores
    pools: PoolView
    client: WorkerClient
    watch: ModelWatch
    service: RouterService
    controller: ControllerClient
    adapters: AdapterOrders
    counts: SloCounts
    waker: Waker

    @staticmethod
    def build(shared: Shared, model: LoadedModel, stores: ModelStores, announcement: ModelAnnouncement) -> ModelEntry:
        """Return the entry of a loaded model. It serves once `start` has returned and while `run` runs."""
        config, keys, front = shared.config, shared.link.keys, shared.front
        router = replace(config.router, mode=announcement.mode)
        pools = PoolView(stores.mirror.lookup, time.monotonic, model.facts.max_model_len, config.index.lease_s)
        client, counts = WorkerClient(keys, shared.link.tls), SloCounts()
        controller = ControllerClient(lambda: watch.controller(), keys, shared.link.tls)
        waker = Waker(pools, lambda: controller.wake(admin_pb2.WakeModelRequest()), router)
        holding = Holding(pools=pools, held=front.held, waker=waker, config=router)
        watch = ModelWatch(
            announcement,
            leases=stores.leases,
            pools=pools,
            client=client,
            follower=stores.follower,
            counts=counts,
            num_held=lambda: holding.num_held,
            adapters=stores.adapters,
            poll_s=config.index.poll_s,
            lease_s=config.index.lease_s,
            engines=_engines(config, model.content_id),
        )
        driver = ChoiceDriver(
            pools=pools,
            client=client,
            hints=HintTracker(stores.mirror, front.instruments),
            config=router,
            instruments=front.instruments,
            waker=waker,
            keys=keys,
            labels={"model": model.facts.id, "release": model.release},
        )
        service = RouterService(
            model,
            front,
            driver=driver,
            holding=holding,
            looker=ImageLooker(pools=pools, client=client, config=router, waker=waker),
            journal=stores.journal,
            slo_counts=counts,
            worker_limit=pools.max_model_len,
            adapters=lambda: stores.adapters.adapters,
        )
        return ModelEntry(
            model=model,
            stores=stores,
            pools=pools,
            client=client,
            watch=watch,
            service=service,
            controller=controller,
            adapters=AdapterOrders(stores.adapters, client, lambda: pools.workers, model.facts.id),
            counts=counts,
            waker=waker,
        )

    @property
    def announcement(self) -> ModelAnnouncement:
        """The model as its controller announced it last."""
        return self.watch.announcement

    @property
    def release(self) -> Release:
        """The release of the model for the table of models."""
        return Release(
            content_id=self.model.content_id,
            name=self.announcement.name,
            release=self.announcement.release,
            share=self.announcement.share,
            service=self.service,
        )

    async def start(self) -> None:
        """Start the encoder's processes, so that the first requests need not wait for them.

        Raises:
            ModelLoadError: the model's chat template is not valid.
        """
        await self.service.start()

    async def run(self) -> None:
        """Follow the model's pools and its index, and write the journal, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.stores.follower.run(), name="mirror")
            tasks.create_task(self.watch.run(), name="model")
            tasks.create_task(self.stores.journal.run(), name="journal")

    async def close(self) -> None:
        """Close connections, processes and threads. It cannot serve afterwards."""
        await self.waker.close()
        await self.client.close()
        await self.stores.close()
        self.service.close()


def _engines(config: Config, content: str) -> dict[Role, tuple[str, ...]]:
    """Return the settings in which the pools' engines differ. A router knows those of its own model only."""
    if content != content_id(config.kv_identity):
        return {}
    return {role: config.differing_settings(role) for role in Role}


def own_announcement(config: Config) -> ModelAnnouncement:
    """Return an announcement of a router's own model, for use until its controller announces the model."""
    return ModelAnnouncement(
        content_id=content_id(config.kv_identity),
        name=config.model.served_name or Path(config.model.path).name,
        path=config.model.path,
        release=config.release,
        share=config.model.share,
        files="",
        max_model_len=config.engine.max_model_len,
        weights=config.model.weights,
        kv_dtype=config.engine_of(Role.DECODE).kv_dtype,
        mode=config.router.mode,
        created_s=int(time.time()),
    )


def load_model(folder: Path, chat_template: str, announced: ModelAnnouncement, default_max_tokens: int) -> LoadedModel:
    """Load what a router needs of a model: about a second of work, in any thread.

    Args:
        folder: folder with the model's files.
        chat_template: file with a chat template to use instead of the model's own; empty: none.
        default_max_tokens: `router.default_max_tokens`.

    Raises:
        ModelLoadError: the folder has no tokenizer, or one of the files is not valid.
    """
    tokenizer = Tokenizer.load(folder, chat_template)
    max_model_len = min(tokenizer.max_model_len or UNKNOWN_LENGTH, announced.max_model_len or UNKNOWN_LENGTH)
    return LoadedModel(
        card=ModelCard(
            id=announced.name,
            path=announced.path,
            max_model_len=max_model_len,
            created=announced.created_s,
            weights=announced.weights,
            kv_dtype=announced.kv_dtype,
        ),
        tokenizer=tokenizer,
        format=AnswerFormat.load(tokenizer),
        content_id=announced.content_id,
        release=announced.release,
        facts=ModelFacts(
            id=announced.name,
            vocab_size=tokenizer.vocab_size,
            max_model_len=max_model_len,
            default_sampling=tokenizer.default_sampling,
            default_max_tokens=default_max_tokens,
        ),
    )

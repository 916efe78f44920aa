"""Which models a router serves, as their controllers announce them, change them, and fall silent."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cluster import ControllerInfo, ModelAnnouncement, WorkerLoad, WorkerState
from baton.config import Config, IndexConfig, RouterConfig
from baton.errors import BatonError, ModelLoadError, ModelNotFound, StoreUnavailable
from baton.rpc.member_auth import MemberLink
from baton.rpc.model_files import FileSource
from baton.tasks import cancel_and_wait
from baton.telemetry.instruments import Instruments
from kvstore.adapters import MemoryAdapters
from kvstore.index import GarbageBook, MemoryIndex, MemoryStore, Mirror, MirrorFollower
from kvstore.leases import MODEL_LEASE_S, MemoryEndpoint, MemoryLeases, MemoryRecords
from router.admission import Accounts, MemoryLedger, SloCounts
from router.admission.tenants import DEFAULT_TENANT
from router.models import follower as module
from router.models.entry import ModelEntry, ModelStores, Shared
from router.models.follower import LINGER_S, RETRY_S, ModelFollower
from router.models.table import ModelTable, Release
from router.request.resume import Journal
from router.service import Front
from router.timeline.usage_log import UsageBook
from router.timeline.usage_marks import MemoryMarks
from tests.support.builders import cluster_status, model_announcement, worker_info
from tests.support.waiting import until

POLL_S = 0.005
LLAMA = model_announcement("llama", name="llama", release="llama-1", files="1" * 64)
QWEN = model_announcement("qwen", name="qwen", release="qwen-1", files="2" * 64)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Endpoint(MemoryEndpoint):
    """It counts how often the announcements are read, and can be away."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.num_reads = 0
        self.is_away = False

    async def list_models(self) -> list[ModelAnnouncement]:
        self.num_reads += 1
        if self.is_away:
            raise StoreUnavailable("away")
        return await super().list_models()


class Files:
    """A cache of files whose reads fail or take as long as a test wishes.

    Attributes:
        wanted: sets that were asked for, in order.
        problems: errors of the next reads by digest.
        stalled: digests whose reads do not end.
    """

    def __init__(self, folder: Path = Path()) -> None:
        self._folder = folder
        self.wanted: list[str] = []
        self.released: list[str] = []
        self.problems: dict[str, BatonError] = {}
        self.stalled: set[str] = set()
        self.num_at_once = 0
        self.most_at_once = 0

    async def folder(self, digest: str, sources: Sequence[FileSource]) -> Path:
        self.wanted.append(digest)
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await until(lambda: digest not in self.stalled, every_s=POLL_S)
            if digest in self.problems:
                raise self.problems[digest]
            return self._folder
        finally:
            self.num_at_once -= 1

    def release(self, digest: str) -> None:
        self.released.append(digest)

    def close(self) -> None: ...


class Entry:
    """A model of a router, of which nothing runs.

    Attributes:
        log: what has become of it.
        is_known: whether a worker or its controller shows that it exists.
    """

    def __init__(self, announcement: ModelAnnouncement) -> None:
        self.model = SimpleNamespace(content_id=announcement.content_id)
        self.watch: Any = SimpleNamespace(announcement=announcement, is_known=False, poll=self._poll)
        self.counts = SloCounts()
        self.service: Any = SimpleNamespace(adapters={}, is_crowded=False)
        self.log: list[str] = []

    @property
    def announcement(self) -> ModelAnnouncement:
        now: ModelAnnouncement = self.watch.announcement
        return now

    @property
    def release(self) -> Release:
        now = self.announcement
        return Release(
            content_id=now.content_id, name=now.name, release=now.release, share=now.share, service=self.service
        )

    async def start(self) -> None:
        self.log.append("started")

    async def _poll(self) -> None:
        self.log.append("polled")

    async def run(self) -> None:
        self.log.append("runs")
        try:
            await asyncio.Event().wait()
        finally:
            self.log.append("ended")

    async def close(self) -> None:
        self.log.append("closed")

    @property
    def is_closed(self) -> bool:
        return "closed" in self.log


def shared_of(config: Config) -> Shared:
    instruments = Instruments(cluster_status)
    accounts = Accounts(MemoryLedger(), instruments, lambda: 1)
    front = Front.of(config.router, instruments, accounts, UsageBook(None, MemoryMarks(), instruments))
    return Shared(config=config, link=MemberLink(None, None), front=front, garbage=GarbageBook())


class Scene:
    """A follower and what it follows.

    Attributes:
        entries: all entries that were built, in order.
    """

    def __init__(self, own: Entry | None = None, max_models: int = 64, files: Files | None = None) -> None:
        self.clock = Clock()
        self.store = MemoryStore(self.clock)
        self.endpoint, self.files, self.entries = Endpoint(self.store), files or Files(), list[Any]()
        shared = shared_of(Config(router=RouterConfig(max_models=max_models), index=IndexConfig(poll_s=POLL_S)))
        self.table = ModelTable(shared.front)
        stand_in: Any = own
        cache: Any = self.files
        self.follower = ModelFollower(self.table, shared, self.endpoint, cache, stand_in, clock=self.clock)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.follower.run())
        try:
            async with asyncio.timeout(60):
                yield
        finally:
            await cancel_and_wait([task])
            await self.follower.close()

    async def announce(self, *models: ModelAnnouncement) -> None:
        for each in models:
            await self.endpoint.announce_model(each)

    def forget(self, model: ModelAnnouncement) -> None:
        """The announcement has expired."""
        del self.store.models[model.content_id]

    async def closes(self, entry: Entry) -> None:
        """Wait until an entry without requests is closed, and not before its time."""
        await self.polls()
        assert not entry.is_closed, "a request may have found its service, and not begun yet"
        self.clock.now_s += LINGER_S
        await until(lambda: entry.is_closed)

    async def polls(self, num: int = 4) -> None:
        """The follower has read the announcements so many times more, and done what follows."""
        number = self.endpoint.num_reads + num
        await until(lambda: self.endpoint.num_reads > number, every_s=POLL_S)

    async def serves(self, *names: str) -> None:
        await until(lambda: self.served == set(names), every_s=POLL_S, seen=lambda: self.served)

    @property
    def served(self) -> set[str]:
        return {each.name for each in self.table.releases}

    def refuses(self, name: str) -> bool:
        try:
            self.table.service(name, DEFAULT_TENANT, str)
        except ModelNotFound:
            return True
        return False


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    """Makes scenes whose entries are stand-ins."""

    def make(*args: Any, **values: Any) -> Scene:
        made = Scene(*args, **values)

        def build(shared: Shared, model: object, stores: object, announced: ModelAnnouncement) -> Entry:
            made.entries.append(entry := Entry(announced))
            return entry

        async def close() -> None: ...

        def connect(shared: Shared, content: str) -> Any:
            return SimpleNamespace(leases=MemoryLeases(MemoryStore()), close=close)

        monkeypatch.setattr(ModelStores, "connect", staticmethod(connect))
        monkeypatch.setattr(ModelEntry, "build", staticmethod(build))
        monkeypatch.setattr(module, "load_model", lambda *args: None)
        return made

    return make


Make = Callable[..., Scene]


async def test_an_announced_model_is_served_once_its_pools_are_known(scene: Make) -> None:
    now = scene()
    async with now.running():
        await now.polls(1)
        assert now.follower.has_read
        assert now.refuses("llama")
        await now.announce(LLAMA, QWEN)
        await now.serves("llama", "qwen")
        llama, qwen = sorted(now.entries, key=lambda each: each.announcement.name)
        await until(lambda: llama.log == ["started", "polled", "runs"])
        assert now.table.service("llama", DEFAULT_TENANT, str) is llama.service
        assert list(now.follower.entries) == [llama, qwen], "by content id"
    assert llama.log == ["started", "polled", "runs", "ended", "closed"]
    assert qwen.is_closed


async def test_a_share_and_a_sleep_change_without_another_load(scene: Make) -> None:
    now = scene()
    async with now.running():
        await now.announce(LLAMA)
        await now.serves("llama")
        (entry,) = now.entries
        asleep = replace(LLAMA, share=0.25, is_asleep=True, wake_s=9.0, problem="no room")
        await now.announce(asleep)
        await until(lambda: [each.share for each in now.table.releases] == [0.25])
        await now.polls()
        assert entry.announcement == asleep
        assert (now.entries, now.files.wanted) == ([entry], [LLAMA.files])


async def test_a_changed_name_is_loaded_anew_and_the_former_entry_ends_with_its_last_request(scene: Make) -> None:
    now = scene()
    async with now.running():
        await now.announce(LLAMA)
        await now.serves("llama")
        (first,) = now.entries
        first.counts.in_flight = 1
        await now.announce(replace(LLAMA, name="lama"))
        await now.serves("lama")
        assert now.refuses("llama")
        await now.polls()
        assert not first.is_closed
        first.counts.in_flight = 0
        await now.closes(first)
        _, second = now.entries
        assert now.table.service("lama", DEFAULT_TENANT, str) is second.service
        assert not second.is_closed
        assert now.files.released == [], "the new entry has the same files"


async def test_a_model_that_leaves_is_refused_at_once_and_closed_after_its_last_request(scene: Make) -> None:
    now = scene()
    async with now.running():
        await now.announce(LLAMA, QWEN)
        await now.serves("llama", "qwen")
        llama = next(each for each in now.entries if each.announcement.name == "llama")
        llama.counts.in_flight = 1
        await now.announce(replace(LLAMA, is_leaving=True))
        await now.serves("qwen")
        assert now.refuses("llama")
        await now.polls()
        assert llama.announcement.is_leaving
        assert not llama.is_closed
        assert llama in now.follower.entries, "operators see it until then"
        llama.counts.in_flight = 0
        await now.closes(llama)
        await now.polls()
        assert llama not in now.follower.entries
        assert llama.log[-2:] == ["ended", "closed"]
        assert now.files.released == [LLAMA.files]
        assert now.files.wanted.count(LLAMA.files) == 1, "it was loaded again to leave"


async def test_a_model_that_leaves_and_comes_back_is_the_same(scene: Make) -> None:
    now = scene()
    async with now.running():
        await now.announce(LLAMA)
        await now.serves("llama")
        (entry,) = now.entries
        entry.counts.in_flight = 1
        await now.announce(replace(LLAMA, is_leaving=True))
        await now.serves()
        await now.announce(LLAMA)
        await now.serves("llama")
        entry.counts.in_flight = 0
        await now.polls()
        assert (now.entries, entry.is_closed) == ([entry], False)
        assert not entry.announcement.is_leaving


async def test_a_model_of_which_nothing_is_heard_goes_after_a_lease(scene: Make) -> None:
    now = scene()
    async with now.running():
        await now.announce(LLAMA)
        await now.serves("llama")
        now.forget(LLAMA)
        await now.polls()
        now.clock.now_s += MODEL_LEASE_S - 1
        await now.polls()
        assert now.served == {"llama"}, "its controller may be starting again"
        now.clock.now_s += 2
        await now.serves()
        await now.closes(now.entries[0])


async def test_the_time_without_an_announcement_begins_anew_after_one(scene: Make) -> None:
    now = scene()
    async with now.running():
        await now.announce(LLAMA)
        await now.serves("llama")
        for _ in range(3):
            now.forget(LLAMA)
            await now.polls()
            now.clock.now_s += 0.6 * MODEL_LEASE_S
            await now.polls()
            assert now.served == {"llama"}
            await now.announce(LLAMA)
            await now.polls()


async def test_workers_keep_a_model_whose_announcement_is_missing(scene: Make) -> None:
    now = scene()
    async with now.running():
        await now.announce(LLAMA)
        await now.serves("llama")
        (entry,) = now.entries
        entry.watch.is_known = True
        now.forget(LLAMA)
        await now.polls()
        now.clock.now_s += 10 * MODEL_LEASE_S
        await now.polls()
        assert now.served == {"llama"}
        entry.watch.is_known = False
        await now.polls()
        assert now.served == {"llama"}, "the lease begins when the last worker has gone"
        now.clock.now_s += MODEL_LEASE_S + 1
        await now.serves()


async def test_a_store_that_is_away_removes_nothing(scene: Make) -> None:
    now = scene()
    async with now.running():
        await now.announce(LLAMA)
        await now.serves("llama")
        now.endpoint.is_away = True
        now.clock.now_s += 10 * MODEL_LEASE_S
        await now.polls()
        assert now.served == {"llama"}


async def test_a_model_that_cannot_be_loaded_is_tried_again_ever_more_rarely_and_reported_once(
    scene: Make, caplog: pytest.LogCaptureFixture
) -> None:
    now = scene()
    now.files.problems[LLAMA.files] = ModelLoadError("no worker provides its files")

    def num_reports() -> int:
        return sum("llama cannot be served yet" in record.message for record in caplog.records)

    async with now.running():
        await now.announce(LLAMA, QWEN)
        await now.serves("qwen")
        for number, pause_s in enumerate((*RETRY_S, RETRY_S[-1]), start=1):
            await until(lambda number=number: now.files.wanted.count(LLAMA.files) == number)  # type: ignore[misc]
            await now.polls()
            now.clock.now_s += pause_s - 0.1
            await now.announce(LLAMA, QWEN)
            await now.polls()
            assert now.files.wanted.count(LLAMA.files) == number, "too early"
            now.clock.now_s += 0.2
        assert num_reports() == 1
        await until(lambda: now.files.wanted.count(LLAMA.files) == len(RETRY_S) + 2)
        now.files.problems[LLAMA.files] = ModelLoadError("the tokenizer is not valid")
        await now.polls()
        now.clock.now_s += RETRY_S[-1] + 1
        await until(lambda: num_reports() == 2)
        del now.files.problems[LLAMA.files]
        now.clock.now_s += RETRY_S[-1] + 1
        await now.announce(LLAMA, QWEN)
        await now.serves("llama", "qwen")


async def test_the_next_attempt_loads_what_is_announced_then(scene: Make) -> None:
    """Regression: a model announced with wrong files was tried with them for ever."""
    now = scene()
    now.files.problems[LLAMA.files] = ModelLoadError("the files are damaged")
    async with now.running():
        await now.announce(LLAMA)
        await until(lambda: now.files.wanted == [LLAMA.files])
        await now.polls()
        await now.announce(replace(LLAMA, files="3" * 64))
        await now.polls()
        now.clock.now_s += RETRY_S[0] + 1
        await now.serves("llama")
        assert now.entries[0].announcement.files == "3" * 64


@pytest.mark.parametrize("how", ["leaves", "is forgotten"])
async def test_a_model_that_goes_while_it_is_loaded_is_never_served(scene: Make, how: str) -> None:
    """Regression: a model that left was served for a moment as soon as it was loaded."""
    now = scene()
    now.files.stalled.add(LLAMA.files)
    async with now.running():
        await now.announce(LLAMA)
        await until(lambda: now.files.wanted == [LLAMA.files])
        if how == "leaves":
            await now.announce(replace(LLAMA, is_leaving=True))
        else:
            now.forget(LLAMA)
        await now.polls()
        now.files.stalled.clear()
        await now.polls()
        assert (now.entries, now.files.num_at_once) == ([], 0)


async def test_an_entry_that_is_built_and_not_wanted_any_more_is_closed(scene: Make) -> None:
    """Regression: its connections stayed open."""
    now = scene()
    now.files.stalled.add(LLAMA.files)
    async with now.running():
        await now.announce(LLAMA)
        await until(lambda: now.files.wanted == [LLAMA.files])
        now.endpoint.is_away = True
        await now.polls(1)
        now.files.stalled.clear()
        await until(lambda: bool(now.entries) and "polled" in now.entries[0].log)
        now.forget(LLAMA)
        now.endpoint.is_away = False
        await until(lambda: now.entries[0].is_closed)
        assert "runs" not in now.entries[0].log
        assert now.served == set()


async def test_few_models_are_loaded_at_a_time(scene: Make) -> None:
    now = scene()
    models = [model_announcement(f"c{n}", name=f"m{n}", files=f"{n}" * 64) for n in range(6)]
    now.files.stalled = {each.files for each in models}
    async with now.running():
        await now.announce(*models)
        await until(lambda: now.files.num_at_once == module.LOADS_AT_ONCE)
        await now.polls()
        now.files.stalled.clear()
        await now.serves(*(each.name for each in models))
        assert now.files.most_at_once == module.LOADS_AT_ONCE


async def test_models_beyond_the_most_are_ignored_until_there_is_room(
    scene: Make, caplog: pytest.LogCaptureFixture
) -> None:
    now = scene(max_models=1)
    async with now.running():
        await now.announce(LLAMA)
        await now.serves("llama")
        await now.announce(QWEN)
        await now.polls()
        assert now.served == {"llama"}
        assert sum("more than 1 models" in record.message for record in caplog.records) == 1
        await now.announce(replace(LLAMA, name="lama"))
        await now.serves("lama")
        await now.announce(replace(LLAMA, is_leaving=True))
        await now.serves()
        await now.polls()
        now.clock.now_s += LINGER_S
        await now.serves("qwen")


OWN = model_announcement("own", name="own", release="own-1", files="")


async def test_the_own_model_is_served_from_the_start_and_never_closed(scene: Make) -> None:
    own = Entry(OWN)
    now, served = scene(own), list[Any]()
    served += now.follower.entries
    assert (now.served, served) == ({"own"}, [own])
    await now.follower.start()
    assert own.log == ["started"]
    async with now.running():
        await now.polls()
        now.clock.now_s += 10 * MODEL_LEASE_S
        await now.polls()
        assert now.served == {"own"}, "nobody has announced it"
        await now.announce(replace(OWN, is_leaving=True))
        await now.serves()
        assert now.refuses("own")
        await now.polls()
        assert not own.is_closed
        await now.announce(OWN)
        await now.serves("own")
        assert own.log == ["started", "runs"]
    assert own.is_closed


async def test_the_own_model_takes_from_its_controller_only_what_the_controller_knows(scene: Make) -> None:
    own = Entry(OWN)
    now = scene(own)
    async with now.running():
        said = replace(OWN, name="other", files="5" * 64, share=0.5, release="own-2", is_asleep=True, wake_s=3.0)
        await now.announce(said)
        await until(lambda: own.announcement.share == 0.5)
        assert own.announcement == replace(said, name="own", files="")
        assert (now.entries, now.files.wanted) == ([], [])
        assert [each.release for each in now.table.releases] == ["own-2"]


async def test_a_router_that_stops_closes_an_own_model_that_never_ran(scene: Make) -> None:
    own = Entry(OWN)
    await scene(own).follower.close()
    assert own.is_closed


async def test_a_real_model_lives_as_long_as_a_worker_or_its_controller_does(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Scene(files=Files(model_dir))
    known = MemoryStore(time.time)
    leases = MemoryLeases(known, lease_s=600)

    def connect(shared: Shared, content: str) -> Any:
        mirror, index = Mirror(), MemoryIndex(known)
        return SimpleNamespace(
            leases=leases,
            index=index,
            mirror=mirror,
            follower=MirrorFollower(index, mirror),
            journal=Journal(MemoryRecords(known)),
            adapters=MemoryAdapters(known),
            close=index.close,
        )

    monkeypatch.setattr(ModelStores, "connect", staticmethod(connect))
    info = worker_info("w", epoch=await leases.acquire("w"))
    await leases.renew(info, WorkerLoad(state=WorkerState.READY))
    model = replace(LLAMA, max_model_len=123, created_s=7)
    async with now.running():
        await now.announce(model)
        await now.serves("llama")
        (card,) = now.table.cards(DEFAULT_TENANT)
        assert (card.id, card.max_model_len, card.created) == ("llama", 123, 7)
        (entry,) = now.follower.entries
        assert [each.info.id for each in entry.pools.workers] == ["w"], "known before the first request"
        now.forget(model)
        await now.polls()
        now.clock.now_s += MODEL_LEASE_S + 1
        await now.polls()
        assert now.served == {"llama"}
        await leases.announce_controller(ControllerInfo(pid=1, address="127.0.0.1:1", incarnation="i"))
        await until(lambda: entry.watch.controller() is not None)
        await leases.release("w", info.epoch)
        await until(lambda: not entry.pools.workers)
        await now.polls()
        now.clock.now_s += MODEL_LEASE_S + 1
        await now.polls()
        assert now.served == {"llama"}
        known.controller = None
        await until(lambda: entry.watch.controller() is None)
        await now.polls()
        now.clock.now_s += MODEL_LEASE_S + 1
        await now.serves()
        await now.polls()
        now.clock.now_s += LINGER_S
        await until(lambda: not now.follower.entries)

"""A router follows the announcements of models, with stand-ins for the models themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cluster import ModelAnnouncement
from baton.errors import ModelLoadError, ModelNotFound, StoreUnavailable
from router.admission import SloCounts
from router.admission.tenants import DEFAULT_TENANT
from router.models import follower as module
from router.models.entry import ModelEntry, ModelStores
from router.models.follower import ModelFollower
from router.models.table import ModelTable
from tests.support.builders import model_announcement
from tests.support.models import release, table_of
from tests.support.waiting import until

OTHER = "d" * 32


class Entry:
    """A model that is served: it counts how often it was closed."""

    def __init__(self, router: Router, announced: ModelAnnouncement) -> None:
        self.router = router
        self.counts = SloCounts()
        self.watch = SimpleNamespace(announcement=announced, is_known=False, poll=self._poll)
        self.model = SimpleNamespace(content_id=announced.content_id)
        self.service = SimpleNamespace(facts=SimpleNamespace(id=announced.name), adapters={})
        self.num_closed = 0

    @property
    def announcement(self) -> ModelAnnouncement:
        announced: ModelAnnouncement = self.watch.announcement
        return announced

    @property
    def release(self) -> Any:
        return release(self.service, self.announcement.name, self.announcement.content_id, self.announcement.share)

    async def start(self) -> None:
        pass

    async def _poll(self) -> None:
        await self.router.may_start.wait()

    async def run(self) -> None:
        if self.router.runs_fail:
            self.router.runs_fail -= 1
            raise ValueError("one model's index is not valid")
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.num_closed += 1


class Router:
    """A follower, what it reads, and what it has built.

    Attributes:
        announced: what the store lists; None: it is away.
        failures: digest of files -> error of loading a model with them.
        entries: everything that was built, in order.
        held: digests of the files that must not be removed.
    """

    def __init__(self, *, has_own: bool = False) -> None:
        self.announced: list[ModelAnnouncement] | None = None
        self.failures: dict[str, BaseException] = {}
        self.entries: list[Entry] = []
        self.held: set[str] = set()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.runs_fail = 0
        self.table: ModelTable = table_of()
        settings = SimpleNamespace(max_models=3, default_max_tokens=16)
        shared: Any = SimpleNamespace(config=SimpleNamespace(index=SimpleNamespace(poll_s=0.01), router=settings))
        store: Any = SimpleNamespace(list_models=self._listed)
        files: Any = SimpleNamespace(folder=self._folder, release=self.held.discard, close=lambda: None)
        own: Any = self.build(shared, None, None, model_announcement(files="")) if has_own else None
        self.follower = ModelFollower(self.table, shared, store, files, own)

    async def _listed(self) -> list[ModelAnnouncement]:
        if self.announced is None:
            raise StoreUnavailable("away")
        return list(self.announced)

    async def _folder(self, digest: str, sources: object) -> str:
        self.held.add(digest)
        return digest

    def load(self, folder: str, template: str, announced: ModelAnnouncement, default: int) -> object:
        if (failure := self.failures.get(folder)) is not None:
            raise failure
        return SimpleNamespace()

    def build(self, shared: object, model: object, stores: object, announced: ModelAnnouncement) -> Entry:
        self.entries.append(Entry(self, announced))
        return self.entries[-1]

    def serves(self, name: str = "m") -> bool:
        with contextlib.suppress(ModelNotFound):
            return bool(self.table.service(name, DEFAULT_TENANT, lambda: ""))
        return False


@pytest.fixture
async def router(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Router]:
    made = Router(has_own=getattr(request, "param", False))

    async def nothing(*of_call: object) -> list[Any]:
        return []

    monkeypatch.setattr(module, "RETRY_S", (0.01,))
    monkeypatch.setattr(module, "RERUN_S", 0.01)
    monkeypatch.setattr(module, "LINGER_S", 0.1)
    monkeypatch.setattr(module, "_sources", nothing)
    monkeypatch.setattr(module, "load_model", made.load)
    monkeypatch.setattr(ModelStores, "connect", lambda *_: SimpleNamespace(close=nothing))
    monkeypatch.setattr(ModelEntry, "build", made.build)
    running = asyncio.create_task(made.follower.run())
    yield made
    ended_early = running.done()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await made.follower.close()
    assert not ended_early, "the router has ended"
    assert [each.num_closed for each in made.entries] == [1] * len(made.entries)


async def test_an_announced_model_is_served_until_it_leaves(router: Router) -> None:
    router.announced = [model_announcement()]
    await until(router.serves, 5)
    router.announced = [model_announcement(is_leaving=True)]
    await until(lambda: not router.serves(), 5)


@pytest.mark.parametrize("failure", [ModelLoadError("no tokenizer"), ValueError("no integer"), KeyError("type")])
async def test_a_model_that_cannot_be_loaded_leaves_the_others_alone(router: Router, failure: Exception) -> None:
    """Whatever its files do to the code that reads them: a router serves the models of many owners."""
    router.failures["0" * 64] = failure
    router.announced = [model_announcement(files="0" * 64)]
    await asyncio.sleep(0.05)
    router.announced = [*router.announced, model_announcement(OTHER, name="other")]
    await until(lambda: router.serves("other"), 5)
    assert not router.serves("m")
    del router.failures["0" * 64]
    await until(router.serves, 5)


async def test_an_entry_stays_for_the_request_that_has_found_it_and_not_begun(router: Router) -> None:
    """A request finds the service of its model first, and is counted when it begins."""
    router.announced = [model_announcement()]
    await until(router.serves, 5)
    router.announced = [model_announcement(release="m-2")]
    await until(lambda: len(router.entries) == 2, 5)
    old = router.entries[0]
    await asyncio.sleep(0.03)
    assert not old.num_closed
    old.counts.in_flight = 1
    await asyncio.sleep(0.15)
    assert not old.num_closed
    old.counts.in_flight = 0
    await until(lambda: old.num_closed, 5)
    assert router.serves()


async def test_a_model_whose_files_have_changed_while_it_could_not_be_loaded_is_loaded_with_the_new_ones(
    router: Router,
) -> None:
    router.failures["0" * 64] = ModelLoadError("no worker provides these files any more")
    router.announced = [model_announcement(files="0" * 64)]
    await until(lambda: "0" * 64 in router.held, 5)
    router.announced = [model_announcement(files="1" * 64)]
    await until(router.serves, 5)


async def test_a_model_that_leaves_while_it_is_loaded_is_not_served(router: Router) -> None:
    router.may_start.clear()
    router.announced = [model_announcement()]
    await until(lambda: router.entries, 5)
    router.announced = [model_announcement(is_leaving=True)]
    await until(lambda: router.entries[0].num_closed, 5)
    router.may_start.set()
    await asyncio.sleep(0.05)
    assert not router.serves()


async def test_an_entry_that_is_loaded_when_its_announcement_is_gone_is_closed(router: Router) -> None:
    """An announcement that comes and goes must not leave processes and connections behind."""
    router.may_start.clear()
    router.announced = [model_announcement()]
    await until(lambda: router.entries, 5)
    router.announced = []
    router.may_start.set()
    await until(lambda: router.entries[0].num_closed, 5)


async def test_files_stay_while_a_model_that_has_the_same_ones_is_loaded(router: Router) -> None:
    router.announced = [model_announcement()]
    await until(router.serves, 5)
    router.may_start.clear()
    same = model_announcement(OTHER, name="other")
    router.announced = [*router.announced, same]
    await until(lambda: len(router.entries) == 2, 5)
    router.announced = [model_announcement(is_leaving=True), same]
    await until(lambda: router.entries[0].num_closed, 5)
    assert router.held == {"f" * 64}
    router.announced = []
    await until(lambda: not router.held, 5)
    router.may_start.set()


async def test_files_of_a_model_that_could_not_be_loaded_may_be_removed(router: Router) -> None:
    router.failures["0" * 64] = ModelLoadError("not valid")
    router.announced = [model_announcement(files="0" * 64)]
    await until(lambda: "0" * 64 in router.held, 5)
    router.announced = []
    await until(lambda: not router.held, 5)


async def test_an_error_of_one_model_does_not_end_the_others(router: Router) -> None:
    router.runs_fail = 2
    router.announced = [model_announcement(), model_announcement(OTHER, name="other")]
    await until(lambda: router.serves() and router.serves("other"), 5)
    await until(lambda: not router.runs_fail, 5)
    await asyncio.sleep(0.05)
    assert router.serves()


async def test_requests_of_a_replaced_entry_hear_of_its_sleep_and_that_it_leaves(router: Router) -> None:
    router.announced = [model_announcement(is_asleep=True)]
    await until(router.serves, 5)
    old = router.entries[0]
    old.counts.in_flight = 1
    router.announced = [model_announcement(release="m-2", is_asleep=True, problem="no room")]
    await until(lambda: old.announcement.problem, 5)
    router.announced = [model_announcement(release="m-2", is_asleep=True, is_leaving=True)]
    await until(lambda: old.announcement.is_leaving, 5)
    assert old.announcement.release == "m-1"


async def test_a_router_starts_until_each_announced_model_is_served_or_has_failed_once(router: Router) -> None:
    router.may_start.clear()
    router.failures["0" * 64] = ModelLoadError("not valid")
    router.announced = [model_announcement(files="0" * 64), model_announcement(OTHER, name="other")]
    await until(lambda: router.follower.has_read, 5)
    await until(lambda: router.follower.is_starting, 5)
    router.may_start.set()
    await until(lambda: not router.follower.is_starting, 5)
    assert router.serves("other")
    router.may_start.clear()
    router.announced = [*router.announced, model_announcement("e" * 32, name="late")]
    await until(lambda: len(router.entries) == 2, 5)
    assert not router.follower.is_starting, "a new model must not make a router unready that serves others"
    router.may_start.set()


async def test_a_router_does_not_wait_for_a_model_without_end(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_LOADS_S", 0.05)
    router.may_start.clear()
    router.announced = [model_announcement()]
    await until(lambda: router.entries, 5)
    await until(lambda: not router.follower.is_starting, 5)
    router.may_start.set()


@pytest.mark.parametrize("router", [True], indirect=True)
async def test_a_routers_own_model_comes_back_with_a_controller_that_announces_none(router: Router) -> None:
    """An older release does not, and the router served its model before."""
    assert router.serves()
    router.announced = [model_announcement(is_leaving=True)]
    await until(lambda: not router.serves(), 5)
    router.announced = []
    await asyncio.sleep(0.05)
    assert not router.serves()
    router.entries[0].watch.is_known = True
    await until(router.serves, 5)

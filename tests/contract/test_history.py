"""The history of all routers: one suite for its store in memory and in every Redis."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest

from baton.errors import StoreUnavailable
from baton.telemetry.request_metrics import RequestMetrics
from kvstore.index import RedisConnection, Seal
from kvstore.index.keys import Keys
from router.cluster.history import (
    LATE_SLOTS,
    MAX_RELEASES,
    NUM_SLOTS,
    SLOT_S,
    ClusterHistory,
    HistorySlot,
    HistoryStore,
    MemoryHistory,
    ModelCounts,
    RedisHistory,
    counted,
)
from tests.contract.conftest import UNSIGNED
from tests.support.cases import chosen

if TYPE_CHECKING:
    from tests.contract.conftest import Backend, Clock, RedisServer

MET, LATE = {"slo_class": "default", "outcome": "met"}, {"slo_class": "batch", "outcome": "ttft_missed"}
ONE = {"m-1": {"x": 1}}


class Shared(RedisHistory):
    """A store in Redis over a connection that several routers of a test share."""

    async def close(self) -> None:
        """The connection is closed with its server."""


@pytest.fixture
def store(backend: Backend) -> HistoryStore:
    if backend.store:
        return MemoryHistory()
    assert backend.router
    return Shared(backend.router, backend.namespace, seal=Seal("a secret of the routers"))


class Away:
    """A store that can be out of reach."""

    def __init__(self, store: HistoryStore) -> None:
        self.store = store
        self.is_away = False

    def _check(self) -> None:
        if self.is_away:
            raise StoreUnavailable("away")

    async def write(self, slot: int, writer: str, models: ModelCounts) -> None:
        self._check()
        await self.store.write(slot, writer, models)

    async def read(self, slots: Iterable[int]) -> dict[int, dict[str, ModelCounts]]:
        self._check()
        return await self.store.read(slots)

    async def close(self) -> None:
        await self.store.close()


class Router:
    """A router's counters and its history."""

    def __init__(self, store: HistoryStore, name: str, clock: Clock) -> None:
        self.metrics = RequestMetrics()
        self.history = ClusterHistory(store, name, self.metrics, clock)

    def total(self, name: str) -> float:
        return sum(slot.counts.get(name, 0.0) for slot in self.history.slots().values())


async def test_every_router_has_the_history_of_all(store: HistoryStore, backend: Backend) -> None:
    clock = backend.clock
    first, second = Router(store, "r0/a", clock), Router(store, "r1/b", clock)
    first.metrics.requests_slo.add(3, MET)
    first.metrics.time_to_first_token.record(0.03, times=3)
    second.metrics.requests_slo.add(2, MET)
    second.metrics.requests_slo.add(1, LATE)
    second.metrics.slo_misses.add(1, {**LATE, "stage": "queue"})
    for router in (first, second):
        await router.history.look()
    clock.now += SLOT_S
    second.metrics.requests_slo.add(4, MET)
    for router in (first, second, first):
        await router.history.look()
    expected = {
        int(clock.now // SLOT_S) - 1: HistorySlot(
            2, {"requests/met/default": 5, "ttft/0.032": 3, "requests/ttft_missed/batch": 1, "misses/queue": 1}
        ),
        int(clock.now // SLOT_S): HistorySlot(2, {"requests/met/default": 4}),
    }
    assert first.history.slots() == second.history.slots() == expected
    assert list(first.history.slots(int(clock.now // SLOT_S))) == [int(clock.now // SLOT_S)]


async def test_the_counts_of_one_model_are_those_of_all_routers_for_the_whole_hour(
    store: HistoryStore, backend: Backend
) -> None:
    clock = backend.clock
    first, second = Router(store, "r0/a", clock), Router(store, "r1/b", clock)
    old, new = {**MET, "model": "m", "release": "m-1"}, {**MET, "model": "m", "release": "m-2"}
    first.metrics.requests_slo.add(3, old)
    await first.history.look()
    clock.now += SLOT_S  # and only now there is another one
    first.metrics.requests_slo.add(4, old)
    second.metrics.requests_slo.add(5, new)
    second.metrics.time_to_first_token.record(0.03, {"release": "m-2", "to_compute": "256"}, times=2)
    second.metrics.retries.add(1)
    for router in (first, second, first):
        await router.history.look()
    for router in (first, second):
        of_old, of_new, of_both, of_none = (
            [slot.counts for slot in router.history.slots(releases=releases).values()]
            for releases in (["m-1"], ["m-2"], ["m-1", "m-2"], ["m-3"])
        )
        assert of_old == [{"requests/met/default": 3}, {"requests/met/default": 4}]
        assert of_new == [{}, {"requests/met/default": 5, "ttft/0.032": 2, "ttft_of/256/0.032": 2}]
        assert of_both[1]["requests/met/default"] == 9
        assert of_none == [{}, {}]
        assert router.total("requests/met/default") == 12
        assert router.total("retries") == 1, "of no model"
        assert [slot.num_routers for slot in router.history.slots(releases=["m-1"]).values()] == [1, 2]


async def test_a_router_that_starts_has_what_was_before_it_and_ends_nothing(
    store: HistoryStore, backend: Backend
) -> None:
    clock = backend.clock
    gone = Router(store, "r0/a", clock)
    gone.metrics.requests_slo.add(3, MET)
    await gone.history.look()
    gone.metrics.requests_slo.add(4, MET)
    await gone.history.close()  # with what it has counted since
    clock.now += 5 * SLOT_S
    again = Router(store, "r0/b", clock)
    await again.history.look()
    assert again.total("requests/met/default") == 7
    slots = again.history.slots()
    assert [slot.num_routers for slot in slots.values()] == [1, 1]
    assert list(slots) == [int(clock.now // SLOT_S) - 5, int(clock.now // SLOT_S)], "a time without routers is none"


@pytest.mark.parametrize("backend", chosen((*UNSIGNED, "signed"), pytest.mark.slow, "memory", "signed"), indirect=True)
async def test_an_hour_is_kept(store: HistoryStore, backend: Backend) -> None:
    clock = backend.clock
    router, other = Router(store, "r0", clock), Router(store, "r1", clock)
    for _ in range(NUM_SLOTS + 10):
        router.metrics.requests_slo.add(1, MET)
        clock.now += SLOT_S
        await router.history.look()
    await other.history.look()
    for each in (router, other):
        assert len(each.history.slots()) == NUM_SLOTS
        assert each.total("requests/met/default") == NUM_SLOTS
    clock.now += (NUM_SLOTS - 1) * SLOT_S
    assert len(router.history.slots()) == 2, "what is old is forgotten, whether the store answers or not"


async def test_while_the_store_is_away_own_counts_are_kept_and_then_written(
    store: HistoryStore, backend: Backend
) -> None:
    clock, link = backend.clock, Away(store)
    router, other = Router(link, "r0", clock), Router(store, "r1", clock)
    await router.history.look()
    link.is_away = True
    for _ in range(2 * LATE_SLOTS):
        clock.now += SLOT_S
        for each in (router, other):
            each.metrics.requests_slo.add(1, MET)
        with pytest.raises(StoreUnavailable):
            await router.history.look()
        await other.history.look()
    assert (router.total("requests/met/default"), other.total("requests/met/default")) == (12, 12)
    link.is_away = False
    await router.history.look()
    assert router.total("requests/met/default") == 24, "others are read from where the store was left"
    late = Router(store, "r2", clock)
    await late.history.look()
    assert late.total("requests/met/default") == 24


async def test_slots_end_by_themselves(server: RedisServer, namespace: str) -> None:
    connection = server.backend(namespace).connection
    assert connection
    await RedisHistory(connection, namespace).write(7, "r0", ONE)
    assert 3_600_000 < await connection.call("PTTL", Keys(namespace).history(7)) <= 3_900_000


async def test_what_no_router_has_written_is_passed_over(server: RedisServer, namespace: str) -> None:
    connection = server.backend(namespace).connection
    assert connection
    store, key = RedisHistory(connection, namespace), Keys(namespace).history(7)
    long, many = "m" * 300, {f"m-{number}": {"x": 1} for number in range(MAX_RELEASES)}
    for value in (
        *("no json", "[]", '{"x": -1}', '{"x": NaN}', '{"x": true}', '{"x": "1"}', "{" + " " * 300_000 + "}"),
        *('{"m-1": {"x": -1}}', '{"m-1": {"x": {}}}', '{"m-1": [1]}', '{"m-1": {}, "x": 1}', '{"m-1": {"x": null}}'),
        *(f'{{"{long}": {{"x": 1}}}}', f'{{"m-1": {{"{long}": 1}}}}', json.dumps({**many, "m": {"x": 1}})),
    ):
        await connection.call("HSET", key, "forged", value)
        await store.write(7, "r0", ONE)
        assert await store.read([7]) == {7: {"r0": ONE}}
    await connection.call("HSET", key, "forged", json.dumps({f"m-{number}": {} for number in range(1000)}))
    assert await store.read([7]) == {7: {"forged": {}, "r0": ONE}}, "a release without counts is none"
    await connection.pipeline([("DEL", key), ("SET", key, "x")])
    assert await store.read([7]) == {}
    await store.write(7, "r0", {"m-1": {"x": 2}})
    assert await store.read([7]) == {7: {"r0": {"m-1": {"x": 2}}}}
    sealed = RedisHistory(connection, namespace, seal=Seal("a secret of the routers"))
    assert await sealed.read([7]) == {}, "it is not sealed"


async def test_plain_counts_of_a_release_that_served_one_model_are_read(server: RedisServer, namespace: str) -> None:
    connection = server.backend(namespace).connection
    assert connection
    store, clock = Shared(connection, namespace), server.backend(namespace).clock
    slot = int(clock.now // SLOT_S)
    await connection.call("HSET", Keys(namespace).history(slot), "r0", '{"requests/met/default": 3}')
    router = Router(store, "r1", clock)
    router.metrics.requests_slo.add(2, {**MET, "release": "m-1"})
    await router.history.look()
    assert router.total("requests/met/default") == 5
    assert router.history.slots(releases=["m-1"])[slot].counts == {"requests/met/default": 2}


async def test_without_redis_there_is_the_own_history(backend: Backend) -> None:
    router = Router(RedisHistory(RedisConnection("redis://127.0.0.1:1/0"), "ns"), "r0", backend.clock)
    router.metrics.requests_slo.add(1, MET)
    with pytest.raises(StoreUnavailable):
        await router.history.look()
    assert router.total("requests/met/default") == 1


def test_all_that_is_counted_has_a_name_and_zeros_are_left_out() -> None:
    metrics = RequestMetrics()
    assert counted(metrics) == {}
    metrics.prompt_tokens.add(5, {"model": "m", "release": "m-1"})
    metrics.generation_tokens.add(6, {"model": "m", "release": "m-1"})
    metrics.generation_tokens.add(7, {"model": "m", "release": "m-2"})
    metrics.prefix_hit_tokens.add(2, {"model": "m", "release": "m-1"})
    metrics.prefix_ceiling_tokens.add(3, {"model": "m", "release": "m-1"})
    metrics.transfer_bytes.add(100, {"release": "m-1"})
    metrics.retries.add(1, {"kind": "WorkerFailed"})
    metrics.inter_token_latency.record(1e9, {"model": "m", "release": "m-1"})
    assert counted(metrics) == {
        "": {"retries": 1},
        "m-1": {
            "prompt_tokens": 5, "generated_tokens": 6, "cached_tokens": 2, "seen_tokens": 3, "kv_bytes": 100,
            "itl/+Inf": 1,
        },
        "m-2": {"generated_tokens": 7},
    }  # fmt: skip

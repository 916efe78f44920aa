"""Operators register adapters: a worker checks the folder, over real gRPC, and the registry gets what it found."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest

from baton.adapters import AdapterFacts
from baton.cluster import Worker, WorkerLoad, WorkerState
from baton.errors import BatonError, InvalidRequest, ModelNotFound, NoWorker, Overloaded, Unsupported, WorkerFailed
from kvstore.adapters import MemoryAdapters
from kvstore.index import MemoryStore
from router.cluster.orders import AdapterOrders
from router.serve.worker_client import WorkerClient
from tests.support.builders import READY, worker
from tests.unit.router.serve.test_worker_client import served
from worker.adapters import AdapterChecks
from worker.calls import CallServicer

FACTS = AdapterFacts(path="/adapters/poet", digest="ab" * 32, rank=8, targets=(), num_bytes=4096)


@dataclass
class Cluster:
    """Workers behind one address, which answer what they are told to."""

    orders: AdapterOrders
    answers: list[AdapterFacts | BatonError] = field(default_factory=list)
    """Answers to the next checks; afterwards FACTS."""
    asked: list[str] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    lease: Callable[..., Worker] = worker

    async def check(self, path: str) -> AdapterFacts:
        self.asked.append(path)
        answer = self.answers.pop(0) if self.answers else FACTS
        if isinstance(answer, BatonError):
            raise answer
        return answer


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with contextlib.AsyncExitStack() as stack:
        client = WorkerClient()
        stack.push_async_callback(client.close)
        orders = AdapterOrders(MemoryAdapters(MemoryStore()), client, lambda: tuple(found.workers), "tiny")
        found = Cluster(orders)
        _, port = await stack.enter_async_context(served(CallServicer(checks=AdapterChecks(found.check))))

        def lease(worker_id: str, load: WorkerLoad = READY, max_adapters: int = 4) -> Worker:
            return worker(worker_id, load=load, address=f"127.0.0.1:{port}", max_adapters=max_adapters)

        found.lease = lease
        found.workers = [lease("w0"), lease("w1", max_adapters=0)]
        yield found


async def test_an_adapter_is_registered_as_a_worker_found_it(cluster: Cluster) -> None:
    registered, is_replaced = await cluster.orders.add("poet", "/adapters/poet")
    adapter = registered.adapter
    assert (adapter.name, adapter.path, adapter.digest, adapter.rank) == ("poet", "/adapters/poet", "ab" * 32, 8)
    assert (registered.num_bytes, is_replaced, registered.since_s > 1.7e9) == (4096, False, True)
    assert cluster.orders.adapters == {"poet": registered}
    assert cluster.asked == ["/adapters/poet"], "one worker is asked"


async def test_a_name_that_exists_gets_the_new_weights(cluster: Cluster) -> None:
    cluster.answers = [FACTS, replace(FACTS, digest="cd" * 32)]
    await cluster.orders.add("poet", "/adapters/poet")
    registered, is_replaced = await cluster.orders.add("poet", "/adapters/poet")
    assert (registered.adapter.digest, is_replaced) == ("cd" * 32, True)
    assert [each.adapter.digest for each in cluster.orders.adapters.values()] == ["cd" * 32]


async def test_the_operator_gets_the_workers_sentence(cluster: Cluster) -> None:
    cluster.answers = [InvalidRequest("rank 512 exceeds engine.max_adapter_rank 64; raise it", "path")]
    with pytest.raises(InvalidRequest, match="rank 512 exceeds"):
        await cluster.orders.add("poet", "/adapters/poet")
    assert cluster.orders.adapters == {}
    assert len(cluster.asked) == 1, "another worker would say the same"


@pytest.mark.parametrize("failure", [Overloaded("it is checking another one"), WorkerFailed("gone")])
async def test_a_worker_that_cannot_check_is_followed_by_another(cluster: Cluster, failure: BatonError) -> None:
    cluster.workers = [cluster.lease(f"w{i}") for i in range(5)]
    cluster.answers = [failure, failure]
    await cluster.orders.add("poet", "/adapters/poet")
    assert len(cluster.asked) == 3
    cluster.answers = [failure] * 5
    with pytest.raises(type(failure)):
        await cluster.orders.add("other", "/adapters/poet")
    assert len(cluster.asked) == 6, "three of five"


async def test_nonsense_of_a_worker_is_not_registered(cluster: Cluster) -> None:
    for facts in (replace(FACTS, digest="x"), replace(FACTS, rank=0), replace(FACTS, num_bytes=2**60)):
        cluster.answers = [facts]
        with pytest.raises(WorkerFailed, match="has checked the adapter, but"):
            await cluster.orders.add("poet", "/adapters/poet")
    assert cluster.orders.adapters == {}


async def test_only_workers_that_serve_adapters_are_asked(cluster: Cluster) -> None:
    draining = replace(READY, state=WorkerState.DRAINING)
    for workers, error, sentence in (
        ([cluster.lease("w1", max_adapters=0)], Unsupported, "set engine.max_adapters"),
        ([cluster.lease("w1", max_adapters=0), cluster.lease("w2", draining)], NoWorker, "no worker is ready"),
        ([], NoWorker, "no worker is ready"),
    ):
        cluster.workers = workers
        with pytest.raises(error, match=sentence):
            await cluster.orders.add("poet", "/adapters/poet")
    assert cluster.asked == []


@pytest.mark.parametrize("name", ["", "tiny", "a b", "a\n", "é", "-a", "x" * 129, "a\x00", "a\u202e"])
async def test_what_can_be_no_name_is_refused(cluster: Cluster, name: str) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        await cluster.orders.add(name, "/adapters/poet")
    assert cluster.asked == []


async def test_names_like_those_of_models_are_taken(cluster: Cluster) -> None:
    for name in ("org/model-7b.v1", "tiny:poet", "x" * 128, "a@b=c+d"):
        await cluster.orders.add(name, "/adapters/poet")
    assert len(cluster.orders.adapters) == 4


async def test_a_relative_path_is_refused(cluster: Cluster) -> None:
    with pytest.raises(InvalidRequest, match="must be absolute"):
        await cluster.orders.add("poet", "adapters/poet")
    assert cluster.asked == []


async def test_a_removed_adapter_is_gone(cluster: Cluster) -> None:
    await cluster.orders.add("poet", "/adapters/poet")
    await cluster.orders.remove("poet")
    assert cluster.orders.adapters == {}
    with pytest.raises(ModelNotFound, match="no adapter is named 'poet'"):
        await cluster.orders.remove("poet")

"""What processes stand on fails under load: descriptors, memory, disks, clocks, and processes that stand still.

Streams of every kind of sampling run meanwhile. None is wrong, lost or left hanging: a client that resumes hears each
answer whole.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import psutil
import pytest

from baton.api import GenerateRequest
from baton.cluster import Role
from baton.config import RouterConfig, SloClassConfig, TransferConfig
from deploy.operator.client import Client
from tests.chaos import asks
from tests.chaos.fleet import Fleet, RouterProcess, running_fleet
from tests.support.clocks import SetClock, settable
from tests.support.waiting import wait_until

NUM_STREAMS = 12
NUM_TOKENS = 80
STEP_MS = 15.0
STAND_S = 6.0
"""How long a process stands still: longer than its peers wait for an answer to a ping."""
TRANSFER = TransferConfig(op_timeout_s=3.0, ping_s=0.5)
LEASE_S = 4.0
Undo = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Attributes:
    prefill, decode: the workers to which something happens; each role has another one.
    clocks: of every worker.
    """

    fleet: Fleet
    prefill: str
    decode: str
    clocks: dict[str, SetClock]

    def pid(self, part: str) -> int:
        """The process of `prefill`, `decode`, `router`."""
        if part == "router":
            return self.fleet.routers[0].process.pid
        pid = self.fleet.workers[getattr(self, part)].pid
        assert pid
        return pid


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    unhurried = {"default": SloClassConfig(ttft_ms=600_000.0)}  # nothing is shed where the machine is slow
    router = RouterConfig(mode="disaggregated", cache_secret="faults", max_attempts=16, slo_classes=unhurried)
    with running_fleet(TRANSFER, router, num_routers=2, step_ms=STEP_MS, lease_s=LEASE_S) as fleet:
        clocks: dict[str, SetClock] = {}
        for role in (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE):
            clock = SetClock()
            clocks[fleet.add(role, prepare=settable(clock))] = clock
        fleet.wait_for(*clocks)
        prefill, _, decode, _ = clocks
        yield Cluster(fleet, prefill, decode, clocks)


def limited(kind: int, headroom: int, used: Callable[[psutil.Process], int], part: str) -> Callable[[Cluster], Undo]:
    """The process gets no more of something than it has, and a little."""

    def happen(cluster: Cluster) -> Undo:
        pid = cluster.pid(part)
        before = resource.prlimit(pid, kind)
        resource.prlimit(pid, kind, (used(psutil.Process(pid)) + headroom, before[1]))
        return lambda: resource.prlimit(pid, kind, before)

    return happen


def no_descriptors(part: str) -> Callable[[Cluster], Undo]:
    return limited(resource.RLIMIT_NOFILE, 1, lambda process: process.num_fds(), part)


def no_memory(part: str) -> Callable[[Cluster], Undo]:
    return limited(resource.RLIMIT_AS, 0, lambda process: int(process.memory_info().vms), part)


def no_files(part: str) -> Callable[[Cluster], Undo]:
    return limited(resource.RLIMIT_FSIZE, 0, lambda process: 0, part)


def stopped(part: str) -> Callable[[Cluster], Undo]:
    def happen(cluster: Cluster) -> Undo:
        process = psutil.Process(cluster.pid(part))
        process.suspend()
        timer = threading.Timer(STAND_S, process.resume)
        timer.start()
        return timer.join

    return happen


def killed(*parts: str) -> Callable[[Cluster], Undo]:
    def happen(cluster: Cluster) -> Undo:
        for part in parts:
            if part == "router":
                cluster.fleet.routers[0].process.kill()
            else:
                cluster.fleet.remove(getattr(cluster, part), signal.SIGKILL)
        return lambda: None

    return happen


def set_clock(seconds: float, *parts: str) -> Callable[[Cluster], Undo]:
    def happen(cluster: Cluster) -> Undo:
        moved = [cluster.clocks[getattr(cluster, part)] for part in parts]
        for clock in moved:
            clock.set_by(seconds)
        return lambda: None  # it stays so

    return happen


def without_redis(act: Callable[[Cluster], Undo]) -> Callable[[Cluster], Undo]:
    """The same while Redis stands still."""

    def happen(cluster: Cluster) -> Undo:
        cluster.fleet.redis.pause()
        undo = act(cluster)

        def go_on() -> None:
            time.sleep(STAND_S)
            cluster.fleet.redis.resume()
            undo()

        return go_on

    return happen


def empty_redis(cluster: Cluster) -> Undo:
    cluster.fleet.redis.kill()
    cluster.fleet.redis.start()
    return lambda: None


FAULTS: dict[str, Callable[[Cluster], Undo]] = {
    "a decode worker is killed": killed("decode"),
    "a prefill worker is killed": killed("prefill"),
    "both are killed": killed("prefill", "decode"),
    "a router is killed": killed("router"),
    "a router is killed while Redis stands still": without_redis(killed("router")),
    "a decode worker is killed while Redis stands still": without_redis(killed("decode")),
    "Redis loses everything": empty_redis,
    "a decode worker stands still": stopped("decode"),
    "a prefill worker stands still": stopped("prefill"),
    "a router stands still": stopped("router"),
    "a decode worker gets no descriptor": no_descriptors("decode"),
    "a prefill worker gets no descriptor": no_descriptors("prefill"),
    "a router gets no descriptor": no_descriptors("router"),
    "a decode worker gets no memory": no_memory("decode"),
    "a prefill worker gets no memory": no_memory("prefill"),
    "a router gets no memory": no_memory("router"),
    "a decode worker can write no file": no_files("decode"),
    "a router can write no file": no_files("router"),
    "a decode worker's clock is set back": set_clock(-120.0, "decode"),
    "a decode worker's clock is set forward": set_clock(120.0, "decode"),
    "a prefill worker's clock is set back by an hour": set_clock(-3600.0, "prefill"),
    "both clocks are set forward by an hour": set_clock(3600.0, "prefill", "decode"),
}


def stream(number: int) -> GenerateRequest:
    asked = asks.of_options(number)
    longer = {} if "structured_outputs" in asked.sampling else {"max_tokens": NUM_TOKENS}
    return replace(asked, sampling={**asked.sampling, **longer})


def heard(address: str, asked: GenerateRequest, on_token: Callable[[int], object]) -> list[tuple[int, ...]]:
    with contextlib.closing(Client(address)) as client:
        answer = asks.listen(client.generate(asked), on_token).answer
    for choice, expected in zip(answer.choices, asks.expected(asked), strict=True):
        assert choice.token_ids == expected[: len(choice.token_ids)], asked
        assert len(choice.token_ids) == len(expected) or choice.finish_reason == "stop", asked
    return [choice.token_ids for choice in answer.choices]


def at_rest(fleet: Fleet, router: RouterProcess) -> bool:
    """Whether every worker that lives is ready in the router's eyes, with nothing to do."""
    workers = {worker["id"]: worker for worker in router.client.status()["workers"]}
    return all(
        worker_id in workers
        and workers[worker_id]["state"] == "ready"
        and workers[worker_id]["self_check"] == "ok"
        and not workers[worker_id]["running"]
        and not workers[worker_id]["blocks"]["in_use"]
        for worker_id in fleet.workers
    )


QUICK = ("a decode worker gets no descriptor", "a router gets no memory", "a decode worker's clock is set back")
"""Those in `make test`, one after the other; other tests there kill workers and routers, stop them and empty Redis."""


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(QUICK, id="quick ones"),
        *(pytest.param((each,), id=each, marks=pytest.mark.chaos) for each in FAULTS if each not in QUICK),
    ],
)
def test_no_stream_is_wrong_or_lost_or_hangs(cluster: Cluster, faults: tuple[str, ...]) -> None:
    for fault in faults:
        happens_under_load(cluster, fault)


def happens_under_load(cluster: Cluster, fault: str) -> None:
    fleet = cluster.fleet
    addresses = ",".join(router.grpc for router in fleet.routers)
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        going = [
            pool.submit(heard, addresses, stream(number), lambda num_tokens: begun.release() if num_tokens else None)
            for number in range(NUM_STREAMS)
        ]
        for _ in range(NUM_STREAMS):
            assert begun.acquire(timeout=60)
        undo = FAULTS[fault](cluster)
        began_s = time.monotonic()
        for each in going:
            each.result(120)
        print(f"{fault}: the last stream ended {time.monotonic() - began_s:.1f} s later")
        undo()
    last = fleet.routers[-1]
    wait_until(lambda: at_rest(fleet, last), 90, every_s=0.2, seen=lambda: last.client.status(), not_yet=(Exception,))
    for number in range(3):
        heard(last.grpc, stream(100 + number), lambda num_tokens: None)

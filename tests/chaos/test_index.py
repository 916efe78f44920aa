"""The index under attack: hints are right again within seconds, and neither a wrong token nor a failure is seen.

Three routers share one Redis. Conversations go round the routers, so what a router knows of a worker's cache it has
from the index, and the pools are too small for all of them, so that a router which misses an eviction is caught.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from deploy.processes import FENCED
from tests.chaos.fleet import Fleet, RouterProcess, running_fleet
from tests.integration.cluster import is_idle
from tests.support.load import Clients, Requests, Stream
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos

SECONDS = float(os.environ.get("CHAOS_SECONDS", "0"))
"""Every fault happens once, and all of them, with one more, again until so much time is up. Each takes about 10 s."""
LEASE_S = 1.5
RECOVERY_S = 2.0
"""The gate is 5 s."""
WINDOW_S = 3.0
WINDOW_HITS = 350
"""A window is as long as so many requests take that find a part of their prompt cached: 1 % is 4 of them."""
MAX_STALE_SHARE = 0.01
SOON_S = 15.0
"""For what follows a fault by itself."""
NUM_CLIENTS = 9
PAUSE_S = 0.05
"""Between two requests of a client, in the middle."""
NUM_LIVELY, NUM_SLEEPY = 5, 20
"""Conversations of a client. The sleepy ones go on so seldom that most of theirs is evicted meanwhile: a router which
has not heard of that is stale, where the lively ones' blocks hardly ever go."""
SLEEPY_SHARE = 0.15
"""Of the requests."""
NUM_BLOCKS = 2000
"""Of a worker."""
MAX_PROMPT_TOKENS = 600
SYSTEM_PROMPTS = [[7 + number] * 128 for number in range(3)]


@dataclass(slots=True, kw_only=True)
class Tally:
    """What has happened so far."""

    num_stale: int = 0
    num_placements: int = 0
    num_served: int = 0
    num_hits: int = 0
    """Requests of which a worker had a part cached."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_retries: int = 0

    def __sub__(self, other: Tally) -> Tally:
        return Tally(**{name: getattr(self, name) - getattr(other, name) for name in Tally.__slots__})

    @property
    def stale_share(self) -> float:
        return self.num_stale / max(self.num_hits, 1)

    def __str__(self) -> str:
        return f"{self.num_stale} stale of {self.num_hits} hits ({self.stale_share:.2%})"


class Load(Clients):
    """Clients that go on with their conversations, each turn at another router, and check every token."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._done = Tally()
        self._tallying = threading.Lock()
        super().__init__(self._talk, NUM_CLIENTS)

    def tally(self) -> Tally:
        samples = [sample for router in self._fleet.routers for sample in router.metrics()]
        with self._tallying:
            done = self._done - Tally()
        done.num_stale = _sum(samples, "baton_index_stale_hints_total")
        done.num_placements = _sum(samples, "baton_placements_total")
        return done

    def _talk(self, number: int) -> Requests:
        rng = random.Random(number)
        lively: list[list[int]] = [[] for _ in range(NUM_LIVELY)]
        sleepy: list[list[int]] = [[] for _ in range(NUM_SLEEPY)]
        while True:
            self.is_over.wait(rng.uniform(0, 2 * PAUSE_S))
            conversation = rng.choice(sleepy if rng.random() < SLEEPY_SHARE else lively)
            if not conversation or len(conversation) > MAX_PROMPT_TOKENS:
                conversation[:] = rng.choice(SYSTEM_PROMPTS) + _words(rng, 100)
            conversation += _words(rng, rng.randrange(16, 80))
            router = rng.choice(self._fleet.routers)
            stream = Stream(inference=router.inference, prompt=conversation[:], max_tokens=rng.randrange(1, 7))
            yield stream.served
            if stream.error is None:
                self._count(stream)
                conversation += stream.tokens

    def _count(self, stream: Stream) -> None:
        with self._tallying:
            self._done.num_served += 1
            self._done.num_hits += stream.usage.cached_tokens > 0
            self._done.num_prompt_tokens += len(stream.prompt)
            self._done.num_cached_tokens += stream.usage.cached_tokens
            self._done.num_retries += stream.retries


@dataclass(slots=True)
class Cluster:
    """The fleet, with the workers that it should have."""

    fleet: Fleet
    workers: dict[str, Role] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(11))

    def any_worker(self) -> str:
        return self.rng.choice(list(self.workers))

    def restart(self, worker_id: str) -> None:
        self.fleet.add(self.workers[worker_id], worker_id)

    def epochs(self, router: RouterProcess) -> dict[str, int]:
        return {worker["id"]: worker["epoch"] for worker in router.client.status()["workers"]}

    def epoch(self, worker_id: str) -> int:
        return self.epochs(self.fleet.routers[0])[worker_id]

    def wait_until_gone(self, worker_id: str) -> None:
        wait_until(lambda: all(worker_id not in self.epochs(router) for router in self.fleet.routers), SOON_S)

    def wait_for_newer(self, worker_id: str, epoch: int) -> None:
        """Every router knows the worker under a newer epoch."""
        wait_until(lambda: all(self.epochs(router).get(worker_id, 0) > epoch for router in self.fleet.routers), SOON_S)


def a_worker_is_killed_and_starts_again_under_its_name(cluster: Cluster) -> None:
    victim = cluster.any_worker()
    epoch = cluster.epoch(victim)
    cluster.fleet.remove(victim, signal.SIGKILL)
    time.sleep(cluster.rng.uniform(0, 2 * LEASE_S))
    cluster.restart(victim)
    cluster.wait_for_newer(victim, epoch)


def a_worker_is_paused_past_its_lease(cluster: Cluster) -> None:
    """Nobody took its name meanwhile: it comes back, but not as the one it was."""
    victim = cluster.any_worker()
    epoch = cluster.epoch(victim)
    with paused(cluster.fleet.workers[victim].pid):
        cluster.wait_until_gone(victim)
    cluster.wait_for_newer(victim, epoch)


def a_paused_worker_meets_its_successor(cluster: Cluster) -> None:
    victim = cluster.any_worker()
    epoch = cluster.epoch(victim)
    old = cluster.fleet.workers[victim]
    with paused(old.pid):
        cluster.wait_until_gone(victim)
        cluster.restart(victim)
        cluster.wait_for_newer(victim, epoch)
    old.join(5)
    assert old.exitcode == FENCED, f"{victim} was not fenced: {old}"


def redis_is_killed_and_starts_empty(cluster: Cluster) -> None:
    cluster.fleet.redis.kill()
    time.sleep(1.0)
    cluster.fleet.redis.start()


def redis_stands_still_past_every_lease(cluster: Cluster) -> None:
    """It keeps its state, but by its own clock nobody has renewed: every worker goes on under a new epoch."""
    epochs = cluster.epochs(cluster.fleet.routers[0])
    cluster.fleet.redis.pause()
    time.sleep(LEASE_S + 1.0)
    cluster.fleet.redis.resume()
    for worker_id, epoch in epochs.items():
        cluster.wait_for_newer(worker_id, epoch)


def the_stream_is_trimmed(cluster: Cluster) -> None:
    """To nothing: first under the routers' eyes, then while one of them looks away."""
    with redis.Redis.from_url(cluster.fleet.redis.url) as store:
        (stream,) = store.keys("kv:*:ev")
        for _ in range(50):
            store.xtrim(stream, maxlen=0, approximate=False)
            time.sleep(0.01)
        with paused(cluster.rng.choice(cluster.fleet.routers).process.pid):
            time.sleep(1.0)
            store.xtrim(stream, maxlen=0, approximate=False)


FAULTS = (
    a_worker_is_killed_and_starts_again_under_its_name,
    a_worker_is_paused_past_its_lease,
    redis_is_killed_and_starts_empty,
    the_stream_is_trimmed,
    a_paused_worker_meets_its_successor,
)
MORE_FAULTS = (redis_stands_still_past_every_lease,) if SECONDS else ()


def test_hints_are_right_again_after_every_fault() -> None:
    transfer = TransferConfig(op_timeout_s=3.0, ping_s=0.5)
    router = RouterConfig(max_attempts=8, cache_secret="chaos")
    with running_fleet(transfer, router, num_routers=3, num_blocks=NUM_BLOCKS, lease_s=LEASE_S) as fleet:
        cluster = Cluster(fleet, {fleet.add(role): role for role in (*Role, *Role)})
        fleet.wait_for(*cluster.workers)
        began = time.monotonic()
        too_stale: list[str] = []
        with Load(fleet) as load:
            report("the caches fill", window(load))
            while True:
                for fault in (*FAULTS, *MORE_FAULTS):
                    name = fault.__name__.replace("_", " ")
                    before, since = load.tally(), time.monotonic()
                    fault(cluster)
                    took_s = time.monotonic() - since
                    time.sleep(RECOVERY_S)
                    during = load.tally() - before
                    after = window(load)
                    report(f"{name} ({took_s:.1f} s)", after, f"; until then {during}")
                    if after.stale_share >= MAX_STALE_SHARE:
                        too_stale.append(f"{name}: {after}")
                if time.monotonic() - began > SECONDS:
                    break
            total = load.tally()
        print(
            f"{total.num_served} requests in {time.monotonic() - began:.0f} s, {total.num_placements} placements, "
            f"{total.num_cached_tokens / total.num_prompt_tokens:.0%} of the prompt tokens cached, "
            f"{total.num_retries} placements repeated; {total}"
        )
        assert not too_stale, too_stale
        assert total.num_cached_tokens > 0.5 * total.num_prompt_tokens, "too few hits for a test of hints"
        for each in fleet.routers:
            each.wait_for(lambda status: all(is_idle(worker) for worker in status["workers"]), SOON_S)
            wait_until(
                lambda: mirrored(each) == held(each) and set(held(each)) == set(cluster.workers),  # noqa: B023 - at once
                SOON_S,
                seen=lambda: (mirrored(each), held(each)),  # noqa: B023
            )


def _words(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1, 40_000) for _ in range(num_tokens)]


def window(load: Load) -> Tally:
    """What happens from now on, until enough has."""
    before, since = load.tally(), time.monotonic()

    def found() -> Tally:
        return load.tally() - before

    def enough() -> Tally | None:
        tally = found()
        return tally if tally.num_hits >= WINDOW_HITS and time.monotonic() - since > WINDOW_S else None

    return wait_until(enough, every_s=0.2, seen=lambda: f"too little load: {found()}; {load.failures[:5]}")


def report(name: str, tally: Tally, more: str = "") -> None:
    print(f"{name}: {tally}, {tally.num_placements} placements, {tally.num_retries} repeated{more}")


def mirrored(router: RouterProcess) -> dict[str, int]:
    """Blocks of each worker, as the router believes."""
    return _by_worker(router.metrics(), "baton_mirror_blocks", "")


def held(router: RouterProcess) -> dict[str, int]:
    """Blocks of each worker, as it says itself."""
    return _by_worker(router.metrics(), "baton_kv_blocks", 'state="cached"')


def _by_worker(samples: list[tuple[str, float]], name: str, label: str) -> dict[str, int]:
    return {
        sample.partition('worker="')[2].partition('"')[0]: int(value)
        for sample, value in samples
        if sample.startswith(name + "{") and label in sample
    }


def _sum(samples: list[tuple[str, float]], name: str) -> int:
    return int(sum(value for sample, value in samples if sample.partition("{")[0] == name))


@contextmanager
def paused(pid: Any) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)

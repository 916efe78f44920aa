"""A decode worker dies when most of the KV is in use: its replacement gets its share and no more than it has room for,
and requests soon meet their objectives again.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.errors import BatonError
from tests.chaos.fleet import Fleet, running_fleet
from tests.support.asking import prompt_of
from tests.support.load import Clients, Requests, Stream
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos

NUM_BLOCKS = 128
NUM_PROMPT_TOKENS, NUM_TOKENS = 200, 200
"""25 blocks an answer at its end: a worker has room for five."""
NUM_CLIENTS = 11
"""They take 0.7 of the KV of three workers, and more than two have."""
STEP_MS, TOKEN_MS = 8.0, 0.4
"""What a step takes, and each of its tokens. Were tokens free, it would not matter how many sequences a worker has."""
FULL = 0.9
"""A share of a worker's blocks above which there may be no room for one answer more."""
MOST_APART = 0.2
"""The largest difference between the mean shares of their blocks that the replacement and the others use."""
TTFT_S = 2.0
BACK_S = 60.0
"""The longest time from the replacement's arrival until every client has been answered once."""


@dataclass(frozen=True)
class Picture:
    """The share of its blocks that each decode worker uses, at a time of the monotonic clock."""

    at_s: float
    used: dict[str, float]


class Watch:
    """Takes pictures of the decode workers, in a thread of its own, while the block is entered."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self.pictures: list[Picture] = []
        self._status = status
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._take)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _take(self) -> None:
        while not self._is_over.wait(0.02):
            try:
                workers = self._status()["workers"]
            except BatonError:
                continue
            used = {
                worker["id"]: worker["blocks"]["in_use"] / worker["blocks"]["total"]
                for worker in workers
                if worker["role"] == Role.DECODE and worker["state"] == "ready"
            }
            self.pictures.append(Picture(time.monotonic(), used))


def test_the_replacement_of_a_worker_is_not_drowned() -> None:
    router = RouterConfig(mode="disaggregated", max_attempts=8, cache_secret="replaced")
    asked: list[tuple[float, Stream]] = []

    def script(fleet: Fleet, number: int) -> Requests:
        for seed in itertools.count(number, NUM_CLIENTS):
            stream = Stream(inference=fleet.inference, prompt=prompt_of(seed, NUM_PROMPT_TOKENS), max_tokens=NUM_TOKENS)

            def ask(stream: Stream = stream) -> None:
                asked.append((time.monotonic(), stream))
                stream.served()

            yield ask

    with running_fleet(TransferConfig(), router, num_blocks=NUM_BLOCKS, step_ms=STEP_MS, token_ms=TOKEN_MS) as fleet:
        victim, *others = [fleet.add(Role.DECODE) for _ in range(3)]
        fleet.wait_for(fleet.add(Role.PREFILL), victim, *others)
        with Clients(lambda number: script(fleet, number), NUM_CLIENTS) as clients, Watch(fleet.client.status) as watch:
            begun_s = wait_for_answers(clients, NUM_CLIENTS)
            killed_s = wait_for_answers(clients, NUM_CLIENTS)
            fleet.remove(victim, signal.SIGKILL)
            wait_for_answers(clients, NUM_CLIENTS)
            replacement = fleet.add(Role.DECODE)
            fleet.wait_for(replacement)
            ready_s = time.monotonic()
            back_s = wait_for_answers(clients, NUM_CLIENTS)
            wait_for_answers(clients, 5 * NUM_CLIENTS)
        before = [picture for picture in watch.pictures if begun_s < picture.at_s < killed_s]
        after = [picture for picture in watch.pictures if picture.at_s > back_s]
        first_s = [stream.first_s for at_s, stream in asked if at_s > back_s]
        print(
            f"{mean(before, [victim, *others]):.2f} of the KV was in use; the replacement had "
            f"{mean(after, [replacement]):.2f}, at most {max(picture.used[replacement] for picture in after):.2f}, the "
            f"others {mean(after, others):.2f}; {len(first_s)} first tokens then took {max(first_s):.2f} s at most"
        )
        assert 0.5 < mean(before, [victim, *others]) < FULL, "this load does not say much"
        assert abs(mean(after, [replacement]) - mean(after, others)) < MOST_APART
        # Room for an answer is reserved before its prompt is computed: however full a worker is, nobody is put out.
        assert [worker["preemptions"] for worker in fleet.client.status()["workers"]] == [0] * 4
        assert back_s - ready_s < BACK_S
        assert len(first_s) > NUM_CLIENTS
        assert max(first_s) < TTFT_S
        wait_until(lambda: all(not worker["blocks"]["in_use"] for worker in fleet.client.status()["workers"]))


def wait_for_answers(clients: Clients, number: int) -> float:
    """Waits for so many more answers, and returns the time of the monotonic clock."""
    enough = clients.num_served + number
    wait_until(lambda: clients.num_served >= enough, 120.0, seen=lambda: clients.failures)
    return time.monotonic()


def mean(pictures: list[Picture], workers: list[str]) -> float:
    shares = [picture.used[worker] for picture in pictures for worker in workers if worker in picture.used]
    return sum(shares) / len(shares)

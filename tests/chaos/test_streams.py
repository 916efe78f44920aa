"""The local cluster under steady, mixed load, while its processes die and freeze: clients hear what they would have
heard anyway.

Half of the clients are Baton's own, which go on at another router when theirs dies. The others call gRPC as anybody
would: those see a stream break when its router is killed, at no other time, and ask again.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from baton import wire
from baton.api import GenerateRequest
from deploy.operator.client import Client
from tests.chaos import asks
from tests.chaos.asks import Answer, listen
from tests.integration.cluster import Cluster, is_idle, running_cluster
from tests.support.asking import prompt_of
from tests.support.load import Clients, Requests
from tests.support.processes import running
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.first, pytest.mark.full]

SECONDS = float(os.environ.get("CHAOS_SECONDS", "4"))
PERIOD_S = 2.5
"""Between two faults."""
FROZEN_S = (0.3, 2.0, 5.0)
"""For how long: the longest is long enough to be taken for dead."""
NUM_CLIENTS = 8
STEP_MS = 4
MIN_TEXT = 20
"""Characters of an answer from which a stop string is taken."""
MAX_STOPPED_TOKENS = 80
"""Of the requests that are asked with a stop string as well."""
WHOLE_S = 90.0
"""Until the pools must be whole again. A worker takes a few seconds to start, and one that keeps dying waits."""
NUM_TRIES = 5
SETTINGS = {
    "testing_arithmetic": "true",
    "engine_num_blocks": "1024",
    "testing_step_ms": str(STEP_MS),
    "router_max_attempts": "16",
    "transfer_op_timeout_s": "3",
    "transfer_ping_s": "0.5",
    "cluster_routers": "2",
}


def requests() -> list[GenerateRequest]:
    """Short and long, greedy and seeded, of every option, one choice and several, ids and text."""
    rng = random.Random(4)
    sizes = [(20, 16), (40, 200), (300, 60), (900, 24), (1500, 400), (60, 700)]
    prompts = [(prompt_of(number, size), num_tokens) for number, (size, num_tokens) in enumerate(sizes)]
    shared = prompt_of(50, 640)
    return [
        *(asks.greedy(prompt, num_tokens) for prompt, num_tokens in prompts),
        *(asks.seeded(prompt, num_tokens, seed=rng.randrange(2**40)) for prompt, num_tokens in prompts),
        *(asks.seeded(shared + prompt_of(60 + number, 30), 40, seed=number, n=3) for number in range(3)),
        *(asks.of_options(number) for number in range(len(asks.OPTIONS))),
        *(asks.of_text(f"{number}. {asks.MANY_BYTES}", 80, seed=number) for number in range(3)),
        asks.of_split_character(30),
    ]


class Load(Clients):
    """Clients that ask one request after the other, and compare what they hear."""

    def __init__(self, cluster: Cluster, answers: list[tuple[GenerateRequest, Answer]], faults: Faults) -> None:
        self.num_retries = 0
        self.num_breaks = 0
        """Streams of plain clients whose router was killed: they count as served, too."""
        self.longest_gap_s = 0.0
        self._cluster = cluster
        self._answers = answers
        self._faults = faults
        super().__init__(self._ask, NUM_CLIENTS)

    def _ask(self, number: int) -> Requests:
        rng = random.Random(number)
        with contextlib.closing(Client(self._cluster.grpc)) as client:
            compare = self._compare_plainly if number % 2 else partial(self._compare, client.generate)
            while True:
                yield partial(compare, *rng.choice(self._answers))

    def _compare_plainly(self, request: GenerateRequest, answer: Answer) -> None:
        began_s = time.monotonic()
        try:
            self._compare(self._plainly, request, answer)
        except grpc.RpcError as error:
            if not (_is_break(error) and self._faults.killed_a_router_since(began_s)):
                raise
            self.num_breaks += 1
            time.sleep(0.1)

    def _compare(
        self, ask: Callable[[GenerateRequest], Iterator[Any]], request: GenerateRequest, answer: Answer
    ) -> None:
        heard = listen(ask(request))
        assert heard.answer == answer, f"{heard.answer} instead of {answer}"
        self.num_retries += heard.retries
        self.longest_gap_s = max(self.longest_gap_s, heard.longest_gap_s)

    def _plainly(self, request: GenerateRequest) -> Iterator[Any]:
        return self._cluster.inference.Generate(wire.generate_request(request), timeout=120)


def _is_break(error: grpc.RpcError) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE


class Faults:
    """Does one after the other, and counts them by kind."""

    def __init__(self, cluster: Cluster) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster = cluster
        self._rng = random.Random(9)
        self._router_killed_s: list[float] = []
        self._frozen: list[threading.Thread] = []
        self._kinds: dict[str, tuple[Callable[[], bool], int]] = {
            "SIGKILL of a worker": (self._kill_worker, 8),
            "SIGSTOP of a worker": (self._freeze_worker, 4),
            "SIGKILL of Redis": (self._kill_redis, 2),
            "SIGKILL of a router": (self._kill_router, 2),
            "SIGKILL of the controller": (self._kill_controller, 1),
        }

    def one(self) -> None:
        """Every kind once, in turn; then at random, workers most often. What finds no victim leaves it to the next."""
        missing = [kind for kind in self._kinds if not self.counts[kind]]
        weights = [weight for _, weight in self._kinds.values()]
        for kind in (*missing[:1], *self._rng.choices(list(self._kinds), weights, k=20)):
            with contextlib.suppress(psutil.NoSuchProcess):  # died just now, of the fault before
                if self._kinds[kind][0]():
                    self.counts[kind] += 1
                    return

    def killed_a_router_since(self, began_s: float) -> bool:
        return any(killed_s >= began_s - 1.0 for killed_s in self._router_killed_s)

    def end(self) -> None:
        for thread in self._frozen:
            thread.join()

    def _worker(self) -> psutil.Process | None:
        """One whose pool has another one alive: no stream is to notice, but somebody has to serve it."""
        alive = [(w["role"], w["pid"]) for w in self._status()["workers"] if w["state"] == "ready" and _runs(w["pid"])]
        num_alive = Counter(role for role, _ in alive)
        pids = [pid for role, pid in alive if num_alive[role] > 1]
        return psutil.Process(self._rng.choice(pids)) if pids else None

    def _kill_worker(self) -> bool:
        victim = self._worker()
        if victim is not None:
            victim.kill()
        return victim is not None

    def _freeze_worker(self) -> bool:
        victim = self._worker()
        if victim is None:
            return False
        victim.suspend()
        self._frozen.append(threading.Thread(target=_thaw, args=(victim, self._rng.choice(FROZEN_S))))
        self._frozen[-1].start()
        return True

    def _kill_redis(self) -> bool:
        found = running(self._cluster.processes(), "valkey-server")
        for process in found:
            process.kill()
        return bool(found)

    def _kill_router(self) -> bool:
        """One of two that live: who has no router at all to go on at is told so."""
        pids = [router["pid"] for router in self._status()["routers"] if _runs(router["pid"])]
        if len(pids) < 2:
            return False
        victim = psutil.Process(self._rng.choice(pids))
        self._router_killed_s.append(math.inf)  # until it is gone
        victim.kill()
        wait_until(lambda: not _runs(victim.pid))
        self._router_killed_s[-1] = time.monotonic()
        return True

    def _kill_controller(self) -> bool:
        controller = self._status().get("controller")
        if not controller:
            return False
        psutil.Process(controller["pid"]).kill()
        return True

    def _status(self) -> dict[str, Any]:
        """From whichever router answers; the one that was asked may have been killed."""
        return wait_until(self._cluster.client.status, every_s=0.05, not_yet=(Exception,))


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return False


def _thaw(victim: psutil.Process, after_s: float) -> None:
    time.sleep(after_s)
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.resume()


def undisturbed(cluster: Cluster) -> list[tuple[GenerateRequest, Answer]]:
    """Every request with its answer, and some once more, with a stop string from within it."""
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        heard = list(pool.map(partial(undisturbed_answer, cluster), requests()))
    answers = []
    for request, answer in zip(requests(), heard, strict=True):
        answers.append((request, answer))
        taken = request.sampling.keys() & {"stop", "min_tokens", "use_beam_search"}
        if taken or len(answer.choices[0].text) < MIN_TEXT:
            continue
        if request.sampling.get("n", 1) == 1 and request.sampling["max_tokens"] <= MAX_STOPPED_TOKENS:
            stopped = asks.stopped_by(request, answer, share=0.5)
            again = listen(cluster.client.generate(stopped)).answer
            assert again.choices[0].finish_reason == "stop"
            answers.append((stopped, again))
    return answers


def undisturbed_answer(cluster: Cluster, request: GenerateRequest) -> Answer:
    """A machine that stands still for seconds is a disturbance, too: asks again, and wants the same answer."""
    heard = []
    for _ in range(NUM_TRIES):
        heard.append(listen(cluster.client.generate(request)))
        if heard[-1].retries == 0:
            assert all(each.answer == heard[-1].answer for each in heard)
            return heard[-1].answer
    raise AssertionError(f"placed again {[each.retries for each in heard]} times though nothing was disturbed")


@pytest.mark.timeout(SECONDS + 400)
def test_no_stream_notices(model_dir: Path) -> None:
    with running_cluster("--prefill", "2", "--decode", "2", **SETTINGS) as cluster:
        answers = undisturbed(cluster)
        faults = Faults(cluster)
        with Load(cluster, answers, faults) as load:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until and not load.failures:
                time.sleep(PERIOD_S)
                faults.one()
            faults.end()
        num_served = load.num_served - load.num_breaks
        print(
            f"{faults.counts.total()} faults in {SECONDS:g} s: {dict(faults.counts)}; {num_served} requests "
            f"served, {load.num_retries} placements repeated, {load.num_breaks} plain streams broken by a router's "
            f"death, longest gap {load.longest_gap_s:.1f} s"
        )
        assert num_served > SECONDS
        cluster.wait_for(lambda s: all(p["ready"] == 2 for p in s["pools"].values()), WHOLE_S)
        cluster.wait_for(
            lambda s: (
                sum(map(is_idle, s["workers"])) == len(s["workers"]) == 4
                and not any(w["transfers"]["slots_in_use"] or w["transfers"]["unsent_bytes"] for w in s["workers"])
            ),
            WHOLE_S,
        )

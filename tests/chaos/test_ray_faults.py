"""Ray fails under load: workers serve on, no stream breaks, and the next controller adopts the workers."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import psutil
import pytest

from tests.integration.cluster import Cluster, running_cluster
from tests.integration.test_scaling import controller_pid, has, pids, until_taken
from tests.support.processes import command_line, running

pytestmark = pytest.mark.chaos
NUM_TOKENS = 400
STEP_MS = 15
SILENCE_S, WHOLE_S = 5.0, 60.0
SETTINGS = {
    "testing_arithmetic": "true",
    "testing_step_ms": str(STEP_MS),
    "engine_num_blocks": "2048",
    "engine_max_num_seqs": "16",
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.2, "top_p": 0.9, "seed": 8},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25, "seed": 9},
    {"logit_bias": {"500": 3, "700": 2}, "seed": 10},
    {"n": 2, "seed": 11},
    {"logprobs": 2, "seed": 12},
    {"seed": 13, "extra_body": {"min_p": 0.05}},
    {"seed": 14, "extra_body": {"typical_p": 0.8}},
    {"seed": 15, "extra_body": {"dry_multiplier": 0.75}},
    {"seed": 16, "extra_body": {"xtc_probability": 0.5, "xtc_threshold": 0.06}},
    {"seed": 17, "stop": ["\u0007"], "extra_body": {"bad_words": ["the", "in"], "min_tokens": 20}},
]
"""One stream of each kind of sampling, in OpenAI's dialect."""


class Heard:
    """One stream, read to its end.

    Attributes:
        texts: text of each choice.
        longest_gap_s: longest time between two events.
    """

    def __init__(self, http: str, number: int, begun: threading.Semaphore) -> None:
        self.texts: dict[int, str] = {}
        self.longest_gap_s = 0.0
        kind = dict(KINDS[number])
        extra = {"ignore_eos": True, **kind.pop("extra_body", {})}
        with openai.OpenAI(base_url=f"http://{http}/v1", api_key="none", max_retries=0, timeout=120) as client:
            events = client.completions.create(
                model=client.models.list().data[0].id,
                prompt=f"Story {number} of a cat",
                max_tokens=NUM_TOKENS,
                stream=True,
                extra_body=extra,
                **kind,
            )
            last_s, finished = time.monotonic(), set[int]()
            for event in events:
                now_s = time.monotonic()
                self.longest_gap_s, last_s = max(self.longest_gap_s, now_s - last_s), now_s
                for choice in event.choices:
                    self.texts[choice.index] = self.texts.get(choice.index, "") + choice.text
                    if choice.finish_reason:
                        finished.add(choice.index)
                begun.release()
        assert finished == self.texts.keys() == set(range(kind.get("n", 1))), "a stream has no end"


def streams(http: str, begun: threading.Semaphore) -> tuple[ThreadPoolExecutor, list[Any]]:
    pool = ThreadPoolExecutor(len(KINDS))
    return pool, [pool.submit(Heard, http, number, begun) for number in range(len(KINDS))]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster("--prefill", "1", "--decode", "2", **SETTINGS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[dict[int, str]]:
    pool, going = streams(cluster.http, threading.Semaphore(0))
    with pool:
        return [each.result(120).texts for each in going]


@pytest.mark.parametrize("victim", ["raylet", "gcs_server", "deploy.ray_pools.head", "all of Ray"])
def test_no_stream_breaks_when_ray_fails(cluster: Cluster, undisturbed: list[dict[int, str]], victim: str) -> None:
    before = cluster.wait_for(has(1, 2))
    begun = threading.Semaphore(0)
    pool, going = streams(cluster.http, begun)
    with pool:
        for _ in range(3 * len(KINDS)):
            assert begun.acquire(timeout=60)
        kill(cluster, victim)
        killed_s = time.monotonic()
        heard = [each.result(120) for each in going]
    assert [each.texts for each in heard] == undisturbed
    silence_s = max(each.longest_gap_s for each in heard)
    controller = before["controller"]["pid"]
    after = cluster.wait_for(lambda s: has(1, 2)(s) and controller_pid(s) not in (0, controller), WHOLE_S)
    until_taken(lambda: cluster.client.scale("decode", 3))
    cluster.wait_for(has(1, 3), WHOLE_S)
    print(f"\n{victim}: longest silence {silence_s:.2f} s, pools whole after {time.monotonic() - killed_s:.1f} s")
    assert silence_s < SILENCE_S
    assert pids(after) == pids(before), "a worker was started again"
    until_taken(lambda: cluster.client.scale("decode", 2))
    cluster.wait_for(has(1, 2))


def kill(cluster: Cluster, victim: str) -> None:
    (head,) = running(cluster.processes(), "deploy.ray_pools.head")
    processes = [head, *head.children(recursive=True)]
    for process in processes:
        names = {each.rpartition("/")[2] for each in command_line(process)}
        if victim == "all of Ray" or victim in names:
            process.kill()
    psutil.wait_procs([each for each in processes if victim == "all of Ray"], timeout=10)


def test_a_worker_that_dies_while_ray_is_away_comes_back_with_it(cluster: Cluster) -> None:
    """The other workers are not started again."""
    before = cluster.wait_for(has(1, 2))
    kill(cluster, "all of Ray")
    victim = next(worker for worker in before["workers"] if worker["role"] == "decode")
    psutil.Process(victim["pid"]).kill()
    after = cluster.wait_for(lambda s: has(1, 2)(s) and pids(s)[victim["id"]] != victim["pid"], 120)
    kept = {worker_id: pid for worker_id, pid in pids(before).items() if worker_id != victim["id"]}
    assert kept.items() <= pids(after).items()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_cluster_though_ray_is_away(number: signal.Signals) -> None:
    """Nothing is left if `baton up` is told to stop. If it is killed, Ray's agents end a minute later."""
    cluster = Cluster("--prefill", "1", "--decode", "1", **SETTINGS)
    try:
        workers = [psutil.Process(pid) for pid in pids(cluster.wait_for(has(1, 1))).values()]
        others = cluster.processes()
        kill(cluster, "deploy.ray_pools.head")
    finally:
        cluster.stop(number)
    agents = [each for each in others if number == signal.SIGKILL and "ray::" in "".join(command_line(each)[:1])]
    ours = [each for each in (*workers, *others) if each not in agents]
    _, alive = psutil.wait_procs(ours, timeout=20)
    assert not alive, [command_line(each) for each in alive]
    for each in agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()

"""Clusters whose workers compute with vLLM, through kills, drains, broken links and hosts that die: `make test-vllm`.

The model is tiny and random, so its tokens look like nothing, but a wrong one is noticed: every answer is compared with
that of an undisturbed cluster.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton import wire
from baton.api import GenerateRequest, TokenIds
from baton.cluster import Role
from baton.config import RouterConfig, SloClassConfig, TransferConfig
from baton.structure import StructuredOutputs
from baton.v1 import worker_pb2
from tests.chaos import asks
from tests.chaos.asks import Answer, Listening, listen
from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.test_index import held, mirrored
from tests.integration.cluster import is_idle
from tests.support import vllm_models
from tests.support.asking import metric, prompt_of
from tests.support.vllm import vllm_python
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

NUM_REQUESTS, NUM_AT_ONCE = 200, 48
NUM_BLOCKS = 56
"""A third of what the requests that one worker has at once want: 24 of 7 blocks."""
SOON_S = 120.0


def requests(seed: int = 0) -> list[GenerateRequest]:
    """Prompts of 20 to 300 tokens, some of which begin alike, and answers of 8 to 60; every other one is drawn."""
    rng = random.Random(seed)
    asked = []
    for number in range(NUM_REQUESTS):
        prompt = [*prompt_of(number % 7, 64), *prompt_of(1000 + number, rng.randrange(1, 237))][
            rng.choice((0, 0, 45)) :
        ]
        num_tokens = rng.randrange(8, 61)
        if number % 2:
            drawn = asks.seeded(prompt, num_tokens, seed=number)
            asked.append(replace(drawn, sampling=drawn.sampling | {"temperature": 0.9, "top_k": 0, "top_p": 0.95}))
        else:
            asked.append(asks.greedy(prompt, num_tokens))
    return asked


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vllm_python()
    return vllm_models.llama(tmp_path_factory.mktemp("llama"))


@contextlib.contextmanager
def vllm_fleet(model: Path, mode: str, faults: str = "", **engine: Any) -> Iterator[Fleet]:
    unhurried = {"default": SloClassConfig(ttft_ms=600_000.0)}
    router = RouterConfig(mode=mode, cache_secret="vllm", max_attempts=16, slo_classes=unhurried)
    settings: dict[str, Any] = {
        "num_blocks": NUM_BLOCKS,
        "max_num_seqs": 32,
        "vllm_args": {"enforce_eager": True},
    } | engine
    with running_fleet(
        TransferConfig(op_timeout_s=10.0),
        router,
        lease_s=10.0,
        faults=faults,
        model_path=model,
        runner="vllm",
        vllm_python=vllm_python(),
        **settings,
    ) as fleet:
        yield fleet


def ask(fleet: Fleet, request: GenerateRequest) -> Listening:
    return listen(fleet.inference.Generate(wire.generate_request(request), timeout=600))


def ask_all(
    fleet: Fleet, asked: list[GenerateRequest], happens: dict[int, Callable[[], object]] | None = None
) -> list[Answer]:
    """Asks everything, `NUM_AT_ONCE` at a time, and does something each time so many answers are there."""
    num_answered, lock, happening = 0, threading.Lock(), threading.Lock()

    def one(request: GenerateRequest) -> Answer:
        nonlocal num_answered
        answer = ask(fleet, request).answer
        with lock:
            num_answered += 1
            happen = (happens or {}).get(num_answered)
        if happen is not None:
            with happening:  # one after the other
                happen()
        return answer

    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        return list(pool.map(one, asked))


def differing(answers: list[Answer], expected: list[Answer]) -> list[int]:
    return [number for number, (one, other) in enumerate(zip(answers, expected, strict=True)) if one != other]


def check_idle(fleet: Fleet) -> None:
    """Nothing is held, each worker's accounting agrees with vLLM's, and the router knows what is cached."""
    router = fleet.routers[0]
    status = router.wait_for(lambda status: all(map(is_idle, status["workers"])), SOON_S)
    assert {worker["preemptions"] for worker in status["workers"]} == {0}
    wait_until(lambda: mirrored(router) == held(router), SOON_S, seen=lambda: (mirrored(router), held(router)))


def kill(fleet: Fleet, worker: str, role: Role) -> None:
    """A worker dies with its host, and another one takes its place."""
    hosts = psutil.Process(fleet.workers[worker].pid).children(recursive=True)
    fleet.remove(worker, signal.SIGKILL)
    fleet.add(role)
    wait_until(lambda: all(map(has_ended, hosts)), 10.0, seen=lambda: f"a host outlives its worker: {hosts}")


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more; a dead one stays listed until its new parent has asked for its status."""
    return not process.is_running() or bool(process.status() == psutil.STATUS_ZOMBIE)


@pytest.fixture(scope="module")
def undisturbed(model: Path) -> list[Answer]:
    """The answers of two workers to which nothing happens, with a large cache."""
    with vllm_fleet(model, "aggregated", num_blocks=1024) as fleet:
        fleet.fill(Role.DECODE, Role.DECODE)
        answers = ask_all(fleet, requests())
        assert ask_all(fleet, requests()) == answers, "with a full cache"
        check_idle(fleet)
    return answers


def test_an_aggregated_worker_dies_half_way_and_every_answer_is_the_same(
    model: Path, undisturbed: list[Answer]
) -> None:
    with vllm_fleet(model, "aggregated") as fleet:
        fleet.fill(Role.DECODE, Role.DECODE)
        victim = next(iter(fleet.workers))
        answers = ask_all(fleet, requests(), {NUM_REQUESTS // 2: partial(kill, fleet, victim, Role.DECODE)})
        assert differing(answers, undisturbed) == []
        fleet.wait_for(*fleet.workers)
        assert differing(ask_all(fleet, requests()), undisturbed) == []
        check_idle(fleet)


def test_kv_is_transferred_through_kills_drains_flips_broken_links_and_cancels(
    model: Path, undisturbed: list[Answer]
) -> None:
    with vllm_fleet(model, "disaggregated", "corrupt_chunk=31,link_drop=0.01,link_flip=0.01") as fleet:
        fleet.fill(Role.PREFILL, Role.DECODE, Role.DECODE)
        prefill, first, second = fleet.workers

        def drain() -> None:
            fleet.wait_for(fleet.add(Role.DECODE))
            with fleet.control(first) as worker:
                assert worker.Drain(worker_pb2.DrainRequest(timeout_s=60)).num_left == 0
            fleet.remove(first, signal.SIGTERM)

        def flip() -> None:
            fleet.wait_for(*fleet.workers)
            with fleet.control(second) as worker:
                worker.SetRole(worker_pb2.SetRoleRequest(role="prefill", timeout_s=60), timeout=90)

        happens: dict[int, Callable[[], object]] = {
            40: drain,
            90: partial(kill, fleet, prefill, Role.PREFILL),
            140: flip,
        }
        assert differing(ask_all(fleet, requests(), happens), undisturbed) == []
        router = fleet.routers[0]
        for number in range(24):
            cancel(fleet, requests(seed=1)[number], after_tokens=number % 4)
        assert differing(ask_all(fleet, requests()[:40]), undisturbed[:40]) == []
        check_idle(fleet)
        transfers = [worker["transfers"] for worker in router.client.status()["workers"]]
        assert sum(each["committed"] for each in transfers) > 40
        assert sum(each["failed"] for each in transfers) > 0


def test_a_drain_migrates_running_answers_with_their_kv(model: Path) -> None:
    """No prompt token is computed again: the successor pulls all whole blocks, and computes what follows them."""
    rng = random.Random(5)
    asked = [asks.seeded([rng.randrange(1, 49_000) for _ in range(100)], 700, seed) for seed in range(4)]
    with vllm_fleet(model, "disaggregated", num_blocks=256) as fleet:
        fleet.fill(Role.PREFILL, Role.DECODE, Role.DECODE)
        first = fleet.started_as(Role.DECODE)[0]
        with ThreadPoolExecutor(len(asked)) as pool:
            streams = [pool.submit(ask, fleet, request) for request in asked]
            wait_until(lambda: fleet.routers[0].worker(first)["running"] > 1, SOON_S)
            with fleet.control(first) as control:
                assert control.Drain(worker_pb2.DrainRequest(timeout_s=60)).num_left == 0
            heard = [stream.result() for stream in streams]
        num_moved = metric(fleet.routers[0], "baton_migrations_total", 'pulled="true"')
        # vLLM computes the last prompt token of each again: in its cache, no token follows from KV alone.
        num_again = computed_tokens(fleet) - sum(100 + 700 for _ in asked)
        print(f"{num_moved:.0f} answers migrated; {num_again} tokens computed again")
        assert num_moved > 0
        assert num_again <= num_moved * 32, "at most the last block of each"
        assert [each.answer for each in heard] == ask_all(fleet, asked)


def computed_tokens(fleet: Fleet) -> int:
    """Tokens that all workers have computed, once they are idle."""
    status = fleet.routers[0].wait_for(lambda status: all(map(is_idle, status["workers"])), SOON_S)
    return sum(worker["computed_tokens"] for worker in status["workers"])


def cancel(fleet: Fleet, request: GenerateRequest, after_tokens: int) -> None:
    """The client goes away, at once or after some messages."""
    call = fleet.inference.Generate(wire.generate_request(request), timeout=60)
    with contextlib.suppress(grpc.RpcError, StopIteration):
        for _ in range(after_tokens):
            next(call)
    call.cancel()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_host_that_dies_or_hangs_ends_its_worker_and_no_stream(
    model: Path, undisturbed: list[Answer], number: signal.Signals, when: str
) -> None:
    with vllm_fleet(model, "aggregated", step_timeout_s=6.0) as fleet:
        fleet.fill(Role.DECODE, Role.DECODE)
        victim = next(iter(fleet.workers))
        process = fleet.workers[victim]
        (host,) = psutil.Process(process.pid).children()

        def happen() -> None:
            host.send_signal(number)

        if when == "idle":
            happen()
        else:
            asked = requests()[:80]
            assert differing(ask_all(fleet, asked, {20: happen}), undisturbed[:80]) == []
        process.join(30)
        assert not process.is_alive(), "it serves on without a host"
        wait_until(lambda: has_ended(host), 10.0)
        fleet.workers.pop(victim)
        assert differing(ask_all(fleet, requests()[:8]), undisturbed[:8]) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_rank_that_dies_or_hangs_ends_its_worker_and_no_stream(
    model: Path, undisturbed: list[Answer], number: signal.Signals
) -> None:
    """Two ranks say what one does, and a worker of one rank continues their answers."""
    asked = requests()[:60]
    with vllm_fleet(model, "aggregated", tensor_parallel=2, step_timeout_s=25.0) as fleet:
        victim = fleet.add(Role.DECODE)
        fleet.wait_for(victim)
        (worker,) = fleet.routers[0].client.status()["workers"]
        assert worker["computes"]["num_ranks"] == 2
        assert worker["computes"]["attention"]
        assert differing(ask_all(fleet, asked), undisturbed[:60]) == []
        process = fleet.workers[victim]
        descendants = psutil.Process(process.pid).children(recursive=True)
        rank = next(each for each in descendants if each.name() == "VLLM::Worker_TP1")
        engine = replace(fleet.config.engine, tensor_parallel=1)
        fleet.wait_for(fleet.add(Role.DECODE, config=replace(fleet.config, engine=engine)))
        assert differing(ask_all(fleet, asked, {10: lambda: rank.send_signal(number)}), undisturbed[:60]) == []
        process.join(60)
        assert not process.is_alive(), "it serves on without a rank"
        wait_until(lambda: all(map(has_ended, descendants)), 10.0, seen=lambda: descendants)
        fleet.workers.pop(victim)


@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_log_probabilities_are_those_of_transformers(model: Path, mode: str) -> None:
    """The first token has them too, which a prefill worker draws, and so have prompts, which are scored where they are
    computed."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=False)
    prompt = prompt_of(3, 70)
    asked = {"max_tokens": 4, "logprobs": 3, "prompt_logprobs": 2, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    with vllm_fleet(model, mode) as fleet:
        fleet.fill(Role.DECODE, *([Role.PREFILL] if mode == "disaggregated" else []))
        answer = ask(fleet, GenerateRequest(prompt=TokenIds(tuple(prompt)), sampling=asked)).answer
        check_idle(fleet)
    (choice,) = answer.choices
    assert len(choice.token_ids) == len(choice.scores) == 4
    with torch.inference_mode():
        expected = reference(torch.tensor([[*prompt, *choice.token_ids]])).logits[0].log_softmax(-1)
    answered = expected[len(prompt) - 1 : -1]
    for index, token in enumerate(choice.token_ids):
        assert choice.scores.logprobs[index] == pytest.approx(float(answered[index, token]), abs=1e-3)
        best = [logprob for _, logprob in choice.scores.top(index)]
        assert best == pytest.approx(answered[index].topk(3).values.tolist(), abs=1e-3)
    assert answer.prompt_scores is not None
    of_prompt = expected[: len(prompt) - 1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert answer.prompt_scores.scores.logprobs == pytest.approx(of_prompt.tolist(), abs=1e-3)


def test_any_number_of_structures_fail_in_a_step_and_others_continue(model: Path, undisturbed: list[Answer]) -> None:
    """The library notices only in the middle of an answer that a structure is too complex."""
    schema = {"type": "string", "pattern": "^c{1,1000}(.{0,1000}){0,1000}x$"}
    asked = {
        "max_tokens": 40,
        "temperature": 0.0,  # all draw the same, and so fail after as many tokens
        "structured_outputs": StructuredOutputs(json=json.dumps(schema)),
    }
    failing = GenerateRequest(prompt=TokenIds((5, 6, 7)), sampling=asked)

    def fail(_: int) -> str:
        with pytest.raises(grpc.RpcError) as failure:
            ask(fleet, failing)
        return str(failure.value)

    with vllm_fleet(model, "aggregated", step_timeout_s=20.0) as fleet:
        fleet.fill(Role.DECODE)
        with ThreadPoolExecutor(36) as pool:
            others = [pool.submit(ask, fleet, request) for request in requests()[:4]]
            assert all("too many expressions" in reason for reason in pool.map(fail, range(32)))
            assert [other.result().answer for other in others] == undisturbed[:4]
        check_idle(fleet)
        assert len(fleet.routers[0].client.status()["workers"]) == 1
        assert metric(fleet.routers[0], "baton_retries_total") == 0, "the worker has lived through it"

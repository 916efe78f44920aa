"""A model over several ranks, each a process, answers as transformers' own `generate` on one."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import uvloop

from baton.cluster import Role
from baton.config import Config, EngineConfig, ModelConfig, RouterConfig, TestingConfig, TransferConfig
from baton.errors import ModelLoadError
from baton.parent import die_with
from engine.core.engine import Engine
from engine.core.runner import Fence, StepInput
from engine.core.sequence import Purpose
from engine.model.transformers_runner import TransformersRunner
from engine.native.spec import FAMILIES
from tests.chaos.fleet import Fleet, running_fleet
from tests.integration.cluster import request
from tests.integration.test_engine_models import (
    ENGINE,
    EXPERTS,
    EXTRAS,
    VOCAB_SIZE,
    Reference,
    answers,
    engine_of,
    fork_and_compare,
    load_reference,
    make_engine,
    make_spec,
    refer,
    rows_of,
    same_up_to_near_ties,
    save_tiny,
)
from tests.support.families import LATENT, OFTEN, RECURRENT
from tests.support.processes import command_line
from worker.process import serve

pytestmark = [pytest.mark.first, pytest.mark.integration]

NOT_BY_HEAD = ("flex_olmo", "olmo2", "olmoe", "phi3", "stablelm")
OTHERS = [kind for kind in FAMILIES if kind not in (*NOT_BY_HEAD, "llama", "qwen3_moe")]
TWO_RANKS = replace(ENGINE, tensor_parallel=2)


@contextlib.contextmanager
def over_ranks(folder: Path, config: EngineConfig = TWO_RANKS) -> Iterator[Engine]:
    runner = TransformersRunner(ModelConfig(path=str(folder), device="cpu"), config)
    try:
        assert len(multiprocessing.active_children()) == config.tensor_parallel - 1
        yield engine_of(runner, config)
    finally:
        runner.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_a_tiny_model_answers_as_generate(kind: str, tmp_path: Path) -> None:
    compare(kind, EXTRAS.get(kind, {}), tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("kind", OTHERS)
def test_a_tiny_model_of_every_other_type_answers_as_generate(kind: str, tmp_path: Path) -> None:
    compare(kind, EXTRAS.get(kind, {}), tmp_path)


WHOLE = {kind: EXTRAS.get(kind, {}) for kind in NOT_BY_HEAD if kind != "stablelm"} | {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "granitemoehybrid": RECURRENT["granitemoehybrid"],
    "nemotron_h": RECURRENT["nemotron_h"],
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "deepseek_v2" else pytest.mark.full) for kind in WHOLE]
)
def test_ranks_that_keep_all_heads_answer_as_generate(kind: str, tmp_path: Path) -> None:
    """Every rank has the whole KV: latents, or because transformers computes the attention whole."""
    compare(kind, WHOLE[kind], tmp_path, num_heads=1 if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite") else 2)


OF_EXPERTS = {
    "gpt_oss": (OFTEN["gpt_oss"], 2, 2),
    "mixtral": (EXTRAS["mixtral"], 2, 1),
    "qwen3_moe": (EXTRAS["qwen3_moe"], 2, 1),
    "deepseek_v3": (LATENT, 4, 1),
    "granitemoehybrid": (RECURRENT["granitemoehybrid"], 4, 2),
    "qwen3_next": (RECURRENT["qwen3_next"], 2, 1),
}
"""Sizes, number of ranks, and KV heads on each."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "gpt_oss" else pytest.mark.full) for kind in OF_EXPERTS]
)
def test_ranks_with_whole_experts_answer_as_generate(kind: str, tmp_path: Path) -> None:
    extra, num_ranks, num_heads = OF_EXPERTS[kind]
    compare(kind, extra, tmp_path, num_heads, replace(ENGINE, tensor_parallel=num_ranks, expert_parallel=True))


def compare(
    kind: str, extra: dict[str, Any], tmp_path: Path, num_heads: int = 1, config: EngineConfig = TWO_RANKS
) -> None:
    """Several ranks' answers to prompts, to the same once more with what came, and of a fork, with `generate`'s.

    Args:
        num_heads: KV heads on each rank.
    """
    save_tiny(kind, {"tie_word_embeddings": False} | extra, tmp_path)
    reference = load_reference(tmp_path)
    draw = random.Random(7)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 17, 16, 130, 61)]
    references = [refer(reference, prompt, 12) for prompt in prompts]
    with over_ranks(tmp_path, config) as engine:
        heads = [cache.spec.groups[0].num_kv_heads for cache in engine.runner.caches]
        assert heads == [num_heads] * config.tensor_parallel
        for group in (group for cache in engine.runner.caches for group in cache.groups):
            group.fill_(float("nan"))
        specs = [make_spec(f"first-{i}", prompt, 12, ignore_eos=True) for i, prompt in enumerate(prompts)]
        got, _ = answers(engine, specs, steps_between=2)
        # Again, longer than before: the prompt and most of the answer come from the ranks' caches.
        specs = [
            make_spec(f"again-{i}", prompt + reference.tokens[:10], 2, ignore_eos=True)
            for i, (prompt, reference) in enumerate(zip(prompts, references, strict=True))
        ]
        again, sequences = answers(engine, specs, steps_between=0)
        fork_and_compare(engine, reference)
        if config.expert_parallel:
            counts = engine.load().expert_tokens
            assert len(counts) == EXPERTS["num_local_experts"]
            assert all(counts), "each expert has had tokens"
        else:
            assert not engine.load().expert_tokens
    num_same = sum(map(same_up_to_near_ties, got, references))
    if kind not in RECURRENT:  # the rows of a small pool may have been taken for new sequences
        assert sequences[3].num_cached_tokens >= 128
    assert [answer == reference.tokens[10:] for answer, reference in zip(again, references, strict=True)].count(
        True
    ) >= 4
    print(f"{kind}: {num_same} of 5 answers equal to the last token")
    assert num_same >= 4, "too many near ties for a test that means something"


def test_no_layer_is_told_before_all_ranks_have_it(tmp_path: Path) -> None:
    """Who reads a layer, reads all ranks' heads of it. Bit for bit, and for single tokens as for prompts."""
    save_tiny("llama", {}, tmp_path)
    with over_ranks(tmp_path) as engine:
        (other,) = (psutil.Process(child.pid) for child in multiprocessing.active_children())
        engine.add(make_spec("one", list(range(40)), 3, ignore_eos=True), Purpose.GENERATE, 0.0)
        num_steps = 0
        while batch := engine.schedule(0.0)[0]:
            told: list[list[torch.Tensor]] = []

            def layer_done(layer: int, fence: Fence | None, batch: StepInput = batch, told: Any = told) -> None:
                assert fence is None
                assert layer == len(told)
                told.append([rows_of(cache, batch, layer) for cache in engine.runner.caches])

            other.suspend()
            with ThreadPoolExecutor(1) as thread:
                step = thread.submit(engine.runner.execute, batch, layer_done)
                try:
                    time.sleep(0.5)
                    assert not told, "the other rank has done nothing yet"
                finally:
                    other.resume()
                sampled = step.result()
            final = [[rows_of(cache, batch, layer) for cache in engine.runner.caches] for layer in range(4)]
            assert [[a.equal(b) for a, b in zip(*layer, strict=True)] for layer in zip(told, final, strict=True)] == [
                [True, True]
            ] * 4
            engine.commit(batch, sampled, 0.0)
            num_steps += 1
        assert num_steps == 3


def test_no_layer_is_told_before_ranks_that_sum_nothing_have_it(tmp_path: Path) -> None:
    """Without experts, transformers' plan for this type leaves nothing to sum in any layer."""
    save_tiny("granitemoehybrid", RECURRENT["granitemoehybrid"] | {"num_local_experts": 0}, tmp_path)
    with over_ranks(tmp_path) as engine:
        (other,) = (psutil.Process(child.pid) for child in multiprocessing.active_children())
        engine.add(make_spec("one", list(range(40)), 3, ignore_eos=True), Purpose.GENERATE, 0.0)
        batch, told = engine.schedule(0.0)[0], list[int]()
        other.suspend()
        with ThreadPoolExecutor(1) as thread:
            step = thread.submit(engine.runner.execute, batch, lambda layer, fence: told.append(layer))
            try:
                time.sleep(0.5)
                assert not told
                assert not step.done(), "the other rank has done nothing yet"
            finally:
                other.resume()
            step.result()
        assert told == [engine.runner.spec.num_layers - 1]
        rows = [rows_of(cache, batch, told[0]) for cache in engine.runner.caches]
        assert rows[0].equal(rows[1])


@pytest.mark.parametrize(
    ("kind", "num_ranks", "sentence"),
    [
        ("gpt2", 2, "no plan to divide a model of type 'gpt2' among ranks; set engine.tensor_parallel to 1"),
        ("llama", 4, "engine.tensor_parallel is 4, which does not divide the model's 4 heads and 2 KV heads"),
    ],
)
def test_ranks_that_do_not_suit_the_model_are_refused(kind: str, num_ranks: int, sentence: str, tmp_path: Path) -> None:
    save_tiny(kind, {}, tmp_path)
    with pytest.raises(ModelLoadError, match=sentence):
        make_engine(tmp_path, replace(ENGINE, tensor_parallel=num_ranks))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("kind", "extra", "num_ranks", "sentence"),
    [
        ("llama", {}, 2, "cannot divide the experts of a model of type 'llama' among ranks; unset"),
        (
            "gpt_oss",
            OFTEN["gpt_oss"] | {"num_experts": 3, "num_local_experts": 3},
            2,
            "does not divide the model's 3 experts; set it to",
        ),
    ],
)
def test_experts_that_ranks_cannot_divide_are_refused(
    kind: str, extra: dict[str, Any], num_ranks: int, sentence: str, tmp_path: Path
) -> None:
    save_tiny(kind, extra, tmp_path)
    with pytest.raises(ModelLoadError, match=sentence):
        make_engine(tmp_path, replace(ENGINE, tensor_parallel=num_ranks, expert_parallel=True))
    assert not multiprocessing.active_children()


def test_a_type_whose_experts_alone_can_be_divided_says_so(tmp_path: Path) -> None:
    save_tiny("gpt_oss", OFTEN["gpt_oss"], tmp_path)
    with pytest.raises(ModelLoadError, match=r"'gpt_oss' among ranks; set .* to 1, or engine.expert_parallel to true"):
        make_engine(tmp_path, TWO_RANKS)


def test_caches_that_shared_memory_cannot_hold_are_refused(tmp_path: Path) -> None:
    save_tiny("llama", {}, tmp_path)
    with pytest.raises(ModelLoadError, match=r"need 781250000 MiB of shared memory and /dev/shm has \d+ left"):
        make_engine(tmp_path, replace(TWO_RANKS, num_blocks=10**11))


@pytest.mark.chaos
def test_weights_that_cannot_be_loaded_are_an_error_and_leave_no_process(tmp_path: Path) -> None:
    save_tiny("llama", {}, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelLoadError, match="cannot load the weights in"):
        make_engine(tmp_path, TWO_RANKS)
    assert not multiprocessing.active_children()


class RankedFleet:
    """A prefill worker of one rank and decode workers of two, of a tiny model, which answer as `generate` does."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self._folder = folder
        self._model = load_reference(folder)
        self._draw = random.Random(11)

    def add(self, role: Role, worker_id: str, num_ranks: int, step_timeout_s: float = 60.0) -> None:
        engine = replace(TWO_RANKS, tensor_parallel=num_ranks, step_timeout_s=step_timeout_s)
        config = self.fleet.config
        model = replace(config.model, path=str(self._folder), device="cpu")
        config = replace(config, model=model, engine=engine, testing=TestingConfig())
        process = multiprocessing.get_context("spawn").Process(
            target=run_real_worker, args=(role, worker_id, config.to_json(), os.getpid())
        )
        process.start()
        self.fleet.workers[worker_id] = process

    def other_ranks(self, worker_id: str) -> list[psutil.Process]:
        children = psutil.Process(self.fleet.workers[worker_id].pid).children()
        return [child for child in children if "spawn_main" in " ".join(command_line(child))]

    def ask(self, num_tokens: int, max_tokens: int, request_id: str = "") -> tuple[Reference, Iterator[list[int]]]:
        """A new prompt: what `generate` says, and the tokens that come here, message by message."""
        prompt = [self._draw.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
        reference = refer(self._model, prompt, max_tokens)
        sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        message = request(token_ids=prompt, sampling=sampling, request_id=request_id)
        answer = self.fleet.inference.Generate(message, timeout=120)
        return reference, (list(message.token_ids) for message in answer)


def has_a_pair_for_each_two_ranks(status: dict[str, Any]) -> bool:
    """Of the only prefill worker, which has one rank, and each decode worker of two that it has transferred to."""
    pairs: dict[str, list[int]] = {role: [] for role in Role}
    for worker in status["workers"]:
        pairs[worker["role"]].append(worker["transfers"]["open_connections"])
    of_decode = pairs[Role.DECODE]
    return sum(pairs[Role.PREFILL]) == sum(of_decode) > 0 and set(of_decode) <= {0, 2}


def run_real_worker(role: Role, worker_id: str, config_json: str, parent: int) -> None:
    """The worker's process."""
    die_with(parent)
    uvloop.run(serve(Config.from_json(config_json), Role(role), worker_id, "127.0.0.1"))


@pytest.mark.parametrize(
    ("number", "step_timeout_s"),
    [
        pytest.param(signal.SIGKILL, 60.0, id="killed", marks=pytest.mark.chaos),
        pytest.param(signal.SIGSTOP, 5.0, id="hanging", marks=pytest.mark.chaos),
    ],
)
def test_workers_of_several_ranks_serve_and_die_whole(
    number: signal.Signals, step_timeout_s: float, tmp_path: Path
) -> None:
    """KV goes from one rank to two; a rank that is killed or hangs takes its worker along, and no stream."""
    save_tiny("llama", {"max_position_embeddings": 1024}, tmp_path)
    with running_fleet(TransferConfig(), RouterConfig(mode="disaggregated")) as fleet:
        ranked = RankedFleet(fleet, tmp_path)
        ranked.add(Role.PREFILL, "worker-0", 1)
        for worker_id in ("worker-1", "worker-2"):
            ranked.add(Role.DECODE, worker_id, 2, step_timeout_s)
        fleet.wait_for(*fleet.workers)
        num_same = 0
        for num_tokens in (1, 17, 100, 200):
            reference, messages = ranked.ask(num_tokens, 12)
            num_same += same_up_to_near_ties([token for message in messages for token in message], reference)
        assert num_same >= 3
        fleet.routers[0].wait_for(has_a_pair_for_each_two_ranks)

        reference, messages = ranked.ask(100, 60, "disturbed")
        first = [next(messages) for _ in range(20)]
        victim = fleet.client.explain("disturbed")[0].decode_worker
        process, (other,) = fleet.workers[victim], ranked.other_ranks(victim)
        other.send_signal(number)
        tokens = [token for message in (*first, *messages) for token in message]
        assert same_up_to_near_ties(tokens, reference)
        process.join(30)
        assert process.exitcode == 1
        del fleet.workers[victim]
        assert not psutil.wait_procs([other], timeout=5)[1], "the rank outlives its worker"
        left = [rank for worker_id in fleet.workers for rank in ranked.other_ranks(worker_id)]
    assert len(left) == 1
    assert not psutil.wait_procs(left, timeout=5)[1], "the rank outlives its worker"

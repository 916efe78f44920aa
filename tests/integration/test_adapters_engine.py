"""LoRA adapters on transformers' models: each answer is that of the model with the adapter merged into its weights."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from opentelemetry.context import Context
from torch import nn

from baton.adapters import WEIGHTS_FILE, read_adapter
from baton.cluster import Computes
from baton.config import EngineConfig, ModelConfig
from baton.errors import AdapterUnreadable, ConfigError, InvalidRequest, Unsupported
from baton.messages import Adapter, DecodeRequest, FirstToken, PrefillRequest, SequenceSpec, Ticket
from decode_worker.service import DecodeService
from engine.core.loop import EngineLoop
from engine.core.outputs import Generated
from engine.core.runner import OnLayerDone, StepInput, StepOutput, ignore_layer
from engine.core.sequence import Purpose
from engine.model.rank_step import RankStep, order_for_packing
from engine.model.transformers_runner import TransformersRunner
from engine.native.spec import FAMILIES
from engine.runners import make_runner
from prefill_worker.service import PrefillService
from tests.integration.test_engine_models import (
    ENGINE,
    EXTRAS,
    VOCAB_SIZE,
    engine_of,
    load_reference,
    refer,
    same_up_to_near_ties,
)
from tests.integration.test_families import SLOTS, prompts, rest_of, save_untied
from tests.support.adapters import Shapes, registered, save_adapter
from tests.support.builders import sequence_spec
from tests.support.families import LATENT, RECURRENT
from tests.support.guessing import FREE, Known
from tests.unit.kvstore.transfer.peers import engine_worker

pytestmark = pytest.mark.integration

NUM_ADAPTERS = 32
CONFIG = replace(ENGINE, num_blocks=2000, max_num_seqs=48, max_num_batched_tokens=64, max_adapters=NUM_ADAPTERS)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": EXTRAS["qwen3_moe"],
    "deepseek_v3": LATENT,
    "qwen3_next": RECURRENT["qwen3_next"],
}
"""A dense model, experts, latents, and a hybrid."""
NOT_CHANGED = ("experts", "kv_b_proj", "lm_head", "shared_expert_gate")


OF_RANKS = MODELS | {"deepseek_v2": LATENT}


def changeable(model: nn.Module) -> Shapes:
    """The linear maps of a model's layers, outside of its experts."""
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and not set(NOT_CHANGED) & set(name.split("."))
    }


def rank_of(number: int) -> int:
    return (4, 64, 8, 17, 32)[number % 5]


def save_some(folder: Path, model: nn.Module, count: int) -> list[Adapter]:
    """Adapters of several ranks; every third changes only the projections of queries, if there are any."""
    every = changeable(model)
    some = {name: shape for name, shape in every.items() if name.endswith(("q_proj", "q_b_proj"))}
    return [
        save_adapter(folder / f"adapter-{i}", some if i % 3 == 2 and some else every, rank_of(i), i, lora_alpha=8 + i)
        for i in range(count)
    ]


@contextlib.contextmanager
def merged(model: nn.Module, adapter: Adapter | None) -> Iterator[None]:
    """The model computes with the adapter's products in its weights."""
    if adapter is None:
        yield
        return
    tensors = safetensors.torch.load_file(Path(adapter.path) / WEIGHTS_FILE)
    kept = {}
    for target in read_adapter(adapter.path).targets:
        weight = model.get_submodule(target.module).weight
        assert isinstance(weight, nn.Parameter)
        a, b = (tensors[name] for name in target.names)
        kept[target.module] = (weight, weight.data)
        weight.data = weight.data + target.scaling * (b @ a)
    try:
        yield
    finally:
        for weight, data in kept.values():
            weight.data = data


def make_runner_of(folder: Path, config: EngineConfig = CONFIG) -> TransformersRunner:
    return TransformersRunner(ModelConfig(path=str(folder), device="cpu"), config, keeps_all=FAMILIES)


class Counting:
    """Notes how many adapters each step of a runner has."""

    def __init__(self, runner: TransformersRunner) -> None:
        self.counts = Counter[tuple[int, bool]]()
        """By number of adapters, and whether other sequences have none."""
        self._execute = runner.execute
        runner.execute = self.execute  # type: ignore[method-assign]

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        slots = {part.adapter for part in step.parts}
        self.counts[len(slots - {0}), 0 in slots] += 1
        return self._execute(step, on_layer_done)


@contextlib.asynccontextmanager
async def looped(runner: TransformersRunner, config: EngineConfig = CONFIG) -> AsyncIterator[EngineLoop]:
    loop = EngineLoop(engine_of(runner, config), 256)
    task = asyncio.create_task(loop.run())
    try:
        yield loop
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    loop.engine.check()
    assert loop.self_check == "ok"


async def answer(loop: EngineLoop, spec: SequenceSpec) -> list[int]:
    tokens = list[int]()
    async with loop.sequence(spec, Purpose.GENERATE) as sequence:
        while True:
            output = await sequence.next()
            if isinstance(output, Generated):
                tokens += output.token_ids
                if output.finish_reason is not None:
                    return tokens


def spec_of(
    name: str, prompt: Sequence[int], adapter: Adapter | None, max_tokens: int = 8, **more: Any
) -> SequenceSpec:
    return sequence_spec(prompt, name, max_tokens=max_tokens, adapter=adapter, **more)


def expected(model: nn.Module, spec: SequenceSpec) -> Any:
    with merged(model, spec.adapter):
        return refer(model, list(spec.token_ids), spec.max_tokens)


@pytest.mark.parametrize("kind", MODELS)
async def test_many_adapters_in_one_batch_answer_as_the_merged_weights(kind: str, tmp_path: Path) -> None:
    """Of several ranks, among sequences without: while they are loaded, and when all are there."""
    save_untied(kind, MODELS[kind], tmp_path / "model")
    reference = load_reference(tmp_path / "model")
    adapters = save_some(tmp_path, reference, NUM_ADAPTERS)
    draw = random.Random(3)
    specs = [
        spec_of(f"{i}", [draw.randrange(VOCAB_SIZE) for _ in range(5 + i % 7)], adapter, 12)
        for i, adapter in enumerate([*adapters, None, None, *adapters[:4]])
    ]
    known = [expected(reference, spec) for spec in specs]
    runner = make_runner_of(tmp_path / "model")
    counting = Counting(runner)
    async with looped(runner) as loop:
        for _ in range(2):
            got = await asyncio.gather(*(answer(loop, spec) for spec in specs))
            assert sum(map(same_up_to_near_ties, got, known)) >= len(specs) - 3
        assert counting.counts[NUM_ADAPTERS, True] > 3, counting.counts
        assert set(loop.load().adapters) == {adapter.digest for adapter in adapters}
        assert loop.load().adapter_load_s > 0
    others = [refer(reference, list(spec.token_ids), 12).tokens for spec in specs]
    assert sum(map(list.__eq__, got, others)) < 10, "the adapters change almost nothing"


async def test_adapters_answer_the_same_after_they_made_room_for_others(tmp_path: Path) -> None:
    save_untied("llama", {}, tmp_path / "model")
    reference = load_reference(tmp_path / "model")
    adapters = save_some(tmp_path, reference, 7)
    config = replace(CONFIG, max_adapters=2)
    specs = [spec_of(f"{i}", prompts()[1], adapters[i % 7]) for i in range(14)]
    known = [expected(reference, spec) for spec in specs]
    async with looped(make_runner_of(tmp_path / "model", config), config) as loop:
        got = await asyncio.gather(*(answer(loop, spec) for spec in specs))
        got += [await answer(loop, spec) for spec in specs]
        assert sum(map(same_up_to_near_ties, got, known * 2)) >= 26
        assert len(loop.load().adapters) == 2


@pytest.mark.parametrize("kind", MODELS)
async def test_the_logits_are_those_of_the_merged_weights(kind: str, tmp_path: Path) -> None:
    """Of prompts in one step with decodes, in chunks, and with drafts."""
    save_untied(kind, MODELS[kind], tmp_path / "model")
    reference = load_reference(tmp_path / "model")
    adapters: list[Adapter | None] = [None, *save_some(tmp_path, reference, 4)]
    runner = make_runner_of(tmp_path / "model")
    for slot, adapter in enumerate(adapters):
        if adapter is not None:
            runner.read_adapter(adapter)(slot)
    logits = dict[int, list[torch.Tensor]]()
    engine = engine_of(runner, CONFIG)
    compute = runner._compute

    def noted(step: RankStep, on_layer_done: OnLayerDone) -> torch.Tensor:
        found = compute(step, on_layer_done)
        for row, index in enumerate(step.sampling):
            logits.setdefault(step.parts[index].sequence_key, []).append(found[row].clone())
        return found

    runner._compute = noted  # type: ignore[method-assign]
    sequences = []
    for i, prompt in enumerate((prompts()[4], prompts()[1], prompts()[2], prompts()[3], prompts()[1])):
        adapter = adapters[i]
        if adapter is not None:
            assert engine.adapters.reserve(adapter.digest) == i
            engine.adapters.loaded(adapter.digest)
            assert engine.adapters.pin(adapter.digest) == i
        sequences.append(engine.add(spec_of(f"{i}", prompt, adapter, 6), Purpose.GENERATE, float(i), i))
        for _ in range(2):
            step, _ = engine.schedule(float(i))
            engine.commit(step, runner.execute(step), float(i))
    kept = [(sequence, list(sequence.token_ids)) for sequence in sequences]
    while step := engine.schedule(9.0)[0]:
        kept = [(sequence, list(sequence.token_ids)) for sequence in sequences]
        engine.commit(step, runner.execute(step), 9.0)
    for slot, (sequence, _) in enumerate(kept):
        with merged(reference, adapters[slot]), torch.no_grad():
            told = reference(torch.tensor([sequence.token_ids])).logits[0]
        begin = sequence.spec.num_prompt_tokens - 1
        assert len(logits[sequence.key]) == 6
        for at, row in enumerate(logits[sequence.key]):
            assert float((row - told[begin + at]).abs().max()) <= 1e-4 * max(1.0, float(told[begin + at].abs().max()))
    engine.check()


async def tokens_over_two_workers(folder: Path, spec: SequenceSpec, config: EngineConfig = CONFIG) -> list[int]:
    """The answer of two workers, one of which computes the prompt."""
    runners: list[Any] = [make_runner_of(folder, config) for _ in range(2)]
    async with (
        engine_worker("prefill", runners[0], SLOTS) as prefill,
        engine_worker("decode", runners[1], SLOTS) as decode,
    ):
        decoding = DecodeService(decode.context).decode(DecodeRequest(spec, await_kv=True), Context())
        ticket = await anext(decoding)
        assert isinstance(ticket, Ticket)
        assert spec.adapter is None or decode.context.engine.load().adapters == (spec.adapter.digest,)
        rest = asyncio.create_task(rest_of(decoding))
        tokens = list[int]()
        async for event in PrefillService(prefill.context).prefill(PrefillRequest(spec, ticket), Context()):
            if isinstance(event, FirstToken):
                assert event.token_id is not None
                tokens.append(event.token_id)
        return tokens + await rest


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
async def test_kv_of_an_adapter_that_comes_from_another_worker_is_continued_with_it(kind: str, tmp_path: Path) -> None:
    save_untied(kind, MODELS[kind], tmp_path / "model")
    reference = load_reference(tmp_path / "model")
    (adapter,) = save_some(tmp_path, reference, 1)
    spec = spec_of("one", prompts()[4], adapter, 12)
    told = expected(reference, spec)
    assert same_up_to_near_ties(await tokens_over_two_workers(tmp_path / "model", spec), told)
    assert told.tokens != refer(reference, prompts()[4], 12).tokens


async def test_a_cached_prefix_belongs_to_its_adapter(tmp_path: Path) -> None:
    save_untied("llama", {}, tmp_path / "model")
    reference = load_reference(tmp_path / "model")
    one, other = save_some(tmp_path, reference, 2)
    prompt = prompts()[3]
    async with looped(make_runner_of(tmp_path / "model")) as loop:
        num_cached = []
        for number, adapter in enumerate((one, one, other, None, None, other)):
            spec = spec_of(f"{number}", prompt, adapter)
            async with loop.sequence(spec, Purpose.GENERATE) as sequence:
                output = await sequence.next()
                assert isinstance(output, Generated)
                assert output.report is not None
                num_cached.append(output.report.num_cached_tokens)
                assert same_up_to_near_ties(list(output.token_ids), replace(expected(reference, spec), tokens=[
                    expected(reference, spec).tokens[0]
                ]))  # fmt: skip
    assert num_cached == [0, 128, 0, 0, 128, 128]


async def test_choices_beams_and_scores_are_of_the_adapter(tmp_path: Path) -> None:
    """Each compared with an engine whose weights are the merged ones."""
    save_untied("llama", {}, tmp_path / "model")
    reference = load_reference(tmp_path / "model")
    (adapter,) = save_some(tmp_path, reference, 1)
    with merged(reference, adapter):
        reference.save_pretrained(tmp_path / "merged")
    prompt = prompts()[1]
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "seed": 3, "choice_index": 1},
        {"use_beam_search": True, "beam_width": 3},
        {"prompt_logprobs": 1, "logprobs": 2},
    ]
    found = []
    for folder, with_adapter in ((tmp_path / "model", adapter), (tmp_path / "merged", None)):
        async with looped(make_runner_of(folder)) as loop:
            got = await asyncio.gather(
                *(full_answer(loop, spec_of("one", prompt, with_adapter, 10, **more)) for more in asked),
            )
            found.append(got)
    for mine, merged_ in zip(*found, strict=True):
        assert mine[0] == merged_[0]
        assert mine[1] == pytest.approx(merged_[1], abs=1e-3)


def test_drafts_are_checked_with_the_adapter(tmp_path: Path) -> None:
    """Of one sequence with an adapter and one without; some guesses are wrong."""
    save_untied("llama", {}, tmp_path / "model")
    reference = load_reference(tmp_path / "model")
    (adapter,) = save_some(tmp_path, reference, 1)
    specs = [spec_of(f"{i}", prompts()[1], each, 40) for i, each in enumerate((adapter, None))]
    known = [expected(reference, spec) for spec in specs]
    runner = make_runner_of(tmp_path / "model")
    engine = engine_of(runner, CONFIG)
    runner.read_adapter(adapter)(1)
    engine.adapters.reserve(adapter.digest)
    engine.adapters.loaded(adapter.digest)
    assert engine.scheduler.drafter is not None
    engine.scheduler.drafter.price = FREE
    sequences = []
    for spec, told in zip(specs, known, strict=True):
        slot = 0 if spec.adapter is None else engine.adapters.pin(adapter.digest)
        assert slot is not None
        sequences.append(engine.add(spec, Purpose.GENERATE, 0.0, slot))
        sequences[-1].ngrams = Known([*spec.token_ids, *told.tokens], 3, vocab_size=VOCAB_SIZE)
    while step := engine.schedule(0.0)[0]:
        engine.commit(step, runner.execute(step), 0.0)
        engine.check()
    assert [sequence.token_ids[17:] for sequence in sequences] == [told.tokens for told in known]
    assert 20 < engine.load().accepted_tokens < engine.load().drafted_tokens


async def full_answer(loop: EngineLoop, spec: SequenceSpec) -> tuple[list[Any], list[float]]:
    """Tokens, or those of all beams; and log probabilities."""
    tokens, scores = list[Any](), list[float]()
    async with loop.sequence(spec, Purpose.GENERATE) as sequence:
        while True:
            output = await sequence.next()
            if not isinstance(output, Generated):
                continue
            tokens += [*output.token_ids, *(beam.token_ids for beam in output.beams)]
            scores += [*output.scores.logprobs, *(beam.logprob for beam in output.beams)]
            if output.report is not None:
                scores += output.report.prompt_scores.logprobs
            if output.finish_reason is not None:
                return tokens, scores


async def test_a_step_that_is_computed_in_halves_keeps_its_adapters(tmp_path: Path) -> None:
    save_untied("llama", {}, tmp_path / "model")
    reference = load_reference(tmp_path / "model")
    adapters = save_some(tmp_path, reference, 3)
    specs = [spec_of(f"{i}", prompts()[i % 5], adapter) for i, adapter in enumerate([*adapters, None, *adapters])]
    known = [expected(reference, spec) for spec in specs]
    runner = make_runner_of(tmp_path / "model")
    compute, num_failed = runner._compute, 0

    def failing(step: RankStep, on_layer_done: OnLayerDone) -> torch.Tensor:
        nonlocal num_failed
        if len(step.parts) > 2:
            num_failed += 1
            raise torch.OutOfMemoryError("in this test")
        return compute(step, on_layer_done)

    runner._compute = failing  # type: ignore[method-assign]
    async with looped(runner) as loop:
        got = await asyncio.gather(*(answer(loop, spec) for spec in specs))
    assert sum(map(same_up_to_near_ties, got, known)) >= 6
    assert num_failed > 3


async def test_a_folder_that_has_changed_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    save_untied("llama", {}, tmp_path / "model")
    reference = load_reference(tmp_path / "model")
    adapters = save_some(tmp_path, reference, 3)
    save_adapter(Path(adapters[0].path), changeable(reference), 4, seed=77)
    (Path(adapters[1].path) / WEIGHTS_FILE).unlink()
    config = replace(CONFIG, max_adapters=1)
    async with looped(make_runner_of(tmp_path / "model", config), config) as loop:
        with pytest.raises(InvalidRequest, match="adapter-0, holds other weights than those that were registered"):
            await answer(loop, spec_of("changed", [1, 2, 3], adapters[0]))
        with pytest.raises(AdapterUnreadable, match="this worker cannot read the folder of adapter adapter-1"):
            await answer(loop, spec_of("lost", [1, 2, 3], adapters[1]))
        assert loop.load().adapters == ()
        spec = spec_of("whole", [1, 2, 3], adapters[2])
        assert same_up_to_near_ties(await answer(loop, spec), expected(reference, spec))


async def test_what_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    save_untied("llama", {}, tmp_path / "model")
    q_proj = "model.layers.0.self_attn.q_proj"
    cases: list[tuple[Shapes, int, str]] = [
        ({q_proj: (64, 32)}, 4, "is of another model: its .*q_proj maps 64 to 32 numbers, and this model's 64 to 64"),
        ({"model.layers.9.self_attn.q_proj": (64, 64)}, 4, "changes model.layers.9.self_attn.q_proj, which is no"),
        ({"model.layers.0.input_layernorm": (64, 64)}, 4, "changes model.layers.0.input_layernorm, which is no"),
        ({q_proj: (64, 64)}, 65, "has rank 65, and engine.max_adapter_rank is 64"),
    ]
    runner = make_runner_of(tmp_path / "model")
    assert runner.rank.adapters is not None
    assert runner.rank.adapters._stacks.keys() == changeable(load_reference(tmp_path / "model")).keys()
    async with looped(runner) as loop:
        for number, (shapes, rank, sentence) in enumerate(cases):
            adapter = save_adapter(tmp_path / f"{number}", shapes, rank)
            with pytest.raises(InvalidRequest, match=sentence):
                await loop.check_adapter(adapter.path)
            with pytest.raises(InvalidRequest, match=sentence):
                await answer(loop, spec_of("one", [1, 2], adapter))
        with pytest.raises(InvalidRequest, match=r"cannot read the adapter in .*is not a folder"):
            await loop.check_adapter(str(tmp_path / "none"))
        whole = save_adapter(tmp_path / "whole", {q_proj: (64, 64)})
        facts = await loop.check_adapter(whole.path)
        assert (facts.digest, facts.rank, loop.max_adapters) == (whole.digest, 4, NUM_ADAPTERS)
        assert loop.load().adapters == ()
        spoiled = save_spoiled(tmp_path / "spoiled", q_proj)
        with pytest.raises(InvalidRequest, match="are no finite numbers"):
            await answer(loop, spec_of("one", [1, 2], spoiled))


def save_spoiled(folder: Path, module: str) -> Adapter:
    save_adapter(folder, {module: (64, 64)})
    tensors = safetensors.torch.load_file(folder / WEIGHTS_FILE)
    next(iter(tensors.values()))[0, 0] = float("nan")
    safetensors.torch.save_file(tensors, folder / WEIGHTS_FILE)
    return registered(folder)


async def test_a_worker_without_slots_refuses_adapters(tmp_path: Path) -> None:
    save_untied("llama", {}, tmp_path / "model")
    adapter = save_adapter(tmp_path / "one")
    runner = make_runner_of(tmp_path / "model", ENGINE)
    assert runner.rank.adapters is None
    async with looped(runner, ENGINE) as loop:
        for asking in (loop.check_adapter(adapter.path), answer(loop, spec_of("one", [1], adapter))):
            with pytest.raises(Unsupported, match=r"holds no adapters; set engine\.max_adapters"):
                await asking


def test_settings_that_adapters_exclude_are_refused_by_name(tmp_path: Path) -> None:
    for settings, sentence in (
        ({"batch_invariant": True}, r"engine\.batch_invariant cannot be kept with engine\.max_adapters 2"),
        ({"runner": "native"}, r"engine\.runner native computes no adapters, and engine\.max_adapters is 2"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            EngineConfig(max_adapters=2, **settings)
    with pytest.raises(ConfigError, match=r"engine\.max_adapters 2 is not supported with model\.weights fp8"):
        TransformersRunner(ModelConfig(path=str(tmp_path), weights="fp8"), EngineConfig(max_adapters=2))


def test_a_worker_with_adapters_runs_on_transformers_and_says_so(tmp_path: Path) -> None:
    save_untied("llama", {}, tmp_path / "model")
    runner = make_runner(ModelConfig(path=str(tmp_path / "model"), device="cpu"), CONFIG, tmp_path / "cache")
    assert runner.name == "transformers"
    assert isinstance(runner.computes, Computes)
    (said,) = [each for each in runner.computes.fallbacks if "native" in str(each)]
    assert "engine.max_adapters is 32, and the native step computes no adapters" in str(said)


@pytest.mark.parametrize(
    "kind",
    ["llama", "olmo2", *[pytest.param(kind, marks=pytest.mark.full) for kind in ("qwen3_moe", "phi3", "deepseek_v2")]],
)
async def test_ranks_divide_adapters_as_their_maps(kind: str, tmp_path: Path) -> None:
    """Each rank has the whole attention of olmo2 and phi3, although their weights are divided."""
    save_untied(kind, OF_RANKS.get(kind, {}), tmp_path / "model")
    reference = load_reference(tmp_path / "model")
    adapters = save_some(tmp_path, reference, 4)
    specs = [spec_of(f"{i}", prompts()[i % 5], adapter) for i, adapter in enumerate([*adapters, None, *adapters])]
    known = [expected(reference, spec) for spec in specs]
    config = replace(CONFIG, max_adapters=3, tensor_parallel=2)
    runner = make_runner_of(tmp_path / "model", config)
    try:
        async with looped(runner, config) as loop:
            got = await asyncio.gather(*(answer(loop, spec) for spec in specs))
            assert sum(map(same_up_to_near_ties, got, known)) >= 8
    finally:
        runner.close()


def test_rows_of_one_adapter_lie_next_to_each_other() -> None:
    class Part:
        def __init__(self, count: int, adapter: int) -> None:
            self.token_ids, self.num_drafts, self.adapter = (0,) * count, 0, adapter

    parts: Any = [Part(1, 2), Part(5, 3), Part(1, 0), Part(1, 1), Part(1, 2)]
    assert [parts[i].adapter for i in order_for_packing(parts)] == [3, 0, 1, 2, 2]


class NoGraphs:
    """Stands for a rank's graphs, and notes which steps it was given."""

    def __init__(self) -> None:
        self.num_slots = list[set[int]]()

    def compute(self, step: RankStep, *_: Any) -> None:
        self.num_slots.append({part.adapter for part in step.parts})


async def test_only_steps_without_adapters_are_graphs(tmp_path: Path) -> None:
    save_untied("llama", {}, tmp_path / "model")
    adapter = save_adapter(tmp_path / "one", {"model.layers.0.self_attn.q_proj": (64, 64)})
    runner = make_runner_of(tmp_path / "model")
    runner.rank._graphs = graphs = NoGraphs()  # type: ignore[assignment]
    async with looped(runner) as loop:
        await asyncio.gather(*(answer(loop, spec_of(f"{i}", [1, 2], each)) for i, each in enumerate((None, adapter))))
        await answer(loop, spec_of("later", [1, 2], None))
    assert graphs.num_slots.count({0}) >= 8
    assert graphs.num_slots.count({0}) == len(graphs.num_slots)

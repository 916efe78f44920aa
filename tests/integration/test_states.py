"""Models with recurrent layers answer as `generate`: their states are in rows of the KV cache.

A row is never changed by the step that reads it. So these steps fail anywhere, are computed again in halves, and the
answers are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from baton.blocks import num_blocks_for
from baton.config import EngineConfig, ModelConfig
from baton.errors import ConfigError, ModelLoadError
from baton.sampling import SamplingParams
from engine.core.beams import BeamSearch
from engine.core.runner import EMPTY_PLACE, BlockTables, NotedLayers, OnLayerDone, StepInput, StepPart, ignore_layer
from engine.model import self_check
from engine.model.asking import ask
from engine.model.rank_step import RankStep
from engine.model.recurrent import Wanted, passes_of
from engine.model.transformers_runner import TransformersRunner
from tests.integration import test_beams
from tests.integration.test_engine_models import (
    Reference,
    answers,
    load_reference,
    make_engine,
    make_spec,
    refer,
    same_up_to_near_ties,
    tokens_of,
)
from tests.integration.test_families import prompts, save_untied, transferred
from tests.support.builders import sequence_spec
from tests.support.families import RECURRENT, WHOLE_PROMPTS
from tests.support.guessing import run

pytestmark = pytest.mark.integration

OFTEN = ("falcon_h1", "lfm2", "mamba2", "nemotron_h", "qwen3_next")
"""States and KV in one layer, convolutions alone, no KV, layers without either, and states that layers return."""
TYPES = [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.full) for kind in RECURRENT]
WHOLE = ["jamba", *(pytest.param(kind, marks=pytest.mark.full) for kind in WHOLE_PROMPTS if kind != "jamba")]
AGAIN = ("falcon_h1", "mamba2", "qwen3_next")
TRANSFERRED = [kind if kind in AGAIN else pytest.param(kind, marks=pytest.mark.full) for kind in RECURRENT]
ENGINE = EngineConfig(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=48, max_model_len=512)
LARGE = replace(ENGINE, max_num_batched_tokens=256)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def saved(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        save_untied(kind, (RECURRENT | WHOLE_PROMPTS)[kind], folder)
        return folder

    return saved


def runner_of(folder: Path, engine: EngineConfig = ENGINE) -> TransformersRunner:
    return TransformersRunner(ModelConfig(path=str(folder), device="cpu"), engine)


@dataclass
class Kept:
    """A sequence with blocks and two rows of its own, which take turns."""

    key: int
    tokens: list[int]
    num_prompt_tokens: int
    num_computed: int = 0
    num_steps: int = 0

    def tables(self, runner: TransformersRunner, end: int) -> BlockTables:
        each = runner.num_blocks[0] // 8
        sizes = [num_blocks_for(end, group.block_size) for group in runner.spec.groups]
        blocks = [tuple(range(self.key * each, self.key * each + size)) for size in sizes]
        read, write = (2 * self.key + (self.num_steps + 1) % 2, 2 * self.key + self.num_steps % 2)
        return (*blocks, (read if self.num_computed else EMPTY_PLACE, write))

    def part(self, runner: TransformersRunner, most: int) -> StepPart:
        begin, end = self.num_computed, min(len(self.tokens), self.num_computed + most)
        return StepPart(
            sequence_key=self.key,
            token_ids=tuple(self.tokens[begin:end]),
            num_computed_tokens=begin,
            block_ids=self.tables(runner, end),
            num_kv_tokens=(end,) * runner.spec.num_tables,
            sample=end == len(self.tokens),
            is_decoding=end == len(self.tokens) > self.num_prompt_tokens,
            sampling=SamplingParams(temperature=0.0),
            choice_index=0,
            num_prompt_tokens=self.num_prompt_tokens,
        )


@dataclass
class Driver:
    """Computes sequences in mixed steps of at most `chunk` tokens of each."""

    runner: TransformersRunner
    chunk: int
    running: list[Kept] = field(default_factory=list)

    def step(self, on_layer_done: OnLayerDone = ignore_layer) -> None:
        parts = [each.part(self.runner, self.chunk) for each in self.running]
        output = self.runner.execute(StepInput(tuple(parts)), on_layer_done)
        for each, part, sampled in zip(self.running, parts, output.sampled_token_ids, strict=True):
            each.num_computed, each.num_steps = part.end, each.num_steps + 1
            each.tokens += sampled

    def answers(self, asked: list[list[int]]) -> list[list[int]]:
        """The answers to prompts, one of which arrives with each step."""
        waiting, done = [Kept(key, list(p), len(p)) for key, p in enumerate(asked)], list[Kept]()
        while waiting or self.running:
            self.running += waiting[:1]
            del waiting[:1]
            self.step()
            done += [each for each in self.running if len(each.tokens) == each.num_prompt_tokens + NUM_TOKENS]
            self.running = [each for each in self.running if each not in done]
        return [each.tokens[each.num_prompt_tokens :] for each in sorted(done, key=lambda each: each.key)]


def num_as_generate(runner: TransformersRunner, folder: Path, chunk: int = 48) -> int:
    reference = load_reference(folder)
    expected = [refer(reference, prompt, NUM_TOKENS) for prompt in prompts()]
    assert len(set(expected[3].tokens)) >= 6, "an answer of one token is no test"
    return sum(map(same_up_to_near_ties, Driver(runner, chunk).answers(prompts()), expected))


@pytest.mark.parametrize("kind", TYPES)
def test_a_mixed_batch_answers_as_generate(kind: str, folder_of: Callable[[str], Path]) -> None:
    runner = runner_of(folder_of(kind))
    assert not runner.spec.whole_prompts
    assert num_as_generate(runner, folder_of(kind)) >= 4


@pytest.mark.parametrize("kind", WHOLE)
def test_a_model_that_loses_its_states_between_chunks_computes_whole_prompts(
    kind: str, folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    runner = runner_of(folder_of(kind), LARGE)
    assert runner.spec.whole_prompts
    assert runner.cache.spec is runner.spec
    assert runner.max_model_len == 256 - 8 + 1
    assert "prompts are computed whole" in caplog.text
    assert num_as_generate(runner, folder_of(kind), chunk=256) >= 4


# -- steps that fail ---------------------------------------------------------------------------------------------------


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory")


@dataclass
class Failing:
    """Fails at some of its calls, as a full device does."""

    at: tuple[int, ...]
    num_calls: int = 0

    def call(self, *_: Any) -> None:
        self.num_calls += 1
        if self.num_calls in self.at:
            raise out_of_memory()


class FailingScatter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fails when states are written; each pass writes the states of each kind."""

    def __init__(self, failing: Failing) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.failing = failing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_copy_.default:
            self.failing.call()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("where", ["layer", "scatter", "sampler"])
@pytest.mark.parametrize("kind", AGAIN)
def test_a_step_that_fails_anywhere_and_is_computed_again_gives_the_same(
    kind: str, where: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Driver(runner_of(folder_of(kind)), 48).answers(prompts())
    runner = runner_of(folder_of(kind))
    failing = Failing({"layer": (7, 18, 26), "scatter": (4, 9, 22, 35), "sampler": (3, 9)}[where])
    if where == "layer":
        layers = next(m for m in runner.rank.model.modules() if isinstance(m, torch.nn.ModuleList))
        layers[-1].register_forward_pre_hook(failing.call)
    if where == "sampler":
        sample = runner._sampler.sample_and_score

        def sampled(*given: Any) -> Any:
            failing.call()
            return sample(*given)

        monkeypatch.setattr(runner._sampler, "sample_and_score", sampled)
    if where == "scatter":
        with FailingScatter(failing):
            found = Driver(runner, 48).answers(prompts())
    else:
        found = Driver(runner, 48).answers(prompts())
    assert failing.num_calls > max(failing.at), "every failure has happened"
    assert found == expected


def test_a_step_changes_no_row_that_it_reads(folder_of: Callable[[str], Path]) -> None:
    """Two sequences continue from the same row, as choices that fork do."""
    runner = runner_of(folder_of("qwen3_next"))
    driver = Driver(runner, 48, [Kept(0, prompts()[1], 17)])
    driver.step()
    first = driver.running[0]
    before = {name: state.clone() for name, state in runner.cache.states.items()}
    read, write = first.tables(runner, 18)[-1]
    assert (read, write) == (0, 1)
    part = first.part(runner, 48)
    other = part._replace(sequence_key=1, block_ids=(*first.tables(runner, 18)[:-1], (0, 5)))
    output = runner.execute(StepInput((part, other)))
    assert output.sampled_token_ids[0] == output.sampled_token_ids[1]
    for name, state in runner.cache.states.items():
        assert state[0].equal(before[name][0]), "read"
        torch.testing.assert_close(state[1], state[5], rtol=1e-4, atol=1e-4)  # rows of one batch may round differently
        assert not state[1].equal(before[name][1])
        assert not state[2:5].any(), "not in the step"


def test_what_is_in_a_row_that_a_new_sequence_takes_does_not_matter(folder_of: Callable[[str], Path]) -> None:
    clean, spoiled = (runner_of(folder_of("falcon_h1")) for _ in range(2))
    for tensor in (*spoiled.cache.groups, *spoiled.cache.states.values()):
        tensor.fill_(float("nan"))
    assert Driver(spoiled, 48).answers(prompts()) == Driver(clean, 48).answers(prompts())


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations on whole tensors of states."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = dict.fromkeys(names, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.__name__.partition(".")[0]) in self.counts:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_next"])
def test_a_decode_step_gathers_and_scatters_each_kind_once(kind: str, tmp_path: Path) -> None:
    """Not for each of 24 layers."""
    extra = RECURRENT[kind] | {"num_hidden_layers": 24}
    if "layer_types" in extra:
        extra["layer_types"] = extra["layer_types"] * 6
    save_untied(kind, extra, tmp_path)
    runner = runner_of(tmp_path)
    assert runner.spec.states[0].shape[0] >= 12
    driver = Driver(runner, 48, [Kept(key, prompt, len(prompt)) for key, prompt in enumerate(prompts()[:3])])
    driver.step()
    counted = Counted(("index_copy_", "stack"))
    reads = list[torch.Tensor]()
    select = torch.Tensor.index_select

    def noted(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        reads.append(tensor)
        return select(tensor, *args)

    with pytest.MonkeyPatch.context() as patch, counted:
        patch.setattr(torch.Tensor, "index_select", noted)
        driver.step()
    states = list(runner.cache.states.values())
    assert sum(any(read is state for state in states) for read in reads) == 2
    assert counted.counts["index_copy_"] == 2
    assert counted.counts["stack"] == (kind == "qwen3_next"), "of states that layers return"


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_an_engine_continues_from_snapshots_and_answers_as_generate(
    kind: str, folder_of: Callable[[str], Path]
) -> None:
    reference, engine = load_reference(folder_of(kind)), make_engine(folder_of(kind), ENGINE)
    expected = [refer(reference, prompt, NUM_TOKENS) for prompt in prompts()]
    specs = [make_spec(f"first-{i}", prompt, NUM_TOKENS, ignore_eos=True) for i, prompt in enumerate(prompts())]
    found, _ = answers(engine, specs, steps_between=2)
    num_same = sum(map(same_up_to_near_ties, found, expected))
    again = [prompt + reference.tokens[:10] for prompt, reference in zip(prompts(), expected, strict=True)]
    specs = [make_spec(f"again-{i}", prompt, 2, ignore_eos=True) for i, prompt in enumerate(again)]
    found, sequences = answers(engine, specs, steps_between=0)
    tails = [Reference(each.tokens[10:], each.margins[10:]) for each in expected]
    assert num_same + sum(map(same_up_to_near_ties, found, tails)) >= 8
    assert [sequence.num_cached_tokens for sequence in sequences[3:]] == [128, 64]


@pytest.mark.parametrize("kind", ["falcon_h1", "mamba2", "qwen3_next", "jamba"])
def test_steps_planned_ahead_and_preemption_change_nothing(kind: str, folder_of: Callable[[str], Path]) -> None:
    reference, large = load_reference(folder_of(kind)), LARGE if kind == "jamba" else ENGINE
    specs = [make_spec(f"{i}", prompt, 12, ignore_eos=True) for i, prompt in enumerate(prompts())]
    found, num_ahead = tokens_of(make_engine(folder_of(kind), large), specs, ahead=True)
    expected = [refer(reference, prompt, 12) for prompt in prompts()]
    assert sum(map(same_up_to_near_ties, found, expected)) >= 4
    assert num_ahead > 0
    engine = make_engine(folder_of(kind), replace(large, num_blocks=14, snapshot_tokens=16))  # rows for all of them
    many = [[*prompts()[1][:16], number] for number in range(6)]
    found, _ = answers(engine, [make_spec(f"{i}", each, 40, ignore_eos=True) for i, each in enumerate(many)], 0)
    assert sum(same_up_to_near_ties(f, refer(reference, p, 40)) for f, p in zip(found, many, strict=True)) >= 4
    assert engine.load().preemptions > 0


@pytest.mark.parametrize("kind", AGAIN)
def test_choices_and_beams_share_states(kind: str, folder_of: Callable[[str], Path]) -> None:
    reference, asked = load_reference(folder_of(kind)), prompts()[2:4]
    wide = replace(ENGINE, max_num_seqs=12)
    values: list[dict[str, Any]] = [{"choice_index": choice, "temperature": 0.8, "seed": 3} for choice in range(3)]
    specs = [sequence_spec(asked[0], "choices", max_tokens=12, **each) for each in values]
    apart = [answers(make_engine(folder_of(kind), wide), [spec], 0)[0][0] for spec in specs]
    together, _ = run(make_engine(folder_of(kind), wide), specs)
    assert [one.token_ids for one in together] == apart
    assert len({tuple(each) for each in apart}) > 1
    engine = make_engine(folder_of(kind), wide)
    specs = [test_beams.spec_of(f"{i}", prompt, beam_width=3) for i, prompt in enumerate(asked)]
    num_different = 0
    for spec, prompt, found in zip(specs, asked, test_beams.searched(engine, specs), strict=True):
        search = BeamSearch.of(spec, engine.runner.eos_token_ids, engine.runner.max_model_len)
        num_different += test_beams.num_near_ties(search, found, test_beams.refer(reference, prompt, 3, 1.0))
    assert num_different <= 1


@pytest.mark.parametrize("kind", TRANSFERRED)
async def test_blocks_and_one_row_are_enough_for_another_worker(kind: str, folder_of: Callable[[str], Path]) -> None:
    reference, prompt = load_reference(folder_of(kind)), prompts()[4]
    tokens, num_bytes, spec = await transferred(folder_of(kind), make_spec("one", prompt, 12, ignore_eos=True), ENGINE)
    assert same_up_to_near_ties(tokens, refer(reference, prompt, 12))
    assert num_bytes == 4 * spec.block_bytes + spec.state_bytes


# -- everything else ---------------------------------------------------------------------------------------------------


def test_layers_are_reported_once_and_in_order_when_all_tokens_are_there(folder_of: Callable[[str], Path]) -> None:
    runner = runner_of(folder_of("falcon_h1"))
    driver = Driver(runner, 48, [Kept(key, prompt, len(prompt)) for key, prompt in enumerate(prompts()[1:4])])
    layers = list[int]()
    for _ in range(3):
        done = list[int]()
        noted = NotedLayers(lambda layer, _, done=done: done.append(layer))  # type: ignore[misc]
        driver.step(noted.report)
        assert done == [0, 1, 2, 3]
        layers += done
    assert len(layers) == 12


def test_rows_of_logits_are_in_the_order_of_the_step() -> None:
    """First those of tokens that are sampled, then those of scored prompts, whichever pass computes them."""

    def part(num_tokens: int, num_computed: int) -> StepPart:
        sequence = Kept(0, [0] * (num_tokens + num_computed), num_tokens, num_computed)
        read = 1 if num_computed else EMPTY_PLACE
        tables: BlockTables = ((), (read, 0))
        return StepPart(
            sequence_key=0, token_ids=tuple(sequence.tokens[num_computed:]), num_computed_tokens=num_computed,
            block_ids=tables, num_kv_tokens=(), sample=True, is_decoding=False, sampling=SamplingParams(),
            choice_index=0, num_prompt_tokens=num_tokens,
        )  # fmt: skip

    parts = [part(3, 0), part(4, 8), part(1, 0), part(1, 5), part(1, 6)]
    passes = list(passes_of(parts))
    assert [(each.begin, each.end, each.is_stacked) for each in passes] == [
        (0, 3, False),
        (3, 7, False),
        (7, 8, False),
        (8, 10, True),
    ]
    wanted = Wanted.of(RankStep(parts, [0, 3, 4], num_scored=[2, 3, 0, 0, 0]), passes)
    tokens = torch.arange(10)[:, None]
    found = [tokens[each.begin : each.end][rows or [0]] for each, rows in zip(passes, wanted.rows, strict=True)]
    assert wanted.joined(found).flatten().tolist() == [2, 8, 9, 0, 1, 3, 4, 5]
    none = Wanted.of(RankStep(parts, []), passes)
    assert len(none.joined([row[:1] for row in found])) == 1


@pytest.mark.parametrize("kind", AGAIN)
def test_scores_of_prompts_are_those_of_the_model(kind: str, folder_of: Callable[[str], Path]) -> None:
    reference, tokens = load_reference(folder_of(kind)), prompts()[3][:50]
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    rank = runner_of(folder_of(kind)).rank
    steps = self_check.steps(tokens, rank.cache.spec)
    found = torch.cat([rank.compute(step, ignore_layer) for step in steps])
    assert float((found.log_softmax(-1) - expected).abs().max()) < 3e-4


def test_pages_of_another_type_do_not_change_the_states(folder_of: Callable[[str], Path]) -> None:
    runner = runner_of(folder_of("qwen3_next"), replace(ENGINE, kv_dtype="bfloat16"))
    assert runner.spec.groups[0].dtype == "bfloat16"
    assert {state.dtype for state in runner.spec.states} == {"float32"}
    assert all(len(answer) == NUM_TOKENS for answer in Driver(runner, 48).answers(prompts()))


def test_recurrent_states_keep_the_type_that_the_model_wants(folder_of: Callable[[str], Path]) -> None:
    from transformers import AutoConfig

    shape = ask(AutoConfig.from_pretrained(folder_of("qwen3_next"), trust_remote_code=False)).shape
    spec = shape.cache_spec(16, "bfloat16", 1, "bfloat16")
    assert [(state.name, state.dtype) for state in spec.states] == [("conv", "bfloat16"), ("recurrent", "float32")]


def test_a_model_of_full_size_names_its_states() -> None:
    from transformers import AutoConfig

    spec = ask(AutoConfig.for_model("qwen3_next")).shape.cache_spec(16, "bfloat16", 1, "bfloat16")
    assert spec.block_bytes == 16 * 24_576
    assert [(state.name, state.shape) for state in spec.states] == [
        ("conv", (36, 8192, 4)),
        ("recurrent", (36, 32, 128, 128)),
    ]
    assert spec.state_bytes == 36 * (8192 * 4 * 2 + 32 * 128 * 128 * 4)


def test_a_pool_that_is_too_small_names_the_bytes_of_a_row(folder_of: Callable[[str], Path]) -> None:
    small = replace(ENGINE, num_blocks=0, kv_cache_gib=1e-7)
    with pytest.raises(ModelLoadError, match=r"a block is 8192 bytes, and a sequence's states are 12288\); raise"):
        runner_of(folder_of("qwen3_next"), small)


def test_states_count_in_the_pool(folder_of: Callable[[str], Path]) -> None:
    runner = runner_of(folder_of("qwen3_next"), replace(ENGINE, num_blocks=0, kv_cache_gib=0.001))
    tensors = (*runner.cache.groups, *runner.cache.states.values())
    assert 0.8 * 2**30 / 1000 < sum(tensor.nbytes for tensor in tensors) <= 2**30 / 1000


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"attention": "flashinfer"}, "engine.attention flashinfer is not supported for models with recurrent layers"),
        ({"batch_invariant": True}, "engine.batch_invariant"),
    ],
)
def test_settings_that_recurrent_layers_do_not_support_are_refused(
    values: dict[str, Any], sentence: str, folder_of: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        runner_of(folder_of("qwen3_next"), replace(ENGINE, **values))


@pytest.mark.first
def test_two_ranks_keep_the_whole_states_and_answer_as_generate(folder_of: Callable[[str], Path]) -> None:
    one, folder = runner_of(folder_of("qwen3_next")), folder_of("qwen3_next")
    two = runner_of(folder, replace(ENGINE, tensor_parallel=2))
    try:
        assert two.spec.states == one.spec.states
        assert two.spec.block_bytes == one.spec.block_bytes // 2
        assert num_as_generate(two, folder) >= 4
        kept = [runner.cache.states for runner in (one, two)]
        Driver(one, 48).answers(prompts())
        for name in kept[0]:
            assert torch.allclose(kept[0][name], kept[1][name], atol=1e-3)
            assert two.caches[1].states[name].equal(kept[1][name])
    finally:
        two.close()


def test_a_type_without_a_plan_is_refused_for_several_ranks(folder_of: Callable[[str], Path]) -> None:
    with pytest.raises(ModelLoadError, match="no plan to divide a model of type 'falcon_h1' among ranks"):
        runner_of(folder_of("falcon_h1"), replace(ENGINE, tensor_parallel=2))


def test_what_is_slower_is_said(folder_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    runner_of(folder_of("qwen3_next"))
    assert "layers are computed by transformers' own modules: the model has recurrent layers" in caplog.text

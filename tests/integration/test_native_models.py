"""`NativeRunner` answers as transformers' own `generate`; its logits are the same bits however they are computed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import EngineConfig, ModelConfig, load
from baton.errors import ConfigError, NotNative
from deploy.models import cache_dir
from engine.core.engine import Engine
from engine.core.runner import EMPTY_PLACE, Fence, OnLayerDone, StepInput, StepOutput, StepPart, ignore_layer
from engine.core.sequence import Purpose
from engine.model.kv_cache import KVCache
from engine.model.logits_runner import NO_SAMPLING, LogitsRunner
from engine.model.rank_step import RankStep
from engine.model.transformers_model import load_config
from engine.model.transformers_runner import TransformersRunner
from engine.native import build, quantized
from engine.native.runner import NativeRunner
from engine.native.spec import FAMILIES, describe
from engine.native.weights import Form, PackedWeights
from engine.runners import make_runner
from tests.integration.test_engine_models import (
    ALTERNATING,
    ENGINE,
    EXTRAS,
    VOCAB_SIZE,
    WINDOW,
    WINDOWED,
    answers,
    drafted_and_plain,
    edit_config,
    edit_weights,
    engine_of,
    fork_and_compare,
    load_reference,
    make_engine,
    make_spec,
    num_as_generate,
    often_on_one,
    refer,
    rows_of,
    same_up_to_near_ties,
    save_tiny,
    tokens_of,
)
from tests.support.builders import sequence_spec
from tests.unit.engine.native.test_weights import of_form

pytestmark = pytest.mark.integration
CASES = [
    *[pytest.param(kind, EXTRAS.get(kind, {}), id=kind) for kind in FAMILIES],
    *[pytest.param(k, EXTRAS.get(k, {}) | extra, id=f"{k}-window") for k, extra in WINDOWED.items() if k in FAMILIES],
    pytest.param("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}, id="llama-biases"),
    pytest.param("qwen3", {"head_dim": 64, "intermediate_size": 80, "vocab_size": 521}, id="qwen3-uneven"),
    pytest.param(
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        id="phi3-half-rotated",
    ),
    pytest.param(
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        id="llama-scaled-rope",
    ),
    pytest.param("ernie4_5", {"head_dim": 32, "use_bias": True}, id="ernie4_5-biases"),
    pytest.param("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, id="exaone4-no-window"),
    pytest.param("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1}, id="mixtral-one-of-five"),
    pytest.param("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}, id="mixtral-all-of-three"),
    pytest.param(
        "qwen3_moe",
        EXTRAS["qwen3_moe"]
        | {
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 40,
            "num_experts": 40,
            "num_local_experts": 40,
        },
        id="qwen3_moe-one-dense",
    ),
    pytest.param("qwen3_moe", EXTRAS["qwen3_moe"] | {"decoder_sparse_step": 2}, id="qwen3_moe-every-other"),
]


def native_runner(folder: Path, config: EngineConfig = ENGINE, weights: str = "exact") -> NativeRunner:
    model = ModelConfig(path=str(folder), device="cpu", weights=weights)
    return NativeRunner(model, config, cache_dir(load().cluster) / "native")


def native_engine(folder: Path, config: EngineConfig = ENGINE) -> Engine:
    return engine_of(native_runner(folder, config), config)


@pytest.mark.parametrize(("kind", "extra"), often_on_one(CASES, 0))
def test_a_tiny_model_of_each_type_answers_as_generate(kind: str, extra: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(kind, extra, tmp_path)
    num_same = num_as_generate(native_engine(tmp_path), load_reference(tmp_path))
    print(f"{kind}: {num_same} of 10 answers equal to the last token")
    assert num_same >= 8, "too many near ties for a test that means something"


@pytest.mark.parametrize("kind", ["cohere", "ernie4_5", "mixtral", "olmoe", "qwen3_moe"])
def test_tokens_that_are_drawn_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    save_tiny(kind, EXTRAS.get(kind, {}), tmp_path)
    draw = random.Random(9)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 33, 70, 9)]
    specs = [
        sequence_spec(prompt, f"{i}", max_tokens=16, ignore_eos=True, temperature=1.0, top_p=0.95, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    ours, _ = answers(native_engine(tmp_path), specs, steps_between=1)
    theirs, _ = answers(make_engine(tmp_path), specs, steps_between=1)
    assert ours == theirs


# -- bits --------------------------------------------------------------------------------------------------------------

UNEVEN = {"head_dim": 64, "hidden_size": 96, "num_attention_heads": 6, **ALTERNATING}
"""Three heads share a KV head, layers with and without a window take turns."""


def part_of(prompt: list[int], begin: int, end: int, table: list[int]) -> StepPart:
    return StepPart(
        sequence_key=0,
        token_ids=tuple(prompt[begin:end]),
        num_computed_tokens=begin,
        block_ids=(tuple(table),),
        num_kv_tokens=(end,),
        sample=True,
        is_decoding=False,
        sampling=NO_SAMPLING,
        choice_index=0,
        num_prompt_tokens=len(prompt),
    )


def spoil(cache: KVCache) -> None:
    """Fills pages with what is no number: bits that are all set, in floats and in the scales of codes."""
    for group in cache.groups:
        group.view(torch.uint8).fill_(0xFF)


def all_logits(runner: LogitsRunner, prompts: list[list[int]], draw: random.Random, most: int) -> list[torch.Tensor]:
    """The logits of every token of every prompt, computed in random chunks of at most `most`, random ones together."""
    blocks = list(range(runner.num_blocks[0]))
    draw.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-len(prompt) // 16))] for prompt in prompts]
    spoil(runner.caches[0])
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while unfinished := [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]:
        chosen = draw.sample(unfinished, draw.randint(1, len(unfinished)))
        ends: dict[int, int] = {}
        left = ENGINE.batch(on_gpu=False).max_num_batched_tokens
        for i in chosen:
            ends[i] = min(done[i] + draw.randint(1, min(most, left - len(chosen) + len(ends) + 1)), len(prompts[i]))
            left -= ends[i] - done[i]
        chosen.sort(key=lambda i: ends[i] - done[i] == 1)  # the order of `order_for_packing`
        parts = [part_of(prompts[i], done[i], ends[i], tables[i]) for i in chosen]
        step = RankStep(parts, range(len(parts)), (), [len(part.token_ids) - 1 for part in parts])
        logits = runner._compute(step, ignore_layer).clone()
        lasts, firsts = logits[: len(parts)], logits[len(parts) :]
        for i, last in zip(chosen, lasts, strict=True):
            num_first = ends[i] - done[i] - 1
            found[i] += [*firsts[:num_first], last]
            firsts, done[i] = firsts[num_first:], ends[i]
    return [torch.stack(rows) for rows in found]


def same_bits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    save_tiny("qwen3", UNEVEN, folder)
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts in three layers of four, wider than what the router's panel needs, and narrower than the perceptron."""
    folder = tmp_path_factory.mktemp("mixed")
    experts = {"num_experts": 40, "num_local_experts": 40, "num_experts_per_tok": 3, "mlp_only_layers": [2]}
    save_tiny("qwen3_moe", {"head_dim": 32, "moe_intermediate_size": 80, **experts}, folder)
    return folder


@pytest.fixture(params=["uneven", "mixed"])
def either(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.getfixturevalue(request.param)
    return folder


def test_logits_are_the_same_bits_in_any_batch_chunk_and_number_of_threads(either: Path) -> None:
    draw = random.Random(21)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 150, 33, 64, 7)]
    runner = native_runner(either)
    alone = [all_logits(runner, [prompt], draw, 1)[0] for prompt in prompts]
    for most in (1, 3, 40, 48):
        assert same_bits(all_logits(runner, prompts, draw, most), alone), f"chunks of up to {most}"
    runner.close()
    two = native_runner(either, replace(ENGINE, num_threads=2))
    for most in (2, 48, 150):  # the last ones' rows are divided between the threads
        assert same_bits(all_logits(two, prompts, draw, most), alone), f"two threads, chunks of up to {most}"
    two.close()
    plain = TransformersRunner(ModelConfig(path=str(either), device="cpu"), ENGINE, keeps_all=FAMILIES)
    theirs = all_logits(plain, prompts, draw, 48)
    for ours, reference in zip(alone, theirs, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-3)
    assert not same_bits(theirs, alone), "or nothing was compared"


@pytest.mark.parametrize("either", ["uneven", pytest.param("mixed", marks=pytest.mark.full)], indirect=True)
def test_logits_are_the_same_bits_on_every_variant(either: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(22)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (100, 1, 30)]
    best = build.variant_of(build.cpu_flags())
    found = []
    for variant in build.VARIANTS:
        if build.VARIANTS[variant] <= build.cpu_flags():
            monkeypatch.setattr(build, "variant_of", lambda flags, variant=variant: variant)
            runner = native_runner(either)
            found += [all_logits(runner, prompts, draw, most) for most in (1, 48)]
            runner.close()
    worse = list(build.VARIANTS)[list(build.VARIANTS).index(best) :]
    assert len(found) == 2 * len(worse), "a CPU that runs a variant runs all that come after it"
    assert all(same_bits(one, found[0]) for one in found)


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that holds codes: Q4_1 in the perceptron, Q8_0 in attention and head."""
    folder = tmp_path_factory.mktemp("coded")
    save_tiny("llama", {}, folder)

    def to_codes(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if ".mlp." in name:
                weight.copy_(of_form(Form.Q4_1, weight))
            elif "self_attn" in name or name in ("lm_head.weight", "model.embed_tokens.weight"):
                weight.copy_(of_form(Form.Q8_0, weight))

    edit_weights(folder, to_codes)
    return folder


@pytest.mark.parametrize(
    ("model", "weights", "forms"),
    [
        ("uneven", "bf16", "PAIRS"),
        ("mixed", "bf16", "F32, PAIRS"),
        ("coded", "bf16", "PAIRS_Q4, PAIRS_Q8"),
        ("uneven", "int8g", "DOT_Q8, F32"),
        ("mixed", "int8g", "DOT_Q8, F32"),
        ("coded", "int8g", "DOT_FINE, DOT_Q4, DOT_Q8"),
    ],
    ids=["uneven-bf16", "mixed-bf16", "coded-bf16", "uneven", "mixed", "coded"],
)
def test_weights_made_smaller_give_the_same_bits_however_they_are_computed(
    model: str,
    weights: str,
    forms: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder: Path = request.getfixturevalue(model)
    draw = random.Random(23)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 90, 33, 7)]
    exact = native_runner(folder)
    expected = all_logits(exact, prompts, draw, 48)
    exact.close()
    caplog.set_level("INFO")
    found = []
    for variant in build.VARIANTS:
        if build.VARIANTS[variant] <= build.cpu_flags():
            monkeypatch.setattr(build, "variant_of", lambda flags, variant=variant: variant)
            for threads, chunks in ((1, (1, 7, 48)), (2, (48,))):
                runner = native_runner(folder, replace(ENGINE, num_threads=threads), weights)
                found += [all_logits(runner, prompts, draw, most) for most in chunks]
                runner.close()
    held = next(
        record.getMessage() for record in caplog.records if f"the weights ({weights}) in" in record.getMessage()
    )
    assert re.sub(r" \(\d+ MiB\)", "", held.partition(") in ")[2]) == forms
    assert all(same_bits(one, found[0]) for one in found)
    assert not same_bits(found[0], expected), "or nothing was rounded"
    share = [float((a - b).norm() / b.norm()) for a, b in zip(found[0], expected, strict=True)]
    assert max(share) < 0.3, share


# -- the cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("native_first", [True, False])
def test_a_sequence_goes_on_after_a_kv_transfer(native_first: bool, tmp_path: Path) -> None:
    """Whole blocks arrive, with whatever is behind the last token in them."""
    save_tiny("llama", {}, tmp_path)
    plain = TransformersRunner(ModelConfig(path=str(tmp_path), device="cpu"), ENGINE)
    native = native_runner(tmp_path)
    first, second = (native, plain) if native_first else (plain, native)
    assert first.spec.describe() == second.spec.describe()
    assert first.sampler == second.sampler
    for runner in (first, second):
        runner.caches[0].groups[0].fill_(float("nan"))
    prompt = [random.Random(5).randrange(VOCAB_SIZE) for _ in range(41)]
    table = [7, 3, 9, 1]
    tokens = list(prompt)
    for begin, end in ((0, 30), (30, 41)):
        logits = first._compute(RankStep([part_of(prompt, begin, end, table)], [0]), ignore_layer)
    tokens.append(int(logits.argmax()))
    second.caches[0].groups[0][:, table] = first.caches[0].groups[0][:, table]
    while len(tokens) < len(prompt) + 12:
        part = part_of(tokens, len(tokens) - 1, len(tokens), table)
        tokens.append(int(second._compute(RankStep([part], [0]), ignore_layer).argmax()))
    assert same_up_to_near_ties(tokens[41:], refer(load_reference(tmp_path), prompt, 12))


def test_what_others_left_in_the_blocks_does_not_matter(tmp_path: Path) -> None:
    save_tiny("llama", {}, tmp_path)
    draw = random.Random(8)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 17, 16, 60)]
    specs = [make_spec(f"{i}", prompt, 20, ignore_eos=True) for i, prompt in enumerate(prompts)]
    clean, spoiled = native_engine(tmp_path), native_engine(tmp_path)
    for group in spoiled.runner.caches[0].groups:
        group.fill_(float("nan"))
    assert answers(spoiled, specs, steps_between=2)[0] == answers(clean, specs, steps_between=2)[0]


def test_a_fork_and_its_parent_answer_as_generate(tmp_path: Path) -> None:
    save_tiny("llama", {}, tmp_path)
    engine = native_engine(tmp_path)
    for group in engine.runner.caches[0].groups:
        group.fill_(float("nan"))
    fork_and_compare(engine, load_reference(tmp_path))


def test_sequences_that_lose_their_blocks_answer_as_generate(tmp_path: Path) -> None:
    save_tiny("llama", {}, tmp_path)
    engine = native_engine(tmp_path, replace(ENGINE, num_blocks=10))
    draw = random.Random(14)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(30)] for _ in range(4)]
    specs = [make_spec(f"{i}", prompt, 40, ignore_eos=True) for i, prompt in enumerate(prompts)]
    got, _ = answers(engine, specs, steps_between=1)
    assert engine.load().preemptions > 0
    reference = load_reference(tmp_path)
    for answer, prompt in zip(got, prompts, strict=True):
        assert same_up_to_near_ties(answer, refer(reference, prompt, 40))


@pytest.mark.parametrize(
    ("kind", "extra"), [("llama", {}), ("mistral", {"head_dim": 32, "sliding_window": WINDOW})], ids=str
)
def test_drafts_change_no_answer(kind: str, extra: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(kind, extra, tmp_path)
    drafted, told = drafted_and_plain(
        native_engine(tmp_path), native_engine(tmp_path, replace(ENGINE, speculation="off"))
    )
    assert drafted == told


def test_blocks_behind_the_window_may_be_empty_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("mistral", {"head_dim": 32, "sliding_window": WINDOW}, tmp_path)
    engine = native_engine(tmp_path)
    execute, num_emptied = engine.runner.execute, 0

    def without_what_is_behind(step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        nonlocal num_emptied
        parts = []
        for part in step.parts:
            num_empty = max(0, part.num_computed_tokens - WINDOW + 1) // engine.runner.spec.block_size
            parts.append(part._replace(block_ids=((EMPTY_PLACE,) * num_empty + part.block_ids[0][num_empty:],)))
            num_emptied += num_empty
        return execute(replace(step, parts=tuple(parts)), on_layer_done)

    monkeypatch.setattr(engine.runner, "execute", without_what_is_behind)
    draw = random.Random(7)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (130, 61)]
    specs = [make_spec(f"{i}", prompt, 12, ignore_eos=True) for i, prompt in enumerate(prompts)]
    got, _ = answers(engine, specs, steps_between=1)
    reference = load_reference(tmp_path)
    for answer, prompt in zip(got, prompts, strict=True):
        assert same_up_to_near_ties(answer, refer(reference, prompt, 12))
    assert num_emptied > 20


@pytest.mark.parametrize("kind", ["native", "transformers", "device"])
def test_steps_planned_ahead_answer_the_same(kind: str, tmp_path: Path) -> None:
    """Prompts in chunks, stops that are noticed one step late, and for a while draws that need their last tokens, or
    scores. A runner whose device runs ahead leaves tokens there.
    """
    save_tiny("llama", {}, tmp_path)
    engine = native_engine(tmp_path) if kind == "native" else make_engine(tmp_path)
    if kind == "device":
        engine.runner.runs_ahead = True
    specs = []
    for index, length in enumerate((70, 1, 33, 5, 50, 9)):
        prompt = [random.Random(index).randrange(VOCAB_SIZE) for _ in range(length)]
        sampling = {
            "temperature": float(index % 2),
            "seed": index,
            "stop_token_ids": tuple(range(index, VOCAB_SIZE, 40)),
        }
        specs.append(sequence_spec(prompt, f"{index}", max_tokens=30, **sampling))
    specs.append(sequence_spec([1, 2, 3], "penalized", max_tokens=4, repetition_penalty=1.5))
    specs.append(sequence_spec([3, 2, 1], "scored", max_tokens=8, logprobs=1))
    specs.append(sequence_spec([3, 3, 1], "biased", max_tokens=12, logit_bias=((5, 2.0),), temperature=0.5))
    (expected, _), (found, num_ahead) = (tokens_of(engine, specs, ahead=ahead) for ahead in (False, True))
    assert found == expected
    assert num_ahead > 10


def test_a_layer_that_is_done_is_final(tmp_path: Path) -> None:
    """Each layer of a prompt's chunk is reported for itself; those of single tokens are reported at once."""
    save_tiny("llama", {}, tmp_path)
    engine = native_engine(tmp_path)
    for index, length in enumerate((20, 1, 60)):
        prompt = [random.Random(index).randrange(VOCAB_SIZE) for _ in range(length)]
        engine.add(make_spec(f"{index}", prompt, 5, ignore_eos=True), Purpose.GENERATE, float(index))
    reports = set()
    while batch := engine.schedule(0.0)[0]:
        seen: list[tuple[int, list[torch.Tensor]]] = []

        def layer_done(layer: int, fence: Fence | None, batch: StepInput = batch, seen: Any = seen) -> None:
            assert fence is None
            seen.append((layer, [rows_of(engine.runner.caches[0], batch, other) for other in range(4)]))

        sampled = engine.runner.execute(batch, layer_done)
        final = [rows_of(engine.runner.caches[0], batch, layer) for layer in range(4)]
        for layer, then in seen:
            assert [other for other in range(4) if then[other].equal(final[other])] == list(range(layer + 1))
        is_prompt = any(part.num_scheduled_tokens > 1 for part in batch.parts)
        assert [layer for layer, _ in seen] == ([0, 1, 2, 3] if is_prompt else [3])
        reports.add(is_prompt)
        engine.commit(batch, sampled, 0.0)
    assert reports == {True, False}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"token_ids": (VOCAB_SIZE,)}, "a token id outside the vocabulary"),
        ({"token_ids": (-1,)}, "a token id outside the vocabulary"),
        ({"num_computed_tokens": 31}, "a block that is not there"),
        ({"num_computed_tokens": 512}, "a sequence that is longer than the model's longest"),
        ({"block_ids": ((96,),)}, "a block that is not there"),
        ({"block_ids": ((-1,),)}, "a block that is not there"),
        ({"token_ids": (1,) * 65, "block_ids": ((0, 1, 2, 3, 4),)}, "more tokens than a step may have"),
    ],
    ids=str,
)
def test_what_would_reach_beyond_its_memory_is_no_step(change: dict[str, Any], fault: str, uneven: Path) -> None:
    runner = native_runner(uneven)
    part = part_of([1], 0, 1, [0])._replace(**change)
    with pytest.raises(AssertionError, match=fault):
        runner._compute(RankStep([part], [0]), ignore_layer)


# -- the choice --------------------------------------------------------------------------------------------------------


def chosen(folder: Path, caplog: pytest.LogCaptureFixture, cache: Path | None = None, **settings: Any) -> str:
    """The one line that says which runner it is and why."""
    caplog.clear()
    caplog.set_level("INFO")
    engine = replace(ENGINE, **settings)
    runner = make_runner(ModelConfig(path=str(folder), device="cpu"), engine, cache or cache_dir(load().cluster))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "engine.runners"]
    assert f"runs {'natively' if runner.name == 'native' else 'on transformers'}: " in line
    runner.close()
    return line


def refused(folder: Path, caplog: pytest.LogCaptureFixture, why: str, cache: Path | None = None) -> None:
    """`auto` takes transformers and says why; `native` is refused with the same words."""
    assert why in chosen(folder, caplog, cache)
    with pytest.raises(ConfigError) as refusal:
        chosen(folder, caplog, cache, runner="native")
    assert why in str(refusal.value)


def test_a_model_runs_natively_unless_the_setting_says_otherwise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny("llama", {}, tmp_path)
    assert "natively" in chosen(tmp_path, caplog)
    assert "natively" in chosen(tmp_path, caplog, runner="native")
    assert "on transformers: engine.runner is transformers" in chosen(tmp_path, caplog, runner="transformers")


@pytest.mark.parametrize(
    ("kind", "extra", "fields", "why"),
    [
        ("llama", {}, {"hidden_act": "relu"}, "the activation 'relu' is not among silu"),
        ("qwen3_moe", EXTRAS["qwen3_moe"], {"use_qk_norm": False}, "config.json has use_qk_norm, which"),
        ("llama", {"head_dim": 8}, {}, "heads of 8 or a residual of 64 are no multiples of 16"),
    ],
    ids=str,
)
def test_what_is_not_known_is_left_to_transformers(
    kind: str,
    extra: dict[str, Any],
    fields: dict[str, Any],
    why: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_tiny(kind, extra, tmp_path)
    edit_config(tmp_path, **fields)
    refused(tmp_path, caplog, why)


@pytest.mark.parametrize(
    "fields",
    [
        {"unsloth_fixed": True, "unsloth_version": "2026.1"}, {"auto_map": {"AutoModelForCausalLM": "x.Y"}},
        {"pretraining_tp": 2}, {"hidden_act": "swish"}, {"quantization_config": {}}, {"torch_dtype": "torch.float32"},
        {"model_name": None, "_": [], "training": {"steps": 3}},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_nothing_leaves_the_model_to_the_native_step(
    fields: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny("llama", {}, tmp_path)
    edit_config(tmp_path, **fields)
    assert "natively" in chosen(tmp_path, caplog, runner="native")


def test_a_type_that_is_not_known_is_left_to_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("starcoder2", {}, tmp_path)
    monkeypatch.delitem(FAMILIES, "starcoder2")
    refused(tmp_path, caplog, "models of type 'starcoder2' are not among arcee, cohere, cohere2")


def test_experts_that_nobody_can_choose_are_not_native(tmp_path: Path) -> None:
    save_tiny("qwen3_moe", EXTRAS["qwen3_moe"], tmp_path)
    for field, value in (("num_experts_per_tok", 5), ("num_experts_per_tok", 0), ("decoder_sparse_step", 0)):
        config = load_config(str(tmp_path))
        setattr(config, field, value)
        with pytest.raises(NotNative, match="cannot choose"):
            describe(config)


def test_a_model_that_does_not_compute_the_same_is_left_to_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the description has got wrong."""
    save_tiny("granite", EXTRAS["granite"], tmp_path)
    family = FAMILIES["granite"]
    monkeypatch.setitem(FAMILIES, "granite", replace(family, norm_offset=0.01))
    refused(tmp_path, caplog, "the first step's logits differ from transformers' by a share of")


def test_a_model_whose_experts_tie_is_left_to_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Which of equal ones torch chooses is its own affair; here it is the first."""
    save_tiny("mixtral", EXTRAS["mixtral"], tmp_path)

    def forget_the_router(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if name.endswith(".gate.weight"):
                weights[name].zero_()

    edit_weights(tmp_path, forget_the_router)
    refused(tmp_path, caplog, "the first step's logits differ from transformers' by a share of")


def test_without_a_compiler_or_a_known_cpu_models_run_on_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, empty = tmp_path / "model", tmp_path / "empty"
    save_tiny("llama", {}, folder)
    with monkeypatch.context() as nowhere:
        nowhere.setenv("PATH", str(empty))
        refused(folder, caplog, "there is no C compiler (gcc, cc, clang) on the path", cache=empty)
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"sse2"}))
    refused(folder, caplog, "this CPU has neither AVX-512 nor AVX2 with FMA")


def test_settings_that_the_native_step_lacks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", {}, tmp_path)
    path = str(tmp_path)
    for model, engine, why in (
        (ModelConfig(path=path, device="cpu"), replace(ENGINE, tensor_parallel=2), "engine.tensor_parallel is 2"),
        (ModelConfig(path=path, device="cpu", dtype="bfloat16"), ENGINE, "model.dtype is bfloat16"),
        (ModelConfig(path=path, device="cuda"), ENGINE, "computes on CPUs"),
    ):
        with pytest.raises(NotNative, match=why):
            NativeRunner(model, engine, tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(NotNative, match="computes on CPUs"):
        NativeRunner(ModelConfig(path=path), ENGINE, tmp_path)
    with pytest.raises(ConfigError, match=r"engine\.runner native has one rank; set engine\.tensor_parallel to 1"):
        replace(ENGINE, runner="native", tensor_parallel=2)


def test_weights_that_only_the_native_step_makes_are_refused_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("llama", {}, tmp_path)
    cache = cache_dir(load().cluster)
    model = ModelConfig(path=str(tmp_path), device="cpu", weights="int8g")
    with pytest.raises(ConfigError, match=r"weights int8g needs the native step: engine\.runner is transformers"):
        make_runner(model, replace(ENGINE, runner="transformers"), cache)
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"sse2"}))
    with pytest.raises(ConfigError, match="int8g needs the native step: this CPU has neither AVX-512 nor AVX2"):
        make_runner(model, ENGINE, cache)


@pytest.mark.chaos
def test_weights_that_compute_something_else_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("llama", {}, tmp_path)

    def spoiled(exact: PackedWeights, mode: str) -> PackedWeights:
        found = quantized.quantized(exact, mode)
        for matrix in found.matrices:
            matrix.weights.zero_()
        return found

    monkeypatch.setattr("engine.native.runner.quantized", spoiled)
    model = ModelConfig(path=str(tmp_path), device="cpu", weights="int8g")
    with pytest.raises(NotNative, match="are not near those of the exact weights"):
        NativeRunner(model, ENGINE, tmp_path)


def test_the_default_model_answers_as_generate_and_its_weights_are_codes(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = EngineConfig(num_blocks=256, max_num_seqs=8, max_num_batched_tokens=96)
    engine = native_engine(model_dir, config)
    assert "holds the weights (exact) in Q4_1 (63 MiB), Q8_0 (29 MiB)" in caplog.text
    draw = random.Random(31)
    prompts = [[draw.randrange(3, 49000) for _ in range(length)] for length in (5, 120, 33)]
    specs = [make_spec(f"{i}", prompt, 24, ignore_eos=True) for i, prompt in enumerate(prompts)]
    got, _ = answers(engine, specs, steps_between=1)
    reference = load_reference(model_dir)
    for answer, prompt in zip(got, prompts, strict=True):
        assert same_up_to_near_ties(answer, refer(reference, prompt, 24))

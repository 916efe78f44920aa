"""`TransformersRunner` answers as transformers' own `generate`, for every model type that it takes.

Greedy tokens in float32 are compared one by one. Where the reference's two best logits are closer than `NEAR_TIE`,
another batch shape may pick the other one; from there on the two texts differ for good reason, so the comparison ends.
Such places are counted, printed, and bounded.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.context import Context
from safetensors.torch import load_file, save_file

from baton.api import Chat
from baton.chat import ChatMessage
from baton.config import EngineConfig, ModelConfig
from baton.errors import ConfigError, InvalidRequest, ModelLoadError
from baton.messages import SequenceSpec
from baton.tasks import cancel_and_wait
from decode_worker.service import DecodeService
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.core.outputs import Generated
from engine.core.runner import (
    EMPTY_PLACE,
    UNKNOWN_TOKEN,
    Fence,
    OnLayerDone,
    Runner,
    StepInput,
    StepOutput,
    ignore_layer,
)
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose, Sequence
from engine.model import attention
from engine.model.kv_cache import KVCache
from engine.model.rank_step import RankStep
from engine.model.transformers_model import ModelRank, load_config
from engine.model.transformers_runner import TransformersRunner
from engine.native.spec import FAMILIES
from kvstore.transfer.endpoint import WorkerContext
from router.prompt import Tokenizer
from router.serve.worker_client import WorkerCallError
from tests.support.builders import sequence_spec
from tests.support.chats import encoded
from tests.support.guessing import Known, run
from tests.unit.router.serve.test_worker_client import router, served, worker_at
from worker.calls import CallServicer

pytestmark = pytest.mark.integration

NEAR_TIE = 5e-4
VOCAB_SIZE = 512
ENGINE = EngineConfig(num_blocks=96, max_num_seqs=8, max_num_batched_tokens=48)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # far from uniform logits, so that near ties are rare
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXTRAS: dict[str, dict[str, Any]] = {
    "cwm": {"head_dim": 32, "bos_token_id": 0, "eos_token_id": 0},
    "ernie4_5": {"head_dim": 16},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "gemma": {"head_dim": 32},
    "glm": {"head_dim": 32, "attention_bias": True},
    "glm4": {"head_dim": 32},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 0.5, "residual_multiplier": 0.7},
    "helium": {"head_dim": 16},
    "ministral": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": None},
    "mixtral": EXPERTS,
    "olmo": {"clip_qkv": 3.0},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 3.0},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 48, "head_dim": 32},
    "seed_oss": {"head_dim": 32, "attention_out_bias": True},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"use_qkv_bias": True},
}
WINDOW = 24
ALTERNATING = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
WINDOWED: dict[str, dict[str, Any]] = {
    "cohere2": ALTERNATING,
    "cwm": ALTERNATING,
    "exaone4": ALTERNATING,
    "ministral": ALTERNATING,
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "qwen2": ALTERNATING,
    "qwen3": ALTERNATING,
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": WINDOW},
    "smollm3": ALTERNATING,
    "starcoder2": {"sliding_window": WINDOW},
}
CASES = [
    *[pytest.param(kind, EXTRAS.get(kind, {}), id=kind) for kind in FAMILIES],
    *[pytest.param(kind, EXTRAS.get(kind, {}) | extra, id=f"{kind}-window") for kind, extra in WINDOWED.items()],
    pytest.param("llama", {"num_key_value_heads": 4}, id="llama-as-many-kv-heads"),
    pytest.param("llama", {"num_key_value_heads": 1}, id="llama-one-kv-head"),
    pytest.param(
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
        id="llama-scaled-rope",
    ),
]
OFTEN = (
    {"cohere2", "exaone4-window", "granite", "llama", "mixtral", "olmo2", "qwen3", "qwen3_moe"},
    {"gemma", "glm4", "mistral-window", "olmoe", "phi3", "qwen2", "qwen2-window", "smollm3"},
)
"""Cases that `make test` runs, natively and on transformers."""


@dataclass(frozen=True)
class Reference:
    """What `generate` says to a prompt, and how sure it is of each token."""

    tokens: list[int]
    margins: list[float]


def save_tiny(kind: str, extra: dict[str, Any], folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | extra))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():  # norms begin as all ones, biases as zeros: each in place of another would do
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.empty_like(parameter).uniform_(-0.5, 0.5)
    model.save_pretrained(folder)


def load_reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()


def refer(model: Any, prompt: list[int], max_tokens: int) -> Reference:
    prompt_ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [logits[0].topk(2).values for logits in out.logits]
    return Reference(out.sequences[0, len(prompt) :].tolist(), [float(pair[0] - pair[1]) for pair in best])


def same_up_to_near_ties(answer: list[int], reference: Reference) -> bool:
    """Whether all tokens are equal; False when they part at a near tie. Anything else fails."""
    for step, (token, expected) in enumerate(zip(answer, reference.tokens, strict=False)):
        if token != expected:
            margin = reference.margins[step]
            assert margin <= NEAR_TIE, f"token {step} is {token}, generate says {expected} with a margin of {margin}"
            return False
    assert len(answer) == len(reference.tokens)
    return True


def make_engine(folder: Path, config: EngineConfig = ENGINE) -> Engine:
    runner = TransformersRunner(ModelConfig(path=str(folder), device="cpu"), config, keeps_all=FAMILIES)
    return engine_of(runner, config)


def engine_of(runner: Runner, config: EngineConfig) -> Engine:
    limits = SchedulerLimits(
        max_num_seqs=config.batch(on_gpu=False).max_num_seqs,
        max_num_batched_tokens=config.batch(on_gpu=False).max_num_batched_tokens,
        output_reservation=8,
        max_draft_tokens=config.max_draft_tokens if config.speculation == "ngram" else 0,
    )
    return Engine(runner, limits)


def make_spec(name: str, prompt: list[int], max_tokens: int, ignore_eos: bool) -> SequenceSpec:
    return sequence_spec(prompt, name, max_tokens=max_tokens, ignore_eos=ignore_eos)


def answers(engine: Engine, specs: list[SequenceSpec], steps_between: int) -> tuple[list[list[int]], list[Sequence]]:
    """Runs all specs; each arrives `steps_between` steps after the one before, so that batches are mixed."""
    waiting, added = list(specs), list[Sequence]()
    tokens: dict[str, list[int]] = {spec.request_id: [] for spec in specs}
    names: dict[int, str] = {}
    num_steps = 0
    while waiting or engine.load().running or engine.load().waiting:
        while waiting and num_steps >= steps_between * len(added):
            added.append(engine.add(waiting.pop(0), Purpose.GENERATE, float(num_steps)))
            names[added[-1].key] = added[-1].spec.request_id
        batch, _ = engine.schedule(float(num_steps))
        for output in engine.commit(batch, engine.runner.execute(batch), float(num_steps)):
            assert isinstance(output, Generated)
            tokens[names[output.sequence_key]] += output.token_ids
        engine.check()
        num_steps += 1
    return list(tokens.values()), added


def tokens_of(engine: Engine, specs: list[SequenceSpec], *, ahead: bool) -> tuple[list[list[int]], int]:
    """Runs all specs. Returns their answers, and how many steps had tokens that were unknown when they were planned."""
    tokens = {engine.add(spec, Purpose.GENERATE, 0.0).key: list[int]() for spec in specs}
    num_ahead = 0
    step, _ = engine.schedule(0.0)
    launched = engine.runner.launch(step)
    while step:
        scheduled = engine.schedule_ahead(step, 0.0) if ahead else None
        following = StepInput(()) if scheduled is None else scheduled[0]
        num_ahead += any(UNKNOWN_TOKEN in part.token_ids for part in following.parts)
        behind = engine.runner.launch(following) if following else None
        for told in engine.commit(step, launched.collect(), 0.0):
            assert isinstance(told, Generated)
            tokens[told.sequence_key] += told.token_ids
        engine.check()
        step = following or engine.schedule(0.0)[0]
        if step:
            launched = behind or engine.runner.launch(step)
    return list(tokens.values()), num_ahead


def often_on_one(cases: Iterable[Any], number: int) -> list[Any]:
    """Returns the cases of one of the two engines on a CPU.

    Of those that both engines have, `make test` runs `OFTEN`, `make test-all` each of the others on one of them, and
    `make chaos` all on the other one.

    Args:
        number: of the engine, 0 or 1.
    """
    shared = {*FAMILIES, *(f"{kind}-window" for kind in WINDOWED)} - OFTEN[number]

    def marked(case: Any) -> Any:
        is_here = case.id not in OFTEN[1 - number] and zlib.crc32(case.id.encode()) % 2 == number
        return pytest.param(*case.values, id=case.id, marks=pytest.mark.full if is_here else pytest.mark.chaos)

    return [marked(case) if case.id in shared else case for case in cases]


@pytest.mark.parametrize(("kind", "extra"), often_on_one(CASES, 1))
def test_a_tiny_model_of_each_type_answers_as_generate(kind: str, extra: dict[str, Any], tmp_path: Path) -> None:
    save_tiny(kind, extra, tmp_path)
    num_same = num_as_generate(make_engine(tmp_path), load_reference(tmp_path))
    print(f"{kind}: {num_same} of 10 answers equal to the last token")
    assert num_same >= 8, "too many near ties for a test that means something"


def num_as_generate(engine: Engine, reference: Any) -> int:
    """How many of ten answers are `generate`'s to the last token. Where one is not, that is a near tie's doing."""
    draw = random.Random(7)
    # One token, one more than a block, a whole block, several chunks of the 48-token budget, longer than the window.
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 17, 16, 130, 61)]
    references = [refer(reference, prompt, 12) for prompt in prompts]

    specs = [make_spec(f"first-{i}", prompt, 12, ignore_eos=True) for i, prompt in enumerate(prompts)]
    got, _ = answers(engine, specs, steps_between=2)
    num_same = sum(map(same_up_to_near_ties, got, references))

    # Again, longer than before: the prompt and most of the answer come from the cache.
    again = [prompt + reference.tokens[:10] for prompt, reference in zip(prompts, references, strict=True)]
    specs = [make_spec(f"again-{i}", prompt, 2, ignore_eos=True) for i, prompt in enumerate(again)]
    got, sequences = answers(engine, specs, steps_between=0)
    tails = [Reference(reference.tokens[10:], reference.margins[10:]) for reference in references]
    num_same += sum(map(same_up_to_near_ties, got, tails))
    cached = [sequence.num_cached_tokens for sequence in sequences]
    assert cached[1] == 16
    assert cached[3] >= 128
    return num_same


def test_no_attention_that_plans_for_each_new_shape_is_left_on(tmp_path: Path) -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    save_tiny("llama", {}, tmp_path)
    make_engine(tmp_path)
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_what_others_left_in_the_blocks_does_not_matter(tmp_path: Path) -> None:
    """NaN and infinity are not masked by a mask: 0 * NaN is NaN. Another request may have left them."""
    save_tiny("llama", {}, tmp_path)
    draw = random.Random(8)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 17, 16, 60)]
    specs = [make_spec(f"{i}", prompt, 20, ignore_eos=True) for i, prompt in enumerate(prompts)]
    clean, spoiled = make_engine(tmp_path), make_engine(tmp_path)
    for group in spoiled.runner.caches[0].groups:
        group.fill_(float("nan"))
    assert answers(spoiled, specs, steps_between=2)[0] == answers(clean, specs, steps_between=2)[0]


def test_what_stands_behind_the_tokens_that_another_worker_sends_does_not_matter(tmp_path: Path) -> None:
    """Whole blocks are sent, and not every worker zeroes what it begins: the kernels of a GPU load nothing of that."""
    save_tiny("llama", {}, tmp_path)
    prompt = [random.Random(9).randrange(VOCAB_SIZE) for _ in range(37)]
    spec = make_spec("one", prompt, 20, ignore_eos=True)
    sender, receiver = make_engine(tmp_path), make_engine(tmp_path)
    expected, _ = answers(make_engine(tmp_path), [spec], steps_between=0)
    sent = sender.add(spec, Purpose.PREFILL, 0.0)
    step, _ = sender.schedule(0.0)
    (generated,) = sender.commit(step, sender.runner.execute(step), 0.0)
    received = receiver.add(spec, Purpose.RECEIVE, 0.0)
    receiver.schedule(0.0)
    (source,), (target,) = sender.runner.caches[0].groups, receiver.runner.caches[0].groups
    target.fill_(float("nan"))
    (blocks,), (own,) = sent.block_ids, received.block_ids
    target[:, list(own[:3])] = source[:, list(blocks[:3])]
    group = receiver.runner.spec.groups[0]
    target[:, own[2]].view(len(target), group.num_kv_heads, 2, 16, group.k_dim)[..., 37 % 16 :, :] = float("nan")
    assert isinstance(generated, Generated)
    receiver.insert(received, generated.token_ids[0], 0.0)
    tokens = list(generated.token_ids)
    while len(tokens) < 20:
        step, _ = receiver.schedule(0.0)
        for output in receiver.commit(step, receiver.runner.execute(step), 0.0):
            assert isinstance(output, Generated)
            tokens += output.token_ids
    assert [tokens] == expected


def fork_and_compare(engine: Engine, reference: Any) -> None:
    """A sequence that is forked within a block, and its parent, answer as `generate` does to the tokens of each."""
    prompt = [random.Random(11).randrange(VOCAB_SIZE) for _ in range(40)]
    parent = engine.add(make_spec("parent", prompt, 12, ignore_eos=True), Purpose.GENERATE, 0.0)
    tokens: dict[int, list[int]] = {parent.key: []}

    def step() -> bool:
        batch, _ = engine.schedule(0.0)
        for output in engine.commit(batch, engine.runner.execute(batch), 0.0) if batch else ():
            assert isinstance(output, Generated)
            tokens[output.sequence_key] += output.token_ids
        engine.check()
        return bool(batch)

    for _ in range(4):
        step()
    other = [*parent.token_ids[:-1], (parent.token_ids[-1] + 1) % VOCAB_SIZE]
    child = engine.fork(parent, make_spec("child", other, 8, ignore_eos=True), 0.0)
    assert child is not None
    assert child.copies
    tokens[child.key] = []
    while step():
        pass
    assert same_up_to_near_ties(tokens[parent.key], refer(reference, prompt, 12))
    assert same_up_to_near_ties(tokens[child.key], refer(reference, other, 8))


def drafted_and_plain(engine: Engine, plain: Engine) -> tuple[list[list[int]], list[list[int]]]:
    """The answers of an engine with drafts, some of them wrong, and of one without: of choices at any temperature, with
    what looks at the tokens before, prompts of several steps beside them.
    """
    draw = random.Random(15)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (30, 75, 9)]
    values: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 1.2, "presence_penalty": 0.7, "repetition_penalty": 1.2, "logprobs": 2, "seed": 4},
    ]
    specs = [
        sequence_spec(prompt, f"{place}", max_tokens=30, choice_index=choice, **values[(place + choice) % 3])
        for place, prompt in enumerate(prompts)
        for choice in range(2)
    ]
    told, _ = run(plain, specs)
    known = {
        spec.sequence_id: Known([*spec.token_ids, *one.token_ids], place, vocab_size=VOCAB_SIZE)
        for place, (spec, one) in enumerate(zip(specs, told, strict=True))
    }
    again, _ = run(engine, specs, known)
    load = engine.load()
    assert 40 < load.accepted_tokens < load.drafted_tokens
    return [one.token_ids for one in again], [one.token_ids for one in told]


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize(("kind", "extra"), [("llama", {}), ("mistral", {"head_dim": 32, "sliding_window": WINDOW})])
def test_drafts_change_no_answer(
    kind: str, extra: dict[str, Any], pads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts change no answer, be decodes attended by length or all at once as on a GPU."""
    if pads:
        monkeypatch.setattr(attention, "PADDING_DEVICES", frozenset({"cpu"}))
    save_tiny(kind, extra, tmp_path)
    plain = make_engine(tmp_path, replace(ENGINE, speculation="off"))
    drafted, told = drafted_and_plain(make_engine(tmp_path), plain)
    assert drafted == told


def test_a_fork_and_its_parent_answer_as_generate(tmp_path: Path) -> None:
    save_tiny("llama", {}, tmp_path)
    engine = make_engine(tmp_path)
    for group in engine.runner.caches[0].groups:
        group.fill_(float("nan"))
    fork_and_compare(engine, load_reference(tmp_path))


def test_blocks_behind_the_window_may_be_empty_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that gives them back leaves places without a block in the tables."""
    save_tiny("mistral", {"head_dim": 32, "sliding_window": WINDOW}, tmp_path)
    engine = make_engine(tmp_path)
    for group in engine.runner.caches[0].groups:
        group.fill_(float("nan"))
    execute, num_emptied = engine.runner.execute, 0

    def without_what_is_behind(step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        nonlocal num_emptied
        parts = []
        for part in step.parts:
            num_empty = max(0, part.num_computed_tokens - WINDOW + 1) // engine.runner.spec.block_size
            table = (EMPTY_PLACE,) * num_empty + part.block_ids[0][num_empty:]
            parts.append(part._replace(block_ids=(table,)))
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


def rows_of(cache: KVCache, batch: StepInput, layer: int) -> torch.Tensor:
    """A copy of K and V of all known tokens of a batch in one layer: `[tokens, heads, k_dim + v_dim]`."""
    group, block_size = cache.spec.groups[cache.group_of(layer)], cache.spec.block_size
    pages = cache.layer(layer).view(cache.num_blocks, group.num_kv_heads, -1)
    rows = []
    for part in batch.parts:
        blocks = pages[list(part.block_ids[0])]
        shape = (*blocks.shape[:2], block_size)
        keys = blocks[:, :, : block_size * group.k_dim].reshape(*shape, group.k_dim)
        values = blocks[:, :, block_size * group.k_dim :].reshape(*shape, group.v_dim)
        rows.append(torch.cat([keys, values], dim=3).transpose(1, 2).flatten(0, 1)[: part.end])
    return torch.cat(rows)


@pytest.mark.parametrize(("kind", "extra"), [("llama", {}), ("qwen3", EXTRAS["qwen3"] | ALTERNATING)])
def test_a_layer_that_is_done_is_final(kind: str, extra: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit, for chunks of prompts and single tokens alike; and the layers after it are not there yet."""
    save_tiny(kind, extra, tmp_path)
    engine = make_engine(tmp_path)
    draw = random.Random(9)
    num_steps = num_decodes = 0
    for index, length in enumerate((20, 1, 100, 16)):
        prompt = [draw.randrange(VOCAB_SIZE) for _ in range(length)]
        engine.add(make_spec(f"{index}", prompt, 5, ignore_eos=True), Purpose.GENERATE, float(index))
    while batch := engine.schedule(0.0)[0]:
        seen: list[list[torch.Tensor]] = []

        def layer_done(layer: int, fence: Fence | None, batch: StepInput = batch, seen: Any = seen) -> None:
            assert fence is None
            assert layer == len(seen)
            seen.append([rows_of(engine.runner.caches[0], batch, other) for other in range(4)])

        sampled = engine.runner.execute(batch, layer_done)
        final = [rows_of(engine.runner.caches[0], batch, layer) for layer in range(4)]
        assert len(seen) == 4
        for layer, then in enumerate(seen):
            assert [other for other in range(4) if then[other].equal(final[other])] == list(range(layer + 1))
        engine.commit(batch, sampled, 0.0)
        num_steps += 1
        num_decodes += sum(part.num_scheduled_tokens == 1 for part in batch.parts)
    assert num_steps > 5
    assert num_decodes > 12


def test_the_window_of_the_windowed_configurations_matters(tmp_path: Path) -> None:
    """Else the cases above would pass with an attention that ignores it."""
    prompt = [random.Random(3).randrange(VOCAB_SIZE) for _ in range(100)]
    logits = []
    for name, window in (("full", None), ("window", WINDOW)):
        save_tiny("mistral", {"head_dim": 32, "sliding_window": window}, tmp_path / name)
        logits.append(refer(load_reference(tmp_path / name), prompt, 12).tokens)
    assert logits[0] != logits[1]


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (None, r"Cannot read .*/config\.json: .*No such file"),
        ('{"model_type": "no-such-type"}', "holds a model of type 'no-such-type', which transformers does not know"),
        ('{"model_type": "llama"}', "has no .safetensors file"),
    ],
)
def test_a_folder_without_a_model_is_refused(config: str | None, sentence: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelLoadError, match=sentence) as refusal:
        make_engine(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def test_a_pool_of_less_than_two_blocks_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", {}, tmp_path)
    with pytest.raises(ModelLoadError, match=r"a KV pool of 0 blocks is too small .* raise engine.kv_cache_gib"):
        make_engine(tmp_path, replace(ENGINE, num_blocks=0, kv_cache_gib=1e-9))
    with pytest.raises(ModelLoadError, match="a KV pool of 1 blocks is too small"):
        make_engine(tmp_path, replace(ENGINE, num_blocks=1))


def test_the_pool_bounds_the_context_and_memory_bounds_the_pool(tmp_path: Path) -> None:
    save_tiny("llama", {}, tmp_path)
    assert make_engine(tmp_path, replace(ENGINE, num_blocks=3)).runner.max_model_len == 48
    assert make_engine(tmp_path, replace(ENGINE, max_model_len=100)).runner.max_model_len == 100
    runner = make_engine(tmp_path, replace(ENGINE, num_blocks=0, kv_cache_gib=2**-10)).runner
    assert runner.num_blocks == (2**20 // runner.spec.block_bytes,)
    assert runner.spec.block_bytes == 4 * 2 * 16 * (16 + 16) * 4  # layers, heads, tokens, K and V, float32
    assert runner.max_model_len == 512


def test_a_pool_that_this_machine_has_no_room_for_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", {}, tmp_path)
    with pytest.raises(
        ConfigError, match=r"1 KV pool of 1,000,000 GiB does not fit: .* set engine.kv_cache_gib to auto or"
    ):
        make_engine(tmp_path, replace(ENGINE, num_blocks=0, kv_cache_gib=1e6))
    shared = replace(ENGINE, num_blocks=0, kv_cache_gib="auto", memory_share=1e-6)
    with pytest.raises(ConfigError, match=r"there is no room for KV: of the 0\.0 GiB that are free"):
        make_engine(tmp_path, shared)


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match=r"model\.device is cuda, and torch sees no GPU here"):
        TransformersRunner(ModelConfig(path=str(tmp_path), device="cuda"), ENGINE)


def test_the_first_steps_are_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt and a token were computed before any client comes; a device that cannot compute them is found out."""
    save_tiny("llama", {}, tmp_path)
    compute = ModelRank.compute
    computed: list[tuple[int, int]] = []

    def noted(self: ModelRank, step: RankStep, on_layer_done: OnLayerDone) -> torch.Tensor:
        computed.extend((part.num_computed_tokens, part.num_scheduled_tokens) for part in step.parts)
        return compute(self, step, on_layer_done)

    monkeypatch.setattr(ModelRank, "compute", noted)
    make_engine(tmp_path)
    assert computed == [(0, 64), (63, 1)]
    computed.clear()
    make_engine(tmp_path, replace(ENGINE, num_blocks=2))
    assert computed == [(0, 32), (31, 1)]

    def failing(self: ModelRank, step: RankStep, on_layer_done: OnLayerDone) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(ModelRank, "compute", failing)
    with pytest.raises(ModelLoadError, match=r"cannot compute a first step: OutOfMemoryError: CUDA out of memory"):
        make_engine(tmp_path)


def edit_config(folder: Path, **fields: Any) -> None:
    """Sets fields of config.json; one that is set to None is taken out."""
    path = folder / "config.json"
    gone = [name for name, value in fields.items() if value is None]
    config = {name: value for name, value in (json.loads(path.read_text()) | fields).items() if name not in gone}
    path.write_text(json.dumps(config))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


def said_at_load(caplog: pytest.LogCaptureFixture) -> list[str]:
    """By us; what transformers says depends on what was loaded before."""
    return [record.getMessage() for record in caplog.records if record.name.startswith(("baton", "engine"))]


def without(*parts: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def edit(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if any(part in name for part in parts)]:
            del weights[name]

    return edit


def narrow_head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = torch.zeros(VOCAB_SIZE, 32)


def as_embedding_model(weights: dict[str, torch.Tensor]) -> None:
    """As `Qwen3Model` saves itself: no head, and no name begins with "model."."""
    del weights["lm_head.weight"]
    for name in list(weights):
        weights[name.removeprefix("model.")] = weights.pop(name)


def as_reward_model(weights: dict[str, torch.Tensor]) -> None:
    weights["score.weight"] = weights.pop("lm_head.weight")[:1].clone()


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (without("lm_head"), r"lacks lm_head\.weight, which a Qwen3ForCausalLM needs"),
        (without("layers.2."), r"lacks model\.layers\.2\.input_layernorm\.weight, .* and 8 more, which a"),
        (without("model.norm"), r"lacks model\.norm\.weight, which a"),
        (as_embedding_model, r"lacks lm_head\.weight, which a"),
        (as_reward_model, r"lacks lm_head\.weight, which a"),
        (narrow_head, r"it holds lm_head\.weight of shape \[512, 32\] instead of \[512, 64\]"),
    ],
)
def test_a_checkpoint_without_some_tensors_is_refused_by_their_names(
    edit: Callable[[dict[str, torch.Tensor]], None], sentence: str, tmp_path: Path
) -> None:
    """Else they would be random numbers, different ones in each worker."""
    save_tiny("qwen3", EXTRAS["qwen3"], tmp_path)
    edit_weights(tmp_path, edit)
    with pytest.raises(ModelLoadError, match=sentence) as refusal:
        make_engine(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def test_a_head_that_is_the_embedding_is_not_missing_and_what_is_too_much_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny("qwen3", EXTRAS["qwen3"] | {"tie_word_embeddings": True}, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    make_engine(tmp_path)
    assert not said_at_load(caplog)
    edit_weights(tmp_path, lambda weights: weights.update({"score.weight": torch.zeros(1, 64)}))
    make_engine(tmp_path)
    assert said_at_load(caplog) == [
        f"a Qwen3ForCausalLM does not use all tensors of the checkpoint in {tmp_path}: score.weight"
    ]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            "holds a Qwen3ForSequenceClassification; this version runs",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"are quantized \(gptq\)"),
        (
            {"rope_parameters": {"rope_type": "of-tomorrow"}},
            "RoPE of type 'of-tomorrow' is not supported; supported are default,",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "transformers can read: KeyError: .*'factor'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "cannot make the model of config.json: KeyError: 'rope_type'",
        ),
        ({"num_hidden_layers": "four"}, r"config\.json says four as num_hidden_layers; it must be a whole number"),
        ({"hidden_act": "of-tomorrow"}, "cannot make the model of config.json: KeyError: 'of-tomorrow'"),
        (
            {"num_attention_heads": 0},
            r"config\.json says 0 as num_attention_heads; it must be a whole number from 1 to",
        ),
        ({"rms_norm_eps": "small"}, "transformers can read: .*expected float, got str"),
        (
            {"layer_types": ["chunked_attention"] * 4},
            "has no cache for the layers of config.json: .*'attention_chunk_size'",
        ),
    ],
)
def test_what_a_config_says_that_does_not_run_is_a_sentence(
    fields: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    save_tiny("qwen3", EXTRAS["qwen3"], tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(ModelLoadError, match=sentence) as refusal:
        make_engine(tmp_path)
    assert "\n" not in str(refusal.value)


FP8_BLOCK = 32


def quantize_to_fp8(weights: dict[str, torch.Tensor]) -> None:
    """As fp8 checkpoints are written: a scale for each square of a projection."""
    for name in [name for name in weights if name.endswith("proj.weight")]:
        num_rows, num_columns = weights[name].shape
        squares = weights[name].view(num_rows // FP8_BLOCK, FP8_BLOCK, num_columns // FP8_BLOCK, FP8_BLOCK)
        scales = squares.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        weights[name] = (squares / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(num_rows, num_columns)
        weights[f"{name}_scale_inv"] = scales


def dequantize_from_fp8(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if name.endswith("_scale_inv")]:
        scales = weights.pop(name).repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        weight = name.removesuffix("_scale_inv")
        weights[weight] = weights[weight].float() * scales


def test_a_checkpoint_in_fp8_answers_as_the_same_weights_in_float32(tmp_path: Path) -> None:
    quantized, plain = tmp_path / "fp8", tmp_path / "float32"
    for folder in (quantized, plain):
        save_tiny("llama", {}, folder)
        edit_weights(folder, quantize_to_fp8)
    edit_weights(plain, dequantize_from_fp8)
    method = {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK], "activation_scheme": "dynamic"}
    edit_config(quantized, quantization_config=method)
    # So on a GPU as well, where transformers would look for kernels that are no part of it.
    assert load_config(str(quantized)).quantization_config["dequantize"]
    prompt = [random.Random(13).randrange(VOCAB_SIZE) for _ in range(40)]
    reference = refer(load_reference(plain), prompt, 12)
    assert len(set(reference.tokens)) > 6, "an answer that is easily missed"
    got, _ = answers(make_engine(quantized), [make_spec("fp8", prompt, 12, ignore_eos=True)], 0)
    assert same_up_to_near_ties(got[0], reference)


# -- RoPE: every kind of it, for any type of model ---------------------------------------------------------------------

TRAINED = 64
"""original_max_position_embeddings"""
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.8, 2.2, 2.7],
    "long_factor": [1.0, 2.0, 4.0, 6.0, 9.0, 13.0, 18.0, 24.0],
    "original_max_position_embeddings": TRAINED,
}


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_longrope_is_the_same_beside_a_longer_sequence(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also for whoever finds the prompt in the cache later. transformers would take the frequencies of the longest."""
    save_tiny(kind, {}, tmp_path)
    edit_config(tmp_path, rope_parameters=LONG, original_max_position_embeddings=TRAINED)
    engine = make_engine(tmp_path)
    draw = random.Random(12)
    prompt = [draw.randrange(VOCAB_SIZE) for _ in range(40)]
    beside = [draw.randrange(VOCAB_SIZE) for _ in range(min(100, engine.runner.max_model_len - 1))]
    reference = refer(load_reference(tmp_path), prompt, 12)
    got, _ = answers(engine, [make_spec("beside", beside, 30, True), make_spec("prompt", prompt, 12, True)], 0)
    same_up_to_near_ties(got[1], reference)
    got, sequences = answers(engine, [make_spec("again", prompt, 12, True)], 0)
    assert sequences[0].num_cached_tokens == 32
    same_up_to_near_ties(got[0], reference)

    assert engine.runner.max_model_len == TRAINED
    (said,) = said_at_load(caplog)
    assert said.startswith("max_model_len is 64, the model's original_max_position_embeddings, not 512: ")
    with pytest.raises(InvalidRequest, match="64 tokens do not fit; this worker takes 1 to 63"):
        engine.add(make_spec("long", list(range(TRAINED)), 1, True), Purpose.GENERATE, 0.0)
    assert make_engine(tmp_path, replace(ENGINE, max_model_len=200)).runner.max_model_len == TRAINED
    assert make_engine(tmp_path, replace(ENGINE, max_model_len=50)).runner.max_model_len == 50


def test_dynamic_rope_beyond_what_was_trained_is_refused(tmp_path: Path) -> None:
    save_tiny("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}, tmp_path)
    with pytest.raises(ModelLoadError, match=r"max_model_len is 513, .* type dynamic .*; set it to 512 at most"):
        make_engine(tmp_path, replace(ENGINE, max_model_len=513))
    for asked in (0, 512):
        assert make_engine(tmp_path, replace(ENGINE, max_model_len=asked)).runner.max_model_len == 512


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """A model of a listed type with a drawn RoPE, and an engine of drawn sizes."""

    kind: str
    extra: dict[str, Any]
    rope: dict[str, Any]
    is_legacy: bool
    """Whether config.json has `rope_scaling`, as those of older models do."""
    max_position_embeddings: int
    engine: EngineConfig

    def save(self, folder: Path) -> None:
        save_tiny(self.kind, self.extra | {"max_position_embeddings": self.max_position_embeddings}, folder)
        rope = dict(self.rope)
        outside = {}
        if self.kind == "phi3" and "original_max_position_embeddings" in rope:
            outside["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
        if self.is_legacy:
            theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
            if self.kind == "phi3":
                outside["partial_rotary_factor"] = rope.pop("partial_rotary_factor", 1.0)
            scaling = {"type": kind, **rope} if kind != "default" else None
            edit_config(folder, rope_parameters=None, rope_theta=theta, rope_scaling=scaling, **outside)
        else:
            edit_config(folder, rope_parameters=rope, **outside)


def random_rope(draw: random.Random, rope_type: str, head_dim: int, longest: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": draw.choice([1e4, 5e5])}
    trained = draw.choice([longest // 4, longest // 2])
    factor = draw.choice([1.5, 2.0, 4.0, 8.0])
    if rope_type in ("linear", "dynamic", "yarn", "llama3"):
        rope["factor"] = factor
    if rope_type in ("yarn", "llama3", "longrope"):
        rope["original_max_position_embeddings"] = trained
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": draw.choice([2.0, 4.0])}
    if rope_type == "yarn":
        more = {"attention_factor": 1.2, "beta_fast": 16, "beta_slow": 2, "truncate": False, "mscale": 0.8}
        rope |= {name: value for name, value in more.items() if draw.random() < 0.4}
    if rope_type == "longrope":
        rope |= {name: [draw.uniform(1, 2 + 8 * i) for _ in range(head_dim // 2)] for i, name in enumerate(FACTORS)}
        rope |= draw.choice([{}, {"factor": factor}, {"attention_factor": 1.1}])
    if rope_type == "proportional":
        rope |= {"partial_rotary_factor": draw.choice([0.25, 0.5, 1.0]), "factor": factor}
    return rope


FACTORS = ("short_factor", "long_factor")
ROPE_TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")
NUM_RANDOM = int(os.environ.get("BATON_RANDOM_MODELS", "1"))
"""Of each kind of RoPE."""


def random_model(rope_type: str, seed: int) -> tuple[RandomModel, random.Random]:
    draw = random.Random(f"{rope_type}-{seed}")
    kinds = [kind for kind in FAMILIES if kind != "phi3"]
    if rope_type in ("default", "longrope"):  # phi3 knows no others
        kinds += ["phi3"] * len(kinds)
    kind = draw.choice(kinds)
    extra = dict(EXTRAS.get(kind, {}))
    if kind in WINDOWED and draw.random() < 0.4:
        extra |= WINDOWED[kind]
        extra["sliding_window"] = draw.randrange(2, 100)
    longest = draw.choice([128, 256, 512])
    engine = EngineConfig(
        block_size=draw.choice([16, 32, 48]),
        num_blocks=draw.randrange(26, 96),
        max_num_seqs=6,
        max_num_batched_tokens=draw.randrange(8, 100),
        max_model_len=draw.choice([0, 0, 0, longest // 2, longest + 100]),
    )
    rotated = draw.choice([0.5, 1.0]) if kind == "phi3" else 1.0
    rope = random_rope(draw, rope_type, int(rotated * extra.get("head_dim", 16)), longest)
    if rotated < 1:
        rope["partial_rotary_factor"] = rotated
    return RandomModel(
        kind=kind, extra=extra, rope=rope, is_legacy=draw.random() < 0.5, max_position_embeddings=longest, engine=engine
    ), draw


@pytest.mark.parametrize("seed", range(NUM_RANDOM))
@pytest.mark.parametrize("rope_type", ROPE_TYPES)
@pytest.mark.chaos
def test_any_model_with_any_rope_answers_as_generate_or_is_refused(rope_type: str, seed: int, tmp_path: Path) -> None:
    model, draw = random_model(rope_type, seed)
    print(model)
    model.save(tmp_path)
    if rope_type == "dynamic" and model.engine.max_model_len > model.max_position_embeddings:
        with pytest.raises(ModelLoadError, match="type dynamic"):
            make_engine(tmp_path, model.engine)
        return
    try:
        reference = load_reference(tmp_path)
    except Exception as error:  # "head_dim": null, which mixtral writes, together with yarn or longrope
        print(f"transformers does not load it: {error}")
        with pytest.raises(ModelLoadError, match=type(error).__name__):
            make_engine(tmp_path, model.engine)
        return
    engine = make_engine(tmp_path, model.engine)
    room = engine.runner.max_model_len - 10
    prompts = [
        [draw.randrange(VOCAB_SIZE) for _ in range(min(length, room))]
        for length in (draw.randrange(1, 17), 17, draw.randrange(30, 60), draw.randrange(60, 130), room)
    ]
    references = [refer(reference, prompt, 10) for prompt in prompts]
    for turn, steps_between in (("first", draw.randrange(3)), ("again", 0)):
        specs = [make_spec(f"{turn}-{i}", prompt, 10, ignore_eos=True) for i, prompt in enumerate(prompts)]
        got, _ = answers(engine, specs, steps_between)
        same = [same_up_to_near_ties(answer, wanted) for answer, wanted in zip(got, references, strict=True)]
        print(f"{turn}: {sum(same)} of {len(same)} answers equal to the last token")
        assert sum(same) >= 3, "too many near ties for a test that means something"


# -- a token id that has no row in the embedding -----------------------------------------------------------------------


async def test_a_token_id_without_an_embedding_is_refused_by_itself(tmp_path: Path) -> None:
    """Its tokenizer knows more tokens than the model. The request beside it goes on, and routers are told whose fault
    it is, so that no other worker is asked."""
    save_tiny("llama", {}, tmp_path)
    engine = make_engine(tmp_path)
    loop = EngineLoop(engine, max_waiting=8)
    kv: Any = None  # nothing is transferred or pulled here
    good = make_spec("good", list(range(30)), 40, ignore_eos=True)
    bad = make_spec("bad", [*range(30), VOCAB_SIZE], 40, ignore_eos=True)
    servicer = CallServicer(decode=DecodeService(WorkerContext("worker-0", loop, kv)).decode)
    async with asyncio.timeout(60), served(servicer) as (_, port), router() as calls:
        steps = asyncio.create_task(loop.run())
        worker = worker_at(port)
        async with calls.decode(worker, good, await_kv=False, trace=Context()) as stream:
            messages: list[Any] = [await stream.read()]
            for await_kv in (False, True):
                async with calls.decode(worker, bad, await_kv=await_kv, trace=Context()) as refused:
                    with pytest.raises(WorkerCallError) as caught:
                        await refused.read()
                assert type(caught.value.error) is InvalidRequest
                assert str(caught.value.error) == (
                    "token id 512 is outside the model's vocabulary, whose ids are 0 to 511"
                )
            while messages[-1].finish_reason is None:
                messages.append(await stream.read())
        await cancel_and_wait((steps,))
    (alone,), _ = answers(make_engine(tmp_path), [good], 0)
    assert [token for message in messages for token in message.token_ids] == alone
    assert engine.is_idle


def real_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    text = tokenizer.encode(
        "The history of bridges begins with fallen trees and stepping stones. Later builders learned to span rivers "
        "with arches of stone, chains of iron and cables of steel, and each age left some of its works standing. "
    )
    long = (text * 20)[:700]
    shared = text[:40]
    return [
        [504],  # "The": a prompt of one token
        text[:16],  # exactly one block
        text[:32],
        long[3:153],  # several chunks
        tokenizer.encode("Ünïcödé ist überall: 東京 🚲 — \u200d👩\u200d💻 and"),
        tokenizer.encode("def fibonacci(n):\n    "),
        # Ends by itself.
        encoded(tokenizer, Chat(messages=(ChatMessage(role="user", content="What is 2 + 2? Answer briefly."),))),
        long,
        shared + tokenizer.encode(" Most of all,"),
        shared + tokenizer.encode(" In Japan,"),
        tokenizer.encode("1, 2, 3, 4, 5, 6, 7, 8,"),
        tokenizer.encode("Once upon a time"),
    ]


@pytest.mark.chaos
def test_the_real_model_answers_as_generate(model_dir: Path) -> None:
    prompts = real_prompts(Tokenizer.load(model_dir))
    reference = load_reference(model_dir)
    references = [refer(reference, prompt, 16) for prompt in prompts]
    engine = make_engine(model_dir, replace(ENGINE, num_blocks=256, max_num_batched_tokens=128))
    specs = [make_spec(f"real-{i}", prompt, 16, ignore_eos=False) for i, prompt in enumerate(prompts)]
    got, sequences = answers(engine, specs, steps_between=1)
    same = [same_up_to_near_ties(answer, reference) for answer, reference in zip(got, references, strict=True)]
    print(f"{sum(same)} of {len(same)} answers equal to the last token; parted at a near tie: {same.count(False)}")
    assert sum(same) >= len(same) - 2
    assert sequences[9].num_cached_tokens == 32, "two whole blocks of the shared beginning"
    assert engine.pool.counts().in_use == 0

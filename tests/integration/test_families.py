"""Models of families beyond the dense ones answer as transformers' own `generate`, because the model is asked.

Each is a tiny random model of its type, made here; no file of the engine names any of them. What the model does not
let us compute is refused by a sentence: each check against wrong tokens has a type here that only it refuses.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.context import Context
from transformers import AttentionInterface

from baton.blocks import num_blocks_for
from baton.config import EngineConfig, ModelConfig
from baton.errors import ModelLoadError
from baton.memory import weights_bytes
from baton.messages import DecodeRequest, FirstToken, PrefillRequest, SequenceSpec, Ticket
from decode_worker.service import DecodeService
from engine.core.beams import BeamSearch
from engine.core.runner import KVSpec
from engine.model import asking, self_check
from engine.model.asking import ask
from engine.model.attention import ATTENTION_NAME, paged_attention
from engine.model.transformers_model import ModelRank
from engine.model.transformers_runner import TransformersRunner
from prefill_worker.service import PrefillService
from tests.integration import test_beams
from tests.integration.test_engine_models import (
    ENGINE,
    SIZES,
    VOCAB_SIZE,
    answers,
    drafted_and_plain,
    edit_config,
    edit_weights,
    fork_and_compare,
    load_reference,
    make_engine,
    make_spec,
    num_as_generate,
    quantize_to_fp8,
    refer,
    same_up_to_near_ties,
    save_tiny,
    tokens_of,
)
from tests.support.families import DELTA, EXPERTS, GEMMA4, HEADS, KINDS, LATENT, OFTEN, OTHERS, SMALL_GPT, WINDOW
from tests.unit.kvstore.transfer.peers import CONFIG, engine_worker

pytestmark = pytest.mark.integration

TYPES = [
    *[pytest.param(kind, extra, id=kind) for kind, extra in OFTEN.items()],
    *[pytest.param(kind, extra, id=kind, marks=pytest.mark.full) for kind, extra in OTHERS.items()],
    pytest.param("gemma4_text", GEMMA4, id="gemma4_text-alone", marks=pytest.mark.full),
]


def save_untied(kind: str, extra: dict[str, Any], folder: Path) -> None:
    save_tiny(kind, {"tie_word_embeddings": False} | extra, folder)


@pytest.mark.parametrize(("kind", "extra"), TYPES)
def test_a_tiny_model_answers_as_generate(kind: str, extra: dict[str, Any], tmp_path: Path) -> None:
    save_untied(kind, extra, tmp_path)
    reference = load_reference(tmp_path)
    num_same = num_as_generate(make_engine(tmp_path), reference)
    print(f"{kind}: {num_same} of 10 answers equal to the last token")
    assert num_same >= 8, "too many near ties for a test that means something"
    assert len(set(refer(reference, prompts()[3], 12).tokens)) >= 6, "an answer of one token is no test"


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 17, 16, 130, 61)]


@pytest.mark.parametrize("kind", KINDS)
def test_steps_planned_ahead_drafts_and_preemption_change_nothing(kind: str, tmp_path: Path) -> None:
    save_untied(kind, KINDS[kind], tmp_path)
    reference = load_reference(tmp_path)
    specs = [make_spec(f"{i}", prompt, 12, ignore_eos=True) for i, prompt in enumerate(prompts())]
    got, num_ahead = tokens_of(make_engine(tmp_path), specs, ahead=True)
    assert sum(same_up_to_near_ties(g, refer(reference, p, 12)) for g, p in zip(got, prompts(), strict=True)) >= 4
    assert num_ahead > 0
    engine = make_engine(tmp_path, EngineConfig(num_blocks=14, max_num_seqs=8, max_num_batched_tokens=48))
    many = [[*prompts()[1][:16], number] for number in range(6)]
    got = answers(engine, [make_spec(f"{i}", prompt, 40, ignore_eos=True) for i, prompt in enumerate(many)], 0)[0]
    assert sum(same_up_to_near_ties(g, refer(reference, p, 40)) for g, p in zip(got, many, strict=True)) >= 4
    assert engine.load().preemptions > 0
    drafted, told = drafted_and_plain(make_engine(tmp_path), make_engine(tmp_path, replace(ENGINE, speculation="off")))
    assert drafted == told


@pytest.mark.parametrize("kind", KINDS)
def test_choices_that_fork_and_beams_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    save_untied(kind, KINDS[kind], tmp_path)
    reference = load_reference(tmp_path)
    fork_and_compare(make_engine(tmp_path), reference)
    engine, asked = make_engine(tmp_path), prompts()[1:3]
    specs = [test_beams.spec_of(f"{i}", prompt, beam_width=3) for i, prompt in enumerate(asked)]
    num_different = 0
    for spec, prompt, found in zip(specs, asked, test_beams.searched(engine, specs), strict=True):
        search = BeamSearch.of(spec, engine.runner.eos_token_ids, engine.runner.max_model_len)
        num_different += test_beams.num_near_ties(search, found, test_beams.refer(reference, prompt, 3, 1.0))
    assert num_different <= 1


SLOTS = replace(CONFIG, slot_bytes=2**17)


async def transferred(folder: Path, spec: SequenceSpec, engine: EngineConfig = ENGINE) -> tuple[list[int], int, KVSpec]:
    """The answer of two workers, one of which computes the prompt; the bytes that went from one to the other."""
    runners: list[Any] = [TransformersRunner(ModelConfig(path=str(folder), device="cpu"), engine) for _ in range(2)]
    async with (
        engine_worker("prefill", runners[0], SLOTS) as prefill,
        engine_worker("decode", runners[1], SLOTS) as decode,
    ):
        answer = DecodeService(decode.context).decode(DecodeRequest(spec, await_kv=True), Context())
        ticket = await anext(answer)
        assert isinstance(ticket, Ticket)
        tokens, num_bytes = list[int](), 0
        rest = asyncio.create_task(rest_of(answer))
        async for event in PrefillService(prefill.context).prefill(PrefillRequest(spec, ticket), Context()):
            if isinstance(event, FirstToken):
                assert event.token_id is not None
                tokens.append(event.token_id)
            else:
                num_bytes = event.num_bytes
        return tokens + await rest, num_bytes, runners[1].spec


async def rest_of(answer: AsyncGenerator[Any]) -> list[int]:
    return [token async for event in answer for token in event.token_ids]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_kv_that_one_worker_computes_is_enough_for_another(kind: str, tmp_path: Path) -> None:
    """Every layer sends what it keeps: the latents, if these are what it keeps, and the window, if it has one."""
    save_untied(kind, KINDS[kind], tmp_path)
    prompt = prompts()[4]
    tokens, num_bytes, spec = await transferred(tmp_path, make_spec("one", prompt, 12, ignore_eos=True))
    assert same_up_to_near_ties(tokens, refer(load_reference(tmp_path), prompt, 12))
    counts = [num_blocks_for(len(prompt), 16) - group.first_block(len(prompt)) for group in spec.groups]
    sent = [n * len(group.layers) * group.row_bytes for n, group in zip(counts, spec.groups, strict=True)]
    assert num_bytes == sum(sent)
    if kind == "deepseek_v3":
        assert num_bytes == 64 * (32 + 8) * 4 * 4, "tokens, numbers of a token, bytes of a number, layers"


EYES = {"image_token_id": 500, "vision_start_token_id": 501, "vision_end_token_id": 502, "video_token_id": 503}
TEXT = SIZES | {"pad_token_id": 0, "tie_word_embeddings": False}
TURNED = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}}
SEEN = {
    "hidden_size": 32, "image_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2,
    "patch_size": 8,
}  # fmt: skip
QWEN_SEES = {
    "deepstack_visual_indexes": [0], "depth": 2, "fullatt_block_indexes": [1], "hidden_size": 32, "in_channels": 3,
    "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": 64, "patch_size": 14,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 28,
}  # fmt: skip
WITH_EYES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT | HEADS | WINDOW, "vision_config": SEEN, "image_token_index": 500, "boi_token_index": 501,
        "eoi_token_index": 502, "mm_tokens_per_image": 4,
    },
    "internvl": {"text_config": TEXT | {"model_type": "qwen2"}, "vision_config": SEEN, "image_token_id": 500},
    "llava": {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": SEEN | {"model_type": "siglip_vision_model"},
        "image_token_index": 500,
    },
    "mistral3": {
        "text_config": TEXT | HEADS | {"model_type": "mistral"}, "vision_config": SEEN | {"model_type": "pixtral"},
        "image_token_index": 500,
    },
    "qwen2_5_vl": {"text_config": TEXT | HEADS | TURNED, "vision_config": QWEN_SEES, **EYES},
    "qwen3_vl": {"text_config": TEXT | HEADS | TURNED, "vision_config": QWEN_SEES, **EYES},
    "smolvlm": {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": SEEN, "image_token_id": 500, "scale_factor": 2,
    },
}  # fmt: skip


def save_with_eyes(kind: str, folder: Path) -> Any:
    """Saves a checkpoint as it is published. Returns the whole model, whose text is the reference."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **WITH_EYES[kind])
    model = asking._auto_class(config).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight += torch.empty_like(weight).uniform_(-0.5, 0.5)
            elif "language_model" in name or "lm_head" in name:
                weight.normal_(0, 0.25)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", WITH_EYES)
def test_the_text_of_a_model_that_sees_answers_as_generate(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    reference = save_with_eyes(kind, tmp_path)
    engine = make_engine(tmp_path)
    assert num_as_generate(engine, reference) >= 8
    loaded = sum(weight.numel() for weight in engine.runner.rank.model.parameters())  # type: ignore[attr-defined]
    assert loaded < sum(weight.numel() for weight in reference.parameters())
    assert "this worker serves text: model.vi" in caplog.text
    assert "does not use all tensors" not in caplog.text


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({}, "layer 0 attends to later tokens, too"),
    "bloom": ({"n_head": 4, "n_layer": 4}, "layer 0 attends by itself, past the attention function"),
    "deepseek_v32": (LATENT, "the model keeps keys of an indexer"),
    "diffllama": ({}, "layer 0 attends twice, and its KV has one place"),
    "doge": ({}, "layer 0 has a mask of its own"),
    "gptj": (SMALL_GPT | {"rotary_dim": 8}, "models of type 'gptj' have attention of their own"),
    "llama4_text": (
        EXPERTS | HEADS | {"attention_chunk_size": 32, "intermediate_size_mlp": 96},
        "layer 0 keeps 32 tokens, but its attention is given a window of None",
    ),
    "minimax": (EXPERTS | DELTA, "cannot compute a first step: .* uses cache of its own"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_computed_is_refused_by_a_sentence(kind: str, tmp_path: Path) -> None:
    extra, sentence = REFUSED[kind]
    save_untied(kind, extra, tmp_path)
    edit_config(tmp_path, architectures=None)
    with pytest.raises(ModelLoadError, match=sentence) as refusal:
        make_engine(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_window_that_a_configuration_names_and_the_model_ignores_is_refused(tmp_path: Path) -> None:
    save_untied("llama", {}, tmp_path)
    edit_config(tmp_path, attention_chunk_size=7)
    with pytest.raises(ModelLoadError, match="layer 0 keeps 7 tokens, but its attention is given a window of None"):
        make_engine(tmp_path)


def test_terms_of_attention_that_nobody_knows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def with_bias(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, position_bias=torch.zeros(1), **kwargs)

    forward = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", with_bias)
    save_untied("llama", {}, tmp_path)
    with pytest.raises(ModelLoadError, match="layer 0 asks attention for position_bias, which is not computed here"):
        make_engine(tmp_path)


def test_a_model_that_only_its_own_attention_computes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its last keys beside the cache, which no question shows; only the check with the weights sees it."""
    from transformers.models.llama import modeling_llama

    def with_memory(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[1] > 1:
            hidden_states = torch.cat([hidden_states[:, :1], hidden_states[:, 1:] + hidden_states[:, :-1]], dim=1)
        return forward(self, hidden_states, *args, **kwargs)

    forward = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", with_memory)
    save_untied("llama", {}, tmp_path)
    with pytest.raises(ModelLoadError, match=r"type 'llama' are not supported: .* otherwise than with its own"):
        make_engine(tmp_path)
    monkeypatch.setattr(self_check.Parts, "require_equal", lambda *_: None)
    make_engine(tmp_path)


ROUNDED: dict[str, tuple[str, dict[str, Any]]] = {
    "without sinks": ("gpt_oss", {"s_aux": lambda sinks: None}),
    "without limits of scores": ("gemma2", {"softcap": lambda limit: None}),
    "a narrower window": ("gpt_oss", {"sliding_window": lambda window: window and window - 1}),
    "a wider window": ("olmo3", {"sliding_window": lambda window: window and window + 1}),
    "other scaling": ("deepseek_v3", {"scaling": lambda scaling: scaling * 1.1}),
}


@pytest.mark.parametrize("change", ROUNDED)
def test_attention_that_differs_is_refused_in_bfloat16_too(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(*given: Any, **terms: Any) -> Any:
        return paged_attention(*given, **(terms | {name: edit(terms.get(name)) for name, edit in edits.items()}))

    kind, edits = ROUNDED[change]
    save_untied(kind, OFTEN[kind], tmp_path)
    load_rounded(tmp_path)
    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION_NAME, attend)
    with pytest.raises(ModelLoadError, match=r"layers\.\d\.self_attn otherwise than with its own"):
        load_rounded(tmp_path)


def load_rounded(folder: Path) -> None:
    TransformersRunner(ModelConfig(path=str(folder), device="cpu", dtype="bfloat16"), ENGINE)


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_rounding_does_not_add_up_over_the_layers(kind: str, tmp_path: Path) -> None:
    """Each layer of experts with weights this large chooses by the rounding of the layers before it."""
    save_untied(kind, OFTEN[kind] | {"initializer_range": 0.5, "num_hidden_layers": 32}, tmp_path)
    load_rounded(tmp_path)


def test_a_checkpoint_in_mxfp4_answers_as_its_numbers_in_float32(tmp_path: Path) -> None:
    """As gpt-oss is published; that they fit into memory is asked of what they become."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    save_untied("gpt_oss", OFTEN["gpt_oss"] | {"intermediate_size": 64}, tmp_path)
    generator = torch.Generator().manual_seed(1)
    unpacked = weights_bytes(tmp_path, "float32")

    def pack(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = weights.pop(name).shape
            size = (experts, outputs, inputs // 32)
            blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(122, 125, size, dtype=torch.uint8, generator=generator)
            weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}

    edit_weights(tmp_path, pack)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert weights_bytes(tmp_path, "float32") >= unpacked
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=Mxfp4Config(dequantize=True), trust_remote_code=False
    ).eval()
    assert num_as_generate(make_engine(tmp_path), reference) >= 8


FULL_SIZES = {
    "deepseek_v3": 70_272,
    "gemma3_text": 106_496,
    "gemma4_text": 143_360,
    "gpt_oss": 73_728,
    "jetmoe": 196_608,
    "longcat_flash": 64_512,
}


@pytest.mark.parametrize("kind", FULL_SIZES)
def test_a_model_of_full_size_answers_within_seconds(kind: str) -> None:
    from transformers import AutoConfig

    began_s = time.process_time()
    spec = ask(AutoConfig.for_model(kind)).shape.cache_spec(16, "bfloat16", 1)
    print(f"{kind}: {time.process_time() - began_s:.1f} s of processor time")
    assert spec.block_bytes == 16 * FULL_SIZES[kind]
    assert time.process_time() - began_s < 5 * 5


GRANITE4 = {
    "layer_types": ["attention"] * 4,
    "mamba_chunk_size": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
}
"""Without a layer of Mamba."""


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"architectures": [5]}, "architectures in .* must be a list of names"),
        ({"rope_parameters": {"rope_type": []}}, "RoPE of type .* is not supported"),
        ({"per_layer_config": {"0": {"num_hidden_layers": 2}}}, "config.json in .* cannot be read as a model"),
        (
            {"part_config": {"depth": 10**9}},
            "does not fit .* 1000000000 as depth of part_config",
        ),
        ({"decoder": {}}, "has decoder, .* models of type 'llama' have none"),
        ({"generator": {}}, "has generator, .* models of type 'llama' have none"),
        ({"sliding_window": 0}, "says 0 as sliding_window; it must be 1 or more"),
        ({"vocab_size": 1}, "says 1 as vocab_size; it must be 2 or more"),
        (
            {"architectures": ["Idefics2ForConditionalGeneration"]},
            "describes a Idefics2ForConditionalGeneration; the models of type 'llama' that .* are LlamaForCausalLM",
        ),
        (
            {"architectures": ["BertGenerationDecoder"]},
            "holds a BertGenerationDecoder; this version runs models that .*, whose architectures end in ForCausalLM, ",
        ),
    ],
)
def test_what_a_config_contradicts_is_a_sentence(fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    save_untied("llama", {}, tmp_path)
    edit_config(tmp_path, **fields)
    with pytest.raises(ModelLoadError, match=sentence):
        make_engine(tmp_path)


def test_a_window_that_is_not_used_may_be_0(tmp_path: Path) -> None:
    save_untied("qwen2_moe", OTHERS["qwen2_moe"], tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["sliding_window"] == 0, "as transformers writes it"
    make_engine(tmp_path)


def test_a_second_embedding_that_is_smaller_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """Else a client's token would fail a step."""
    save_untied("gemma4_text", GEMMA4 | {"vocab_size_per_layer_input": VOCAB_SIZE - 1}, tmp_path)
    with pytest.raises(ModelLoadError, match="cannot compute a first step: IndexError"):
        make_engine(tmp_path)


def test_quantized_weights_are_not_taken_for_plain_ones(tmp_path: Path) -> None:
    save_untied("llama", {}, tmp_path)
    edit_weights(tmp_path, quantize_to_fp8)
    with pytest.raises(ModelLoadError, match="which belong to quantized weights, and its config"):
        make_engine(tmp_path)


def test_a_window_of_the_whole_length_and_an_infinite_number_are_read(tmp_path: Path) -> None:
    """As Phi-3.5-MoE and Granite 4 are saved."""
    save_untied("phimoe", OTHERS["phimoe"], tmp_path / "phimoe")
    edit_config(tmp_path / "phimoe", sliding_window=512)
    save_untied("granitemoehybrid", GRANITE4, tmp_path / "granite")
    assert "__float__" in (tmp_path / "granite" / "config.json").read_text()
    for folder in (tmp_path / "phimoe", tmp_path / "granite"):
        assert num_as_generate(make_engine(folder), load_reference(folder)) >= 8


def test_latents_are_never_expanded(tmp_path: Path) -> None:
    """A page holds the latent and the rotated part, and a step multiplies no key of the history."""
    save_untied("deepseek_v3", LATENT, tmp_path)
    engine = make_engine(tmp_path)
    (group,) = engine.runner.spec.groups
    assert (group.num_kv_heads, group.k_dim, group.v_dim) == (1, 32, 8)
    rank: ModelRank = engine.runner.rank  # type: ignore[attr-defined]
    widths = list[int]()
    for name, module in rank.model.named_modules():
        if name.endswith("kv_b_proj"):
            module.register_forward_pre_hook(lambda module, given: widths.append(given[0].shape[-2]))
    answers(engine, [make_spec("one", prompts()[3], 4, ignore_eos=True)], 0)
    assert not widths


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_prompts_are_those_of_the_model(kind: str, tmp_path: Path) -> None:
    save_untied(kind, KINDS[kind], tmp_path)
    reference, tokens = load_reference(tmp_path), prompts()[3]
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    rank: ModelRank = make_engine(tmp_path).runner.rank  # type: ignore[attr-defined]
    spec = rank.cache.spec
    found = torch.cat([rank.compute(step, lambda *_: None) for step in self_check.steps(tokens[:50], spec)])
    assert float((found.log_softmax(-1) - expected[:50]).abs().max()) < 1e-4

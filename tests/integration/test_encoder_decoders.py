"""Models with an encoder and a decoder answer like transformers' `generate`: in an engine, and in a cluster."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from baton.config import EngineConfig, ModelConfig
from baton.errors import ConfigError, InvalidRequest, ModelLoadError
from baton.model_files import decoder_start_ids
from engine.core.engine import Engine
from engine.core.faults import Fault
from engine.core.sequence import Purpose
from engine.model.pages import Pages
from engine.runners import make_runner
from tests.integration.cluster import running_cluster
from tests.integration.test_engine_models import (
    VOCAB_SIZE,
    Reference,
    answers,
    engine_of,
    make_spec,
    same_up_to_near_ties,
)
from tests.integration.test_families_cluster import Served, answered
from tests.support.asking import metric, sampling
from tests.support.model_folders import backend

pytestmark = [pytest.mark.first, pytest.mark.integration]

OF_T5 = {
    "d_ff": 128,
    "d_kv": 16,
    "d_model": 64,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "num_layers": 3,
    "pad_token_id": 0,
}
OF_BART = {
    "bos_token_id": 0,
    "d_model": 64,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "decoder_layers": 3,
    "decoder_start_token_id": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "encoder_layers": 2,
    "eos_token_id": 2,
    "forced_eos_token_id": None,
    "max_position_embeddings": 1024,
    "pad_token_id": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "t5": OF_T5,
    "bart": OF_BART,
    "mt5": OF_T5,
    "mbart": OF_BART,
    "pegasus": OF_BART | {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
    "marian": OF_BART | {"decoder_start_token_id": 511, "decoder_vocab_size": VOCAB_SIZE, "pad_token_id": 511},
    "m2m_100": OF_BART,
}
MAX_LEN = 1000
NUM_TOKENS = 800
"""Tokens of each answer in a cluster, in the middle of which a worker leaves or dies: these models are quick."""
ENGINE = EngineConfig(num_blocks=128, max_num_batched_tokens=256, max_num_seqs=8, max_model_len=256)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def saved(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        torch.manual_seed(4)
        config = AutoConfig.for_model(kind, vocab_size=VOCAB_SIZE, tie_word_embeddings=False, **KINDS[kind])
        model = AutoModelForSeq2SeqLM.from_config(config, trust_remote_code=False).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.mul_(4.0)  # so that answers have many different tokens
                else:
                    weight.add_(0.1 * torch.randn_like(weight))
        model.save_pretrained(folder)
        backend(tuple(f"<|{number}|>" for number in range(VOCAB_SIZE - 256))).save(str(folder / "tokenizer.json"))
        return folder

    return saved


def prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, 500) for _ in range(length)] for length in (1, 17, 16, 130, 61)]


def references_of(folder: Path, num_tokens: int) -> list[Reference]:
    """What `generate` says to each prompt, and how sure it is of each token."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=False).eval()
    model.generation_config.eos_token_id = None
    start, found = decoder_start_ids(folder), list[Reference]()
    for prompt in prompts():
        generated = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens + len(start) - 1,
            do_sample=False,
            num_beams=1,
            return_dict_in_generate=True,
            output_scores=True,
        )
        scores = generated.scores[len(start) - 1 :]
        tops = [row[0].topk(2).values for row in scores]
        margins = [float(top[0] - top[1]) for top in tops]
        found.append(Reference(generated.sequences[0, len(start) :].tolist(), margins))
    return found


def make_engine(folder: Path, config: EngineConfig = ENGINE) -> Engine:
    return engine_of(make_runner(ModelConfig(path=str(folder), device="cpu"), config, folder / "cache"), config)


def with_start(folder: Path, prompt: list[int]) -> list[int]:
    return [*prompt, *decoder_start_ids(folder)]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("t5", "bart") else pytest.mark.full) for kind in KINDS]
)
def test_a_tiny_model_answers_as_generate(kind: str, folder_of: Callable[[str], Path]) -> None:
    """In mixed batches, over pages that were full of something else, and again when blocks are used again."""
    folder = folder_of(kind)
    engine = make_engine(folder)
    for group in engine.runner.caches[0].groups:
        group.fill_(float("nan"))
    references = references_of(folder, 12)
    for round_ in range(2):
        specs = [
            make_spec(f"{round_}-{i}", with_start(folder, prompt), 12, ignore_eos=True)
            for i, prompt in enumerate(prompts())
        ]
        got, _ = answers(engine, specs, steps_between=2)
        same = [same_up_to_near_ties(one, reference) for one, reference in zip(got, references, strict=True)]
        print(f"{kind}: {same}, {len({token for one in got for token in one})} different tokens")
        assert sum(same) >= 4
    assert len({token for one in got for token in one}) >= 6


def test_forced_tokens_follow_the_start_as_in_generate(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_of("bart")
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"decoder_start_token_id": 2, "forced_bos_token_id": 7}')
    assert decoder_start_ids(tmp_path) == (2, 7)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, trust_remote_code=False).eval()
    prompt = prompts()[1]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None)[0].tolist()
    assert expected[:2] == [2, 7]
    spec = make_spec("forced", with_start(tmp_path, prompt), 8, ignore_eos=True)
    ((got,), _) = answers(make_engine(tmp_path), [spec], steps_between=0)
    assert got == expected[2:]


def test_an_answer_goes_on_from_its_tokens_and_after_a_preemption(folder_of: Callable[[str], Path]) -> None:
    """A part then begins with the prompt and has several tokens of the answer."""
    folder = folder_of("t5")
    references = references_of(folder, 40)
    tight = make_engine(folder, replace(ENGINE, num_blocks=14, output_reservation=8))
    specs = [make_spec(f"tight-{i}", with_start(folder, prompts()[i]), 40, ignore_eos=True) for i in (0, 1, 2, 4)]
    got, _ = answers(tight, specs, steps_between=0)
    assert tight.load().preemptions > 0
    for one, index in zip(got, (0, 1, 2, 4), strict=True):
        assert same_up_to_near_ties(one, references[index])
    known = references[4].tokens[:10]
    spec = replace(
        make_spec("resumed", with_start(folder, prompts()[4]) + known, 40, ignore_eos=True),
        num_prompt_tokens=len(prompts()[4]) + 1,
    )
    ((rest,), _) = answers(make_engine(folder), [spec], steps_between=0)
    assert known + rest == references[4].tokens


def test_a_step_that_fails_is_computed_again(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of("t5")
    engine, num_calls = make_engine(folder), 0
    write = Pages.write

    def failing(self: Pages, *given: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls in (3, 40):
            raise torch.OutOfMemoryError("injected")
        write(self, *given)

    monkeypatch.setattr(Pages, "write", failing)
    monkeypatch.setattr("engine.model.logits_runner.fault_of", lambda error: Fault.OUT_OF_MEMORY)
    specs = [make_spec(f"{i}", with_start(folder, prompt), 12, ignore_eos=True) for i, prompt in enumerate(prompts())]
    got, _ = answers(engine, specs, steps_between=0)
    assert num_calls > 40
    assert sum(map(same_up_to_near_ties, got, references_of(folder, 12))) >= 4


def test_pages_that_are_written_to_other_places_are_noticed_at_load(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Pages.write
    monkeypatch.setattr(
        Pages, "write", lambda self, table, begin, *values: write(self, table, begin and begin - 1, *values)
    )
    with pytest.raises(ModelLoadError, match="models of type 't5' are not supported: over the KV cache"):
        make_engine(folder_of("t5"))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"tensor_parallel": 2}, "engine.tensor_parallel is not supported by models with an encoder and a decoder"),
        ({"batch_invariant": True}, "engine.batch_invariant is not supported by models with an encoder and a decoder"),
        ({"max_adapters": 2}, "engine.max_adapters is not supported by models with an encoder and a decoder"),
        ({"kv_dtype": "fp8"}, "engine.kv_dtype fp8 is not supported by models with an encoder and a decoder"),
    ],
)
def test_settings_without_a_meaning_are_refused(
    values: dict[str, Any], sentence: str, folder_of: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_engine(folder_of("t5"), replace(ENGINE, **values))


def test_what_an_encoder_cannot_do_is_refused(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("t5")
    engine = make_engine(folder)
    spec = make_spec("r", with_start(folder, [5, 6]), 4, ignore_eos=True)
    scored = replace(spec, sampling=replace(spec.sampling, prompt_logprobs=0))
    with pytest.raises(InvalidRequest, match="prompt_logprobs needs a model that continues its prompt"):
        engine.add(scored, Purpose.GENERATE, 0.0)
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        engine.add(make_spec("r", with_start(folder, []), 4, ignore_eos=True), Purpose.GENERATE, 0.0)


def test_an_encoder_of_speech_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("whisper", decoder_start_token_id=3).save_pretrained(tmp_path)
    save_file({str(number): torch.zeros(1) for number in range(8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="models of type 'whisper' have an encoder, whose input is not text alone"):
        make_engine(tmp_path)


# -- a cluster ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["t5", pytest.param("bart", marks=pytest.mark.full)])
def served(request: pytest.FixtureRequest, folder_of: Callable[[str], Path]) -> Iterator[Served]:
    folder = folder_of(request.param)
    with running_cluster(
        *("--model", str(folder)),
        cluster_decode="2",
        engine_num_blocks="320",
        engine_max_model_len=str(MAX_LEN),
        engine_max_num_batched_tokens="1100",
        router_mode="disaggregated",
        router_slo_classes='{"default": {"ttft_ms": 600000, "itl_ms": 600000}}',
    ) as cluster:
        yield Served(
            cluster=cluster,
            references=references_of(folder, NUM_TOKENS),
            prompts=prompts(),
            num_tokens=NUM_TOKENS,
        )


def test_a_cluster_answers_with_the_kv_that_was_transferred(served: Served) -> None:
    for prompt, reference in zip(prompts(), served.references, strict=True):
        got = served.cluster.generate(token_ids=prompt, sampling=sampling(12))
        assert got.timing.mode == "disaggregated"
        assert got.usage.prompt_tokens == len(prompt) + 1, "and the start of the decoder"
        assert same_up_to_near_ties(got.token_ids, Reference(reference.tokens[:12], reference.margins[:12]))
    text = served.cluster.generate(text="<|5|><|6|>", sampling=sampling(4))
    assert len(text.token_ids) == 4
    assert metric(served.cluster, "baton_transfer_bytes_total") > 0


def test_what_has_no_meaning_for_an_encoder_is_refused_by_the_router(served: Served) -> None:
    with pytest.raises(grpc.RpcError, match="prompt_logprobs needs a model that continues its prompt"):
        served.cluster.generate(token_ids=[5, 6], sampling=sampling(4) | {"prompt_logprobs": 1})


def test_the_start_of_the_decoder_counts_among_the_tokens_of_a_prompt(served: Served) -> None:
    """Also where a prompt is cut to what fits."""
    too_long = [5 + number % 400 for number in range(MAX_LEN - 1)]
    with pytest.raises(grpc.RpcError, match=f"{MAX_LEN - 1} tokens"):
        served.cluster.generate(token_ids=too_long, sampling=sampling(1))
    cut = served.cluster.generate(token_ids=too_long, sampling=sampling(6), truncate_prompt_tokens=-1)
    assert (cut.usage.prompt_tokens, len(cut.token_ids)) == (MAX_LEN - 6, 6)


@pytest.mark.chaos
def test_answers_go_on_as_a_worker_drains(served: Served) -> None:
    begun, others = answered(served, psutil.Process.terminate)
    assert not any(stream.retries for stream in begun + others)


@pytest.mark.chaos
def test_answers_go_on_as_a_worker_dies(served: Served) -> None:
    begun, others = answered(served, psutil.Process.kill)
    assert all(stream.retries for stream in begun)
    assert not any(stream.retries for stream in others)

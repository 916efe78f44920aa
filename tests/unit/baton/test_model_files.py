"""What a model's folder says of itself is read once, and the same, for routers and workers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from baton.errors import ModelLoadError
from baton.model_files import require_runnable, unapplied_recommendations
from baton.sampling import SamplingParams
from baton.tokenizer_file import end_of_sequence_ids
from deploy.models.folder import check_folder
from router.prompt import Tokenizer


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        if value is not None:
            (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer of four tokens, of which none is said to end an answer."""
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "<end>": 2, "?": 3}, unk_token="?")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    return write(tmp_path, config={})


END = {"eos_token": "<end>"}


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": [2, 5]}, {"eos_token_id": 7}, END, (2, 5)),
        ({"eos_token_id": 5}, {}, END, (5, 2)),
        ({"eos_token_id": 5}, {}, None, (5,)),
        ({"temperature": 1.0}, {"eos_token_id": 7}, END, (7, 2)),
        (None, {"eos_token_id": 0}, END, (0, 2)),
        (None, {"text_config": {"eos_token_id": 6}, "eos_token_id": 7}, END, (6, 2)),
        (None, {"eos_token_id": None}, END, (2,)),
        (None, {}, {"eos_token": {"content": "<end>"}}, (2,)),
        ({"eos_token_id": []}, {}, END, (2,)),
        ({"eos_token_id": [5.0, 2]}, {}, None, (5, 2)),
        ({"eos_token_id": -1}, {"eos_token_id": 7}, END, (2,)),
        (None, {}, {"eos_token": "<new>"}, (4,)),
        (None, {}, None, ()),
    ],
)
def test_end_of_sequence_ids(
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    tokenizer: dict[str, Any] | None,
    expected: tuple[int, ...],
    folder: Path,
) -> None:
    write(folder, generation_config=generation, config=config, tokenizer_config=tokenizer)
    assert end_of_sequence_ids(folder) == expected
    assert Tokenizer.load(folder).eos_ids == expected


def test_a_folder_without_a_tokenizer_may_name_the_end_all_the_same(tmp_path: Path) -> None:
    write(tmp_path, config={"eos_token_id": 3}, tokenizer_config=END)
    assert end_of_sequence_ids(tmp_path) == (3,)
    write(tmp_path, config={})
    assert end_of_sequence_ids(tmp_path) == ()


@pytest.mark.parametrize("said", ["</s>", 2.5, True, [2, "</s>"], {"id": 2}])
def test_an_end_that_is_no_token_id_is_refused(said: object, folder: Path) -> None:
    write(folder, generation_config={"eos_token_id": said})
    with pytest.raises(
        ModelLoadError, match=r"generation_config\.json names .* as eos_token_id; it must be a token id"
    ):
        end_of_sequence_ids(folder)


RECOMMENDED = {
    "_from_model_config": True,
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [2, 3],
    "pad_token_id": 3,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "transformers_version": "4.37.0",
}


def test_what_is_recommended_and_not_applied_is_named_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, generation_config=RECOMMENDED | {"encoder_repetition_penalty": 1.05, "suppress_tokens": [3, 4]})
    assert unapplied_recommendations(folder) == {"encoder_repetition_penalty": 1.05, "suppress_tokens": [3, 4]}
    assert Tokenizer.load(folder).default_sampling.top_k == 20
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert said.getMessage().startswith(
        f"{folder}/generation_config.json recommends encoder_repetition_penalty 1.05, suppress_tokens [3, 4], which "
        "this version does not apply"
    )


@pytest.mark.parametrize(
    "neutral",
    [
        {},
        {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": None, "typical_p": 1},
    ],
)
def test_what_makes_no_difference_is_not_named(
    neutral: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, generation_config=RECOMMENDED | neutral)
    Tokenizer.load(folder)
    assert not caplog.records


def test_recommendations_for_the_draw_are_defaults(folder: Path) -> None:
    recommended = {"repetition_penalty": 1.05, "typical_p": 0.9, "min_new_tokens": 5, "bad_words_ids": [[1], [2, 3]]}
    write(folder, generation_config=RECOMMENDED | recommended)
    params = Tokenizer.load(folder).default_sampling
    assert (params.repetition_penalty, params.typical_p, params.min_tokens) == (1.05, 0.9, 5)
    assert params.bad_word_ids == ((1,), (2, 3))
    write(folder, generation_config=RECOMMENDED | {"bad_words_ids": [[1], [2, 10**6]]})
    assert Tokenizer.load(folder).default_sampling.bad_word_ids == ((1,),), "what the model has not cannot be said"
    assert unapplied_recommendations(folder) == {}


def test_recommendations_for_the_draw_are_no_defaults_of_models_that_denoise(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers refuse them, and with them every request."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "diffusion_gemma"}))
    write(folder, generation_config=RECOMMENDED)
    assert Tokenizer.load(folder).default_sampling == SamplingParams()
    assert "recommends temperature 0.7, top_p 0.8, top_k 20, which this version does not apply" in caplog.text


@pytest.mark.parametrize("wrong", [{"bad_words_ids": 3}, {"bad_words_ids": [[]]}, {"repetition_penalty": "big"}])
def test_a_recommendation_that_cannot_be_is_named_when_the_model_loads(wrong: dict[str, Any], folder: Path) -> None:
    write(folder, generation_config=RECOMMENDED | wrong)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json recommends invalid values"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_repeat_ngram_size", 3),
        ("forced_eos_token_id", 2),
        ("forced_bos_token_id", 0),
        ("begin_suppress_tokens", [1]),
        ("num_beams", 4),
        ("stop_strings", ["\n"]),
        ("do_sample", False),
    ],
)
def test_each_recommendation_that_changes_an_answer_is_named(name: str, value: object, folder: Path) -> None:
    write(folder, generation_config=RECOMMENDED | {name: value})
    assert unapplied_recommendations(folder) == {name: value}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            "holds a Qwen3ForSequenceClassification; this version runs",
        ),
        ({"architectures": ["Qwen3Model"]}, "holds a Qwen3Model; this version runs models that continue a text"),
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "holds a model with an encoder and a decoder, and no file names its decoder_start_token_id",
        ),
        ({"model_type": None}, "has no model_type"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"are quantized \(gptq\), which Baton's own engine does not run; .* or vLLM",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, r"are quantized \(awq\)"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"are quantized \(bitsandbytes\)"),
        ({"quantization_config": {"load_in_4bit": True}}, r"are quantized \(bitsandbytes\)"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, r"are quantized \(compressed-tensors\)"),
        ({"compression_config": {"format": "int-quantized"}}, r"are quantized \(unknown\)"),
        ({"quantization_config": {"quant_method": "of-tomorrow"}}, r"are quantized \(of-tomorrow\)"),
        ({"quantization_config": "gptq"}, "has a quantization_config that is no JSON object"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_loaded(
    config: dict[str, Any], sentence: str, folder: Path
) -> None:
    """Also by whoever starts a cluster: there are not even weights in this folder."""
    write(folder, config={"model_type": "qwen3"} | config)
    for refuse in (require_runnable, check_folder):
        with pytest.raises(ModelLoadError, match=sentence) as refusal:
            refuse(folder)
        assert str(folder) in str(refusal.value)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": None, "quantization_config": None},
        {"architectures": ["Qwen3ForCausalLM"]},
        {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_what_can_run_is_not_refused(config: dict[str, Any], folder: Path) -> None:
    require_runnable(write(folder, config={"model_type": "qwen3"} | config))

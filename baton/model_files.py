"""The JSON files of a model's folder, read the same way by routers and workers.

Transformers is not used: routers do not have it, and its import takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from baton.errors import ModelLoadError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CAUSAL = "ForCausalLM"
RUNNABLE_QUANTIZATIONS = ("fp8",)
"""Quantization methods whose weights transformers can restore by itself."""
UNAPPLIED_UNLESS: dict[str, Any] = {
    "begin_suppress_tokens": None,
    "constraints": None,
    "diversity_penalty": 0.0,
    "do_sample": True,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_new_tokens": None,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "remove_invalid_values": False,
    "sequence_bias": None,
    "stop_strings": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": None,
    "watermarking_config": None,
}
"""Fields of generation_config.json that `generate` applies and Baton does not -> their neutral values."""


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The object that a file holds; none where the file is missing, unless it is required.

    Raises:
        ModelLoadError: it cannot be read.
    """
    if not required and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"Cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object.")
    return value


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Returns the text of each token that a model's tokenizer knows, with its id; empty: it has no tokenizer.json."""
    return read_tokenizer(folder).get_vocab() if (folder / "tokenizer.json").is_file() else {}


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Raises ModelLoadError: tokenizer.json is missing or cannot be read."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(f"The model folder {folder} has no tokenizer.json.")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower class
        raise ModelLoadError(f"Cannot read {path}: {error}") from error


def of_text(config: Mapping[str, Any], name: str) -> Any:
    """A field of the language model's configuration, which multimodal models nest."""
    nested = config.get("text_config")
    value = nested.get(name) if isinstance(nested, dict) else None
    return config.get(name) if value is None else value


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of the tokenizer's special tokens, by the names that chat templates use."""
    config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    extra = config.get("extra_special_tokens")
    named = {name: config.get(name) for name in SPECIAL_NAMES} | (extra if isinstance(extra, dict) else {})
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def end_of_sequence_ids(folder: Path) -> tuple[int, ...]:
    """The token ids that end an answer, from generation_config.json, else config.json, else the tokenizer.

    generation_config.json may list several, such as the end of a turn beside the end of a text.

    Raises:
        ModelLoadError: a file cannot be read, or names something else than token ids.
    """
    for name in ("generation_config.json", "config.json"):
        said = of_text(read_json(folder / name), "eos_token_id")
        ids = said if isinstance(said, list) else [] if said is None else [said]
        if not all(type(token_id) is int for token_id in ids):
            raise ModelLoadError(f"{folder / name} names {said!r} as eos_token_id; it must be a token id or several.")
        if ids:
            return tuple(ids)
    text = special_tokens(folder).get("eos_token")
    if text is None or not (folder / "tokenizer.json").is_file():
        return ()
    token_id = read_tokenizer(folder).token_to_id(text)
    return () if token_id is None else (token_id,)


def unapplied_recommendations(folder: Path) -> dict[str, Any]:
    """Recommendations of generation_config.json that this version does not apply, by name."""
    generation = read_json(folder / "generation_config.json")
    said = {name: generation.get(name) for name in UNAPPLIED_UNLESS}
    return {name: value for name, value in said.items() if value not in (None, [], UNAPPLIED_UNLESS[name])}


def require_runnable(folder: Path) -> None:
    """Refuses a checkpoint that is no causal language model, or has a quantization that does not run.

    Raises:
        ModelLoadError: it is such a checkpoint; the message names its kind.
    """
    config = read_json(folder / "config.json", required=True)
    architectures = config.get("architectures") or []
    if architectures and not any(str(name).endswith(CAUSAL) for name in architectures):
        raise ModelLoadError(
            f"{folder} holds a {architectures[0]}, which does not generate text; this version runs checkpoints of "
            f"architectures that end in {CAUSAL}"
        )
    quantization = of_text(config, "quantization_config") or of_text(config, "compression_config")
    if not quantization:
        return
    if not isinstance(quantization, dict):
        raise ModelLoadError(f"{folder / 'config.json'} has a quantization_config that is no JSON object")
    by_bits = any(quantization.get(name) for name in ("load_in_4bit", "load_in_8bit"))
    method = quantization.get("quant_method") or ("bitsandbytes" if by_bits else "unknown")
    if method not in RUNNABLE_QUANTIZATIONS:
        raise ModelLoadError(
            f"the weights in {folder} are quantized ({method}), which this version does not run; use the model's "
            f"checkpoint in float32, bfloat16 or float16, or one quantized with {', '.join(RUNNABLE_QUANTIZATIONS)}"
        )

"""JSON files of a model's folder, read in the same way by routers and workers.

Transformers is not used: routers do not have it, and its import takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from baton.errors import ModelLoadError
from baton.plain_files import MAX_BYTES, open_plain, parse_json, read_plain

CAUSAL = "ForCausalLM"
CONTINUES_TEXT = (CAUSAL, "ForConditionalGeneration", "LMHeadModel", "ForBlockDiffusion")
"""Ends of the names of architectures that may continue a text; the worker asks the model itself."""
DIFFUSION = ("diffusion_gemma",)
"""Types of models that draw their response by diffusion."""
RUNNABLE_QUANTIZATIONS = ("fp8", "mxfp4")
"""Quantization methods whose weights transformers can dequantize by itself."""
ELSEWHERE = ("configuration_files", "transformers_weights", "fusion_config")
"""Fields of config.json that make transformers read files that Baton has not checked, or change its classes."""
MAX_LENGTH = 2**24
MOST = {
    "vocab_size": 2**21,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "head_dim": 2**14,
    "max_position_embeddings": MAX_LENGTH,
    "n_positions": MAX_LENGTH,
    "max_sequence_length": MAX_LENGTH,
    "seq_length": MAX_LENGTH,
    "n_ctx": MAX_LENGTH,
}
"""Sizes in config.json that determine allocations before a weight is read, with the largest accepted values."""
COUNTED, MOST_COUNTED = "num_", 2**16
"""Prefix and limit of numbers of layers, heads or labels; transformers creates an object for each of them."""
BY_LAYER = frozenset({"intermediate_size"})
"""Sizes that may be a list with one for each layer, as numbers may."""
NEVER_NONE = frozenset({"num_attention_heads", "num_hidden_layers", "num_key_value_heads"})
"""Numbers that are at least 1 in every model."""
BYTES_OF = {"tokenizer.json": 2**28, "model.safetensors.index.json": 2**26}
"""Files that may be longer than `MAX_BYTES`."""
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
    """Return the object in a JSON file; empty if the file is missing, unless it is required.

    Raises:
        ModelLoadError: it cannot be read.
    """
    if not required and not path.is_file():
        return {}
    try:
        value = parse_json(read_plain(path))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"Cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must contain a JSON object")
    return value


def of_text(config: Mapping[str, Any], name: str) -> Any:
    """Return a field of the language model's configuration, which multimodal models nest."""
    nested = config.get("text_config")
    value = nested.get(name) if isinstance(nested, dict) else None
    return config.get(name) if value is None else value


def whole(value: Any) -> Any:
    """Return a float such as 50.0, which some languages write, as an integer; other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def unapplied_recommendations(folder: Path) -> dict[str, Any]:
    """Return the recommendations of generation_config.json that this version does not apply, by name."""
    generation = read_json(folder / "generation_config.json")
    applied = {"forced_bos_token_id"} if decoder_start_ids(folder) else set()
    said = {name: generation.get(name) for name in UNAPPLIED_UNLESS if name not in applied}
    return {name: value for name, value in said.items() if value not in (None, [], UNAPPLIED_UNLESS[name])}


def decoder_start_ids(folder: Path) -> tuple[int, ...]:
    """Return the tokens with which the decoder of a model with an encoder starts; empty: the model has no encoder.

    These are `decoder_start_token_id` and `forced_bos_token_id`, with which `generate` begins the answer.

    Raises:
        ModelLoadError: the model has an encoder, and its files name no such token, or something other than token ids.
    """
    config, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json")
    if config.get("is_encoder_decoder") is not True:
        return ()
    found = []
    for name in ("decoder_start_token_id", "forced_bos_token_id"):
        said = config.get(name) if generation.get(name) is None else generation[name]
        if said is None and name == "decoder_start_token_id":
            said = config.get("bos_token_id")
            if said is None:
                raise ModelLoadError(
                    f"{folder} holds a model with an encoder and a decoder, and no file names its "
                    "decoder_start_token_id; add it to generation_config.json"
                )
        if said is not None:
            if type(said := whole(said)) is not int or said < 0:
                raise ModelLoadError(f"{folder} names {said!r:.40} as {name}; it must be a token id")
            found.append(said)
    return tuple(found)


def denoises(folder: Path) -> bool:
    """Return whether a model draws its response by diffusion, in blocks of tokens."""
    return read_json(folder / "config.json").get("model_type") in DIFFUSION


def require_runnable(folder: Path, *, by_vllm: bool = False) -> None:
    """Reject a folder that this version cannot run, as far as its text files show it.

    Rejected are files that are not plain files of the folder, and checkpoints that do not continue text, or have an
    unsupported quantization or an adapter. Whether attention is supported, a worker asks the model (`engine.model`).

    Args:
        by_vllm: vLLM loads the weights (`engine.runner`). It decides which quantizations it supports.

    Raises:
        ModelLoadError: it is such a checkpoint; the message names its kind.
    """
    _require_plain(folder)
    path = folder / "config.json"
    config = read_json(path, required=True)
    _require_type(path, config)
    _require_sizes(path, config)
    if (folder / "adapter_config.json").is_file():
        raise ModelLoadError(
            f"{folder} holds an adapter (adapter_config.json) and not a model; serve the model that it was trained "
            "for, and add the adapter to that (docs/adapters.md)"
        )
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ModelLoadError(f"architectures in {path} must be a list of names")
    has_encoder = bool(decoder_start_ids(folder))
    if architectures and not (has_encoder or any(str(name).endswith(CONTINUES_TEXT) for name in architectures)):
        raise ModelLoadError(
            f"{folder} holds a {architectures[0]}; this version runs models that continue a text token by token, "
            f"whose architectures end in {', '.join(CONTINUES_TEXT)}"
        )
    quantization = of_text(config, "quantization_config") or of_text(config, "compression_config")
    if not quantization:
        return
    if not isinstance(quantization, dict):
        raise ModelLoadError(f"{path} has a quantization_config that is no JSON object")
    by_bits = any(quantization.get(name) for name in ("load_in_4bit", "load_in_8bit"))
    method = quantization.get("quant_method") or ("bitsandbytes" if by_bits else "unknown")
    if method not in RUNNABLE_QUANTIZATIONS and not by_vllm:
        raise ModelLoadError(
            f"the weights in {folder} are quantized ({method}), which Baton's own engine does not run; use the model's "
            f"checkpoint in float32, bfloat16 or float16, one quantized with {', '.join(RUNNABLE_QUANTIZATIONS)}, or "
            "vLLM (docs/engines.md)"
        )


def named_code(config: Mapping[str, Any]) -> str:
    """Return the custom code that a configuration names, such as `modeling_x.XForCausalLM`; empty: none."""
    named = config.get("auto_map")
    if not named:
        return ""
    found = list(named.values()) if isinstance(named, dict) else [named]
    return str(found[-1] if found else named)


def _require_type(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a configuration without a model type, or with fields that refer to other files."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        said = "no model_type" if kind is None else "a model_type that is not a string"
        raise ModelLoadError(f"{path} has {said}; give the config.json that belongs to the weights")
    for name in ELSEWHERE:
        if config.get(name) is not None:
            raise ModelLoadError(f"{path} has {name}, which this version does not follow; remove it")


def _require_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for a size in the configuration that is out of range."""
    for values in (config, *(nested for nested in config.values() if isinstance(nested, dict))):
        for name, value in values.items():
            most = MOST.get(name, MOST_COUNTED if name.startswith(COUNTED) else 0)
            least = int(name in MOST or name in NEVER_NONE)
            by_layer = isinstance(value, list) and (name in BY_LAYER or name.startswith(COUNTED))
            several = value if by_layer else [value]
            wrong = [each for each in several if not (type(each) is int and least <= each <= most)]
            if most and value is not None and wrong:
                raise ModelLoadError(
                    f"{path} says {str(wrong[0])[:40]} as {name}; it must be a whole number from {least} to {most}"
                )


def _require_plain(folder: Path) -> None:
    """Reject a text file that is a pipe, too long, or a link to a file outside the folder.

    A chat template that links to a file of the user would show it to every client; see `open_own`.

    Raises:
        ModelLoadError: the first such file.
    """
    for path in _text_files(folder):
        try:
            with open_own(path, BYTES_OF.get(path.name, MAX_BYTES)):
                pass
        except OSError as error:
            raise ModelLoadError(f"Cannot read {path}: {error}") from error


@contextmanager
def open_own(path: Path, most: int) -> Iterator[BinaryIO]:
    """Open a file of a folder for reading.

    Links to a file of the same name are allowed, since folders share files in this way, and the hub's cache links to
    its own blobs.

    Args:
        most: maximum size, in bytes.

    Raises:
        OSError: it cannot be read, is not a regular file, is too long, or is a link to a file outside its folder.
    """
    folder = path.parent
    own = (folder.resolve(), (folder.absolute().parent.parent / "blobs").resolve())
    try:
        found = path.resolve(strict=True)
    except RuntimeError as error:  # a link to itself
        raise OSError(str(error)) from error
    if found.name != path.name and not any(found.is_relative_to(place) for place in own):
        raise OSError(f"it is a link to {found}, which is outside this folder")
    with open_plain(path) as file:
        if (size := file.seek(0, 2)) > most:
            raise OSError(f"it has {size:,} bytes; the limit is {most:,}")
        file.seek(0)
        yield file


def _text_files(folder: Path) -> Iterator[Path]:
    for place in (folder, folder / "additional_chat_templates"):
        for pattern in ("*.json", "*.jinja"):
            yield from place.glob(pattern)

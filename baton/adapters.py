"""Reads LoRA adapters in PEFT's format, without torch.

An adapter changes some of a model's linear maps by products of two small matrices (Hu et al., 2021, LoRA):

    W x  +  scaling * B (A x)        A: [rank, in], B: [out, rank], scaling = alpha / rank

A folder holds `adapter_config.json` and `adapter_model.safetensors`. Baton does not trust them: sizes are checked
before memory is allocated, and nothing is unpickled. An adapter that Baton would not compute exactly is refused, and
the error names the reason.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from baton.errors import AdapterUnreadable, InvalidRequest
from baton.messages import Adapter
from baton.model_files import open_own
from baton.plain_files import parse_json
from baton.visible import in_line
from baton.weights_files import TensorHead, read_header

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
MAX_WEIGHTS_BYTES = 4 * 2**30
MAX_RANK, MAX_NUMBER = 4096, 1e6
CHUNK_BYTES = 2**20
PREFIX = "base_model.model."
"""Start of each tensor's name: PEFT's names of the modules that wrap a model."""
_MATRIX = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
_LITERAL = re.compile(r"\^?[\w.-]+")
OTHER_WORDS = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_A": "adapters of embeddings",
    "lora_embedding_B": "adapters of embeddings",
    "modules_to_save": "whole modules (modules_to_save)",
    "lora_A.bias": "biases",
    "lora_B.bias": "biases",
}
"""Parts of the names of unsupported tensors, with a description of these tensors."""
REFUSED = {
    "alora_invocation_tokens": "it applies only after some tokens",
    "arrow_config": "it routes between adapters",
    "fan_in_fan_out": "its base weights are transposed",
    "layer_replication": "it repeats layers of the model",
    "lora_bias": "its matrices have biases",
    "megatron_config": "it is of a model in Megatron's format",
    "modules_to_save": "it replaces whole modules",
    "monteclora_config": "its matrices are drawn at random",
    "target_parameters": "it changes parameters, such as the weights of experts, and not linear maps",
    "trainable_token_indices": "it changes embeddings",
    "use_bdlora": "its matrices are block-diagonal",
    "use_dora": "it is a DoRA, which also changes the magnitudes of weights",
    "use_qalora": "it is a QA-LoRA, which pools its input",
}
"""Fields of the configuration that must be unset, with the reason."""
HARMLESS = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
})  # fmt: skip
"""Fields of the configuration that Baton applies, or that only concern training."""
KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` with which training does not change the model's own weights."""
LATENT = "kv_b_proj"
"""The matrix that expands the latents of multi-head latent attention; it is never applied to tokens."""
ENDS = frozenset({"embed_in", "embed_out", "embed_tokens", "lm_head", "wpe", "wte"})
"""Names of embeddings and of the output projection, which Baton's adapters cannot change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTarget:
    """A linear map that an adapter changes."""

    module: str
    """Name of the map in the model, such as `model.layers.0.self_attn.q_proj`."""
    rank: int
    num_in: int
    """Width of the map's input."""
    num_out: int
    """Width of the map's output."""
    scaling: float
    """Factor by which the product of both matrices is multiplied."""

    @property
    def names(self) -> tuple[str, str]:
        """Names of the tensors A, `[rank, in]`, and B, `[out, rank]`."""
        return f"{PREFIX}{self.module}.lora_A.weight", f"{PREFIX}{self.module}.lora_B.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """Description of the adapter in a folder."""

    path: str
    digest: str
    """Digest of the weights file and of the rank and scaling of each target; 32 hexadecimal digits."""
    rank: int
    """Largest rank of the targets."""
    targets: tuple[AdapterTarget, ...]
    """Sorted by name."""
    num_bytes: int
    """Size of the weights file."""


def read_adapter(path: str) -> AdapterFacts:
    """Return the description of the adapter in a folder. This reads the whole weights file once, in small pieces.

    Raises:
        OSError: a file cannot be read, or is not a file of this folder.
        InvalidRequest: Baton does not compute this adapter; the message names the reason.
    """
    targets = _targets(Path(path))
    digest, num_bytes = _digest_of(targets), 0
    with open_own(Path(path) / WEIGHTS_FILE, MAX_WEIGHTS_BYTES) as file:
        while piece := file.read(CHUNK_BYTES):
            digest.update(piece)
            num_bytes += len(piece)
    return _facts(path, targets, digest.hexdigest(), num_bytes)


def load_adapter(path: str) -> tuple[AdapterFacts, bytes]:
    """Return the description of the adapter in a folder, and the content of the weights file.

    The digest is computed from this content, so the file cannot change in between.

    Raises:
        OSError, InvalidRequest: as in `read_adapter`.
    """
    targets = _targets(Path(path))
    digest = _digest_of(targets)
    with open_own(Path(path) / WEIGHTS_FILE, MAX_WEIGHTS_BYTES) as file:
        content = file.read(MAX_WEIGHTS_BYTES + 1)
    digest.update(content)
    return _facts(path, targets, digest.hexdigest(), len(content)), content


def load_registered(adapter: Adapter) -> tuple[AdapterFacts, bytes]:
    """Return the description and the weights of a registered adapter, if its folder has not changed.

    Raises:
        AdapterUnreadable: this worker cannot read the folder; another one may. The message does not contain the path,
            because clients see it; `__cause__` does.
        InvalidRequest: the folder holds other content, and so would be refused by every worker.
    """
    try:
        facts, content = load_adapter(adapter.path)
    except OSError as error:
        raise AdapterUnreadable(
            f"this worker cannot read the folder of adapter {adapter.name}; have the operator look at the worker's log"
        ) from error
    except InvalidRequest as error:
        raise InvalidRequest(f"the folder of adapter {adapter.name} has changed: {error}; add it again") from error
    if facts.digest != adapter.digest:
        raise InvalidRequest(
            f"the folder of adapter {adapter.name}, {adapter.path}, holds other weights than those that were "
            "registered; restore them, or add the adapter again"
        )
    return facts, content


def require_rank(facts: AdapterFacts, most: int) -> None:
    """Raise InvalidRequest if an adapter's rank exceeds `engine.max_adapter_rank`, which is `most`."""
    if facts.rank > most:
        raise InvalidRequest(
            f"the adapter in {facts.path} has rank {facts.rank}, and engine.max_adapter_rank is {most}; raise the "
            "setting on all workers"
        )


def _facts(path: str, targets: tuple[AdapterTarget, ...], digest: str, num_bytes: int) -> AdapterFacts:
    rank = max(target.rank for target in targets)
    return AdapterFacts(path=path, digest=digest, rank=rank, targets=targets, num_bytes=num_bytes)


def _digest_of(targets: Iterable[AdapterTarget]) -> blake2b:
    """Return a digest that contains the rank and scaling of each target; the caller adds the weights file."""
    said = [(target.module, target.rank, target.scaling.hex()) for target in targets]
    return blake2b(json.dumps(said).encode() + b"\0", digest_size=16)


def _targets(folder: Path) -> tuple[AdapterTarget, ...]:
    """Return the targets of an adapter, read from the configuration and the header of the weights file."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder on this worker")
    config = _config(folder)
    path = folder / WEIGHTS_FILE
    if not path.exists() and (pickles := sorted(each.name for each in folder.glob("adapter_model.*"))):
        raise InvalidRequest(
            f"{folder} holds {pickles[0]}, and Baton reads adapters only from {WEIGHTS_FILE}; convert it with PEFT's "
            "save_pretrained"
        )
    with open_own(path, MAX_WEIGHTS_BYTES):
        pass
    try:
        heads = read_header(path)
    except ValueError as error:
        raise InvalidRequest(f"{path} is damaged: {error}") from error
    shapes = _matrices(path, heads)
    if not shapes:
        raise InvalidRequest(f"{path} holds no matrices of an adapter")
    scalings = _Scalings(folder / CONFIG_FILE, config)
    return tuple(_target(path, module, pair, scalings) for module, pair in sorted(shapes.items()))


def _config(folder: Path) -> dict[str, Any]:
    """Return the configuration of an adapter. Refuse adapters that compute anything but `W x + scaling * B (A x)`."""
    path = folder / CONFIG_FILE
    with open_own(path, MAX_CONFIG_BYTES) as file:
        content = file.read(MAX_CONFIG_BYTES)
    try:
        config = parse_json(content)
    except ValueError as error:
        raise InvalidRequest(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequest(f"{path} must contain a JSON object")
    if (kind := config.get("peft_type")) != "LORA":
        raise InvalidRequest(f"{path} says peft_type {_short(kind)}; Baton computes adapters of type LORA")
    for name, reason in REFUSED.items():
        if config.get(name) not in (None, False, [], {}):
            raise InvalidRequest(f"Baton does not compute the adapter in {folder}: {reason} ({name})")
    if config.get("bias", "none") != "none":
        raise InvalidRequest(f"Baton does not compute the adapter in {folder}: it changes biases (bias is not none)")
    if (begun := config.get("init_lora_weights")) not in KEEPS_BASE:
        raise InvalidRequest(
            f"Baton does not compute the adapter in {folder}: its training began with other weights of the model "
            f"(init_lora_weights is {_short(begun)}); convert it to a plain LoRA with PEFT"
        )
    known = HARMLESS | REFUSED.keys()
    if unknown := sorted(name for name, value in config.items() if value and name not in known):
        raise InvalidRequest(f"{path} has the field {_short(unknown[0])}, which Baton does not know; remove it")
    return config


def _matrices(path: Path, heads: Mapping[str, TensorHead]) -> dict[str, dict[str, TensorHead]]:
    """Return the matrices A and B of each module, as the header of the weights file lists them."""
    found: dict[str, dict[str, TensorHead]] = {}
    for name, head in heads.items():
        for words, what in OTHER_WORDS.items():
            if words in name:
                raise InvalidRequest(f"{path} holds {what}, which Baton does not compute: {_short(name)}")
        match = _MATRIX.fullmatch(name.removeprefix(PREFIX))
        if match is None or not name.startswith(PREFIX):
            raise InvalidRequest(f"{path} holds {_short(name)}, which is no matrix of a LoRA in PEFT's format")
        _refuse_module(path, match["module"])
        if len(head.shape) != 2 or not head.num_elements or head.num_bytes // head.num_elements not in (2, 4):
            raise InvalidRequest(f"{_short(name)} in {path} must be a matrix of 16-bit or 32-bit floats")
        found.setdefault(match["module"], {})[match["which"]] = head
    return found


def _refuse_module(path: Path, module: str) -> None:
    parts = module.split(".")
    if "experts" in parts:
        raise InvalidRequest(f"{path} changes weights of experts, which Baton does not compute: {_short(module)}")
    if parts[-1] == LATENT:
        raise InvalidRequest(
            f"{path} changes {LATENT}, which Baton does not compute: latent attention never expands its keys and values"
        )
    if parts[-1] in ENDS:
        raise InvalidRequest(f"{path} changes {_short(parts[-1])}; Baton computes adapters of the layers alone")


def _target(path: Path, module: str, pair: Mapping[str, TensorHead], scalings: _Scalings) -> AdapterTarget:
    if len(pair) != 2:
        raise InvalidRequest(f"{path} holds only one of the two matrices of {_short(module)}")
    (rank, num_in), (num_out, other_rank) = pair["A"].shape, pair["B"].shape
    if rank != other_rank or rank > MAX_RANK:
        raise InvalidRequest(
            f"the matrices of {_short(module)} in {path} have ranks {rank} and {other_rank}; both must be the same, at "
            f"most {MAX_RANK}"
        )
    scaling = scalings.of(module, rank)
    return AdapterTarget(module=module, rank=rank, num_in=num_in, num_out=num_out, scaling=scaling)


class _Scalings:
    """Scalings of an adapter's targets.

    PEFT treats the keys of `rank_pattern` and `alpha_pattern` as regular expressions for the end of a module's name,
    and the first match counts. A hostile expression could take forever, so Baton accepts only plain names.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path = path
        self._by_root = config.get("use_rslora") is True
        self._rank, self._alpha = self._number(config, "r", 8), self._number(config, "lora_alpha", 8)
        self._ranks, self._alphas = self._pattern(config, "rank_pattern"), self._pattern(config, "alpha_pattern")

    def of(self, module: str, rank: int) -> float:
        """Return the scaling of a module whose matrices have this rank."""
        expected = self._found(self._ranks, module, self._rank)
        if expected != rank:
            raise InvalidRequest(
                f"{self._path} says rank {expected:g} for {_short(module)}, whose matrices have rank {rank}"
            )
        alpha = self._found(self._alphas, module, self._alpha)
        return alpha / math.sqrt(rank) if self._by_root else alpha / rank

    def _number(self, config: Mapping[str, Any], name: str, default: float) -> float:
        value = config.get(name, default)
        if type(value) not in (int, float) or not 0 < value <= MAX_NUMBER:
            raise InvalidRequest(f"{self._path} says {_short(value)} as {name}; it must be a number above 0")
        return float(value)

    def _pattern(self, config: Mapping[str, Any], name: str) -> dict[str, tuple[int, float]]:
        """Return the index and the value of each key."""
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict):
            raise InvalidRequest(f"{self._path} says {_short(pattern)} as {name}; it must be a JSON object")
        if others := [key for key in pattern if not _LITERAL.fullmatch(key)]:
            raise InvalidRequest(
                f"{self._path} has the key {_short(others[0])} in {name}; Baton reads only names of modules there, and "
                "no other regular expressions"
            )
        return {key: (place, self._number(pattern, key, 0)) for place, key in enumerate(pattern)}

    def _found(self, pattern: Mapping[str, tuple[int, float]], module: str, default: float) -> float:
        if not pattern:
            return default
        parts = module.split(".")
        keys = [f"^{module}", *(".".join(parts[begin:]) for begin in range(len(parts)))]
        return min((pattern[key] for key in keys if key in pattern), default=(0, default))[1]


def _short(value: Any) -> str:
    return in_line(str(value)[:100])

"""The only module through which transformers reads a model folder: without running code from it or asking the user.

Without `trust_remote_code=False` transformers asks on standard input whether it may run the code that config.json
names. Transformers receives the tensors and does not look for files itself: it would ignore an index next to a
`model.safetensors`, take a tensor from another shard than the index names, and unpickle `.bin` files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from baton.errors import ModelLoadError
from baton.model_files import read_json
from baton.weights_files import placed_tensors

SLACK = 2
"""Maximum ratio of a model's parameters to the numbers in its files: tied embeddings count twice."""
DTYPES = ("torch_dtype", "dtype")


def read_config(path: str) -> Any:
    """Return transformers' configuration of a folder. Its errors have no common class."""
    described = read_json(Path(path) / "config.json", required=True)
    for name in DTYPES:
        if isinstance(said := described.get(name), str):
            described[name] = said.removeprefix("torch.")
    if not described.get("quantization_config"):
        described.pop("quantization_config", None)
    kind = described.get("model_type")
    if kind not in CONFIG_MAPPING:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)  # it raises the error
    return CONFIG_MAPPING[kind].from_dict(described)


def load_model(folder: Path, config: Any, attention: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return the model, and transformers' report on missing, unused and mismatched tensors.

    Args:
        folder: folder with the weights.
        config: see `read_config`.
        attention: name of the attention; a config.json may name one that transformers would download.
        options: further arguments of `from_pretrained`.

    Raises:
        ModelLoadError: the files hold far fewer numbers than the model that the configuration describes.
        Exception: transformers' own errors, which have no common class.
    """
    placed = placed_tensors(folder)
    model_class = _class_of(folder, config, attention, [head.num_elements for _, head in placed.values()])
    with _opened({name: path for name, (path, _) in placed.items()}) as tensors:
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            attn_implementation=attention,
            output_loading_info=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # the report names them
            **options,
        )
    return model, report


@contextlib.contextmanager
def _opened(placed: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """Yield each tensor as a slice of its file, of which nothing is read before it is needed."""
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in set(placed.values())}
        yield {name: files[path].get_slice(name) for name, path in placed.items()}


def _class_of(folder: Path, config: Any, attention: str, sizes: list[int]) -> Any:
    """Return the class of the model, after comparing its size with the files' headers.

    The check comes before any memory is allocated: transformers would create random numbers for all missing tensors.

    Args:
        sizes: the number of elements of each tensor in the files.

    Raises:
        ModelLoadError: they do not match.
    """
    described = 0
    model_class: Any = None
    if config.num_hidden_layers <= len(sizes):  # even modules without memory take long to create
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, trust_remote_code=False)
        model_class, described = type(model), sum(weight.numel() for weight in model.parameters())
    if described > SLACK * sum(sizes) or not described:
        raise ModelLoadError(
            f"the checkpoint in {folder} does not fit its config.json, which describes {described or 'more'} numbers "
            f"in {config.num_hidden_layers} layers: its files hold {sum(sizes)} numbers in {len(sizes)} tensors"
        )
    return model_class

"""The only place that has transformers read a model's folder: it runs no code of the folder, and asks nobody about it.

Without `trust_remote_code=False` transformers asks on standard input whether it may run what config.json names. It
gets the tensors, and looks for no files itself: it would ignore an index beside a `model.safetensors`, take a tensor
from another shard than the index names, and unpickle `.bin` files.
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
"""How many times the numbers of the files a model may have: embeddings count twice where they are tied."""
DTYPES = ("torch_dtype", "dtype")


def read_config(path: str) -> Any:
    """Returns transformers' configuration of a folder; its own errors have no class in common."""
    described = read_json(Path(path) / "config.json", required=True)
    for name in DTYPES:
        if isinstance(said := described.get(name), str):
            described[name] = said.removeprefix("torch.")
    if not described.get("quantization_config"):
        described.pop("quantization_config", None)
    kind = described.get("model_type")
    if kind not in CONFIG_MAPPING:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)  # it says what is wrong
    return CONFIG_MAPPING[kind].from_dict(described)


def load_model(folder: Path, config: Any, attention: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the model, and transformers' report on what the files lack, have besides, or have in other shapes.

    Args:
        folder: holds the weights.
        config: see `read_config`.
        attention: the name of the attention; a config.json may name one that transformers would download.
        options: further arguments of `from_pretrained`.

    Raises:
        ModelLoadError: the files hold much less than the model that the configuration describes.
        Exception: transformers' own, which have no class in common.
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
            ignore_mismatched_sizes=True,  # they are in the report, by name
            **options,
        )
    return model, report


@contextlib.contextmanager
def _opened(placed: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """Yields each tensor as a slice of its file, of which nothing is read before it is wanted."""
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in set(placed.values())}
        yield {name: files[path].get_slice(name) for name, path in placed.items()}


def _class_of(folder: Path, config: Any, attention: str, sizes: list[int]) -> Any:
    """Returns the class of the model. First its size is compared with what the headers of the files say, before memory
    is taken for it: transformers would make random numbers of all that is missing.

    Args:
        sizes: the numbers that each tensor in the files has.

    Raises:
        ModelLoadError: they do not fit.
    """
    described = 0
    model_class: Any = None
    if config.num_hidden_layers <= len(sizes):  # even to make modules without memory takes long
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, trust_remote_code=False)
        model_class, described = type(model), sum(weight.numel() for weight in model.parameters())
    if described > SLACK * sum(sizes) or not described:
        raise ModelLoadError(
            f"the checkpoint in {folder} does not fit its config.json, which describes {described or 'more'} numbers "
            f"in {config.num_hidden_layers} layers: its files hold {sum(sizes)} numbers in {len(sizes)} tensors"
        )
    return model_class

"""The only module through which transformers reads a model folder: without running code from it or asking the user.

Without `trust_remote_code=False` transformers asks on standard input whether it may run the code that config.json
names. Transformers receives the tensors and does not look for files itself: it would ignore an index next to a
`model.safetensors`, take a tensor from another shard than the index names, and unpickle `.bin` files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import CONFIG_MAPPING

from baton.errors import ModelLoadError, in_one_line
from baton.model_files import named_code, read_json
from baton.weights_files import placed_tensors
from engine.model.asking import AskedModel, ask
from engine.model.shapes import of_text

SLACK = 2
"""Maximum ratio of a model's parameters to the numbers in its files: tied embeddings count twice."""
DTYPES = ("torch_dtype", "dtype")
LAYERS = ("depth", "encoder_layers", "n_layer", "n_layers", "num_hidden_layers", "num_layers")
"""Names of numbers of layers in the parts of a configuration. A part with more layers than the files have tensors takes
long to create even without memory."""
TEXTS = ("decoder", "generator", "text_config")
"""Fields of a configuration. Transformers takes the first one that is there as the configuration of the text."""
LEAST = {"sliding_window": 1, "vocab_size": 2}
"""Smallest values of sizes: a token attends at least to itself, and sampling needs two tokens to choose from."""
MOST_LAYERS = 256
"""Number of layers that no part needs tensors for."""


def read_config(path: str) -> Any:
    """Return transformers' configuration of a folder. Its errors have no common class."""
    described = _with_floats(read_json(Path(path) / "config.json", required=True))
    for name in DTYPES:
        if isinstance(said := described.get(name), str):
            described[name] = said.removeprefix("torch.")
    if not described.get("quantization_config"):
        described.pop("quantization_config", None)
    kind = described.get("model_type")
    if kind not in CONFIG_MAPPING:
        if named := named_code(described):
            raise ModelLoadError(
                f"{path}/config.json names {named} for models of type {kind!r}, which is code of the model's folder; "
                "Baton runs none of it, and transformers has no model of this type"
            )
        raise ModelLoadError(f"{path} holds a model of type {str(kind)[:100]!r}, which transformers does not know")
    config_class = CONFIG_MAPPING[kind]
    for part in TEXTS:
        if described.get(part) is not None and part not in config_class.sub_configs:
            raise ModelLoadError(
                f"{path}/config.json has {part}, as models of several parts have, and models of type {kind!r} have "
                "none: give the model's other config.json, or remove the field that is wrong"
            )
    config = config_class.from_dict(described)
    text = config.get_text_config(decoder=True)
    for name, least in LEAST.items():
        given = getattr(text, name, None)
        # Transformers itself writes a window of 0 for models of type qwen2_moe that do not use it.
        is_used = name != "sliding_window" or getattr(text, "use_sliding_window", True)
        if type(given) is int and given < least and is_used:
            raise ModelLoadError(f"{path}/config.json says {given} as {name}; it must be {least} or more")
    return config


def ask_folder(folder: Path, config: Any, *, sees: bool = False) -> AskedModel:
    """Ask the model of a folder about its attention, after comparing its size with the files' headers.

    Both come before any memory is allocated: transformers would create random numbers for all missing tensors.

    Args:
        folder: folder with the weights.
        config: see `read_config`.
        sees: see `ask`.

    Raises:
        ModelLoadError: the files hold far fewer numbers than the model that the configuration describes, or the model
            is not supported; the message says why.
    """
    sizes = [head.num_elements for _, head in placed_tensors(folder).values()]
    try:
        return _asked(folder, config, sizes, sees=sees)
    except ModelLoadError:
        raise
    except Exception as error:  # from a configuration that contradicts itself
        raise ModelLoadError(f"config.json in {folder} cannot be read as a model: {in_one_line(error)}") from error


def _asked(folder: Path, config: Any, sizes: Sequence[int], *, sees: bool) -> AskedModel:
    most = max(len(sizes), MOST_LAYERS)
    for part, values in config.to_dict().items():
        for name in LAYERS if isinstance(values, dict) else ():
            if isinstance(number := values.get(name), int) and number > most:
                raise ModelLoadError(
                    f"the checkpoint in {folder} does not fit its config.json, which says {number} as {name} of "
                    f"{part}: its files hold {len(sizes)} tensors"
                )
    num_layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if not isinstance(num_layers, int):
        raise ModelLoadError(f"config.json in {folder} does not say how many layers the model has")
    asked = (
        ask(config, sees=sees) if num_layers <= len(sizes) else None
    )  # even modules without memory take long to create
    described = 0 if asked is None else asked.num_parameters
    if asked is None or described > SLACK * sum(sizes) or not described:
        raise ModelLoadError(
            f"the checkpoint in {folder} does not fit its config.json, which describes {described or 'more'} numbers "
            f"in {num_layers} layers: its files hold {sum(sizes)} numbers in {len(sizes)} tensors"
        )
    return asked


def _with_floats(value: Any) -> Any:
    """Return JSON in which transformers' own form of infinity is a float."""
    if isinstance(value, dict):
        if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {name: _with_floats(each) for name, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def load_model(
    folder: Path, config: Any, asked: AskedModel, attention: str, *, sees: bool = False, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return the model, and transformers' report on missing, unused and mismatched tensors.

    Args:
        folder: folder with the weights.
        config: see `read_config`.
        asked: the result of `ask_folder`.
        attention: name of the attention; a config.json may name one that transformers would download.
        sees: whether to load the parts that text does not use, such as an encoder for images, which keeps
            transformers' own attention.
        options: further arguments of `from_pretrained`.

    Raises:
        ModelLoadError: the files are not clear.
        Exception: transformers' own errors, which have no common class.
    """
    placed = placed_tensors(folder)
    model_class = _without(asked.model_class, asked.unused) if asked.unused and not sees else asked.model_class
    with _opened({name: path for name, (path, _) in placed.items()}) as tensors:
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            attn_implementation=of_text(config, attention) if sees else attention,
            output_loading_info=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # the report names them
            **options,
        )
    return model, report


def load_image_processor(folder: Path, config: Any) -> Any:
    """Return transformers' image processor of a folder, which computes with Pillow and NumPy.

    Raises:
        Exception: transformers' own errors, which have no common class.
    """
    from transformers import AutoImageProcessor  # it needs Pillow, which only models with images need

    return AutoImageProcessor.from_pretrained(
        folder, config=config, backend="pil", trust_remote_code=False, local_files_only=True
    )


@contextlib.contextmanager
def _opened(placed: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """Yield each tensor as a slice of its file, of which nothing is read before it is needed."""
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(safe_open(path, framework="pt")) for path in set(placed.values())}
        yield {name: files[path].get_slice(name) for name, path in placed.items()}


def _without(model_class: type[Any], unused: Sequence[str]) -> type[Any]:
    """Return a class of the same model without some of its submodules, so that no memory is allocated for them."""

    class Text(model_class):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name in unused:
                owner, _, attribute = name.rpartition(".")
                setattr(self.get_submodule(owner), attribute, None)

    for name in ("__name__", "__qualname__", "__module__"):  # transformers looks for its own class
        setattr(Text, name, getattr(model_class, name))
    return Text

"""Whatever a model's folder holds, each entry loads it or refuses it by an error of ours, soon and in little memory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from baton.errors import BatonError, ModelLoadError
from baton.model_files import require_runnable
from baton.weights_files import read_header
from tests.support.loaders import loaders, outcome
from tests.unit.deploy.models.test_code_of_a_folder import edit, tiny

LIGHT = ("router", "up", "download", "places", "draft of up", "doctor", "grammars")
WORKERS = ("worker", "worker on transformers", "draft of a worker")
MEMORY = 96 * 2**20
"""Bytes that an entry may take for a folder of a few kilobytes; the largest documents below have 16 MiB."""
SECONDS = 30.0


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "sound"
    folder.mkdir()
    tiny(folder)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def outcomes(folder: Path, cache: Path, sound: Path, names: tuple[str, ...]) -> dict[str, str]:
    """What comes of the entries, each soon and in little memory."""
    entries, found = loaders(folder, cache, sound), {}
    for name in names:
        began_s = time.monotonic()
        tracemalloc.start()
        found[name] = outcome(entries[name])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY, name
        assert time.monotonic() - began_s < SECONDS, name
        assert not found[name] or found[name].startswith(("ModelLoadError: ", "ConfigError: ")), (name, found[name])
    return found


def write_header(path: Path, header: Any, length: int | None = None, data: bytes = b"") -> None:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content) if length is None else length) + content + data)


def tensor(shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


HEADERS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "a length beyond the file": lambda path: write_header(path, {}, 2**63),
    "a length of all there is": lambda path: write_header(path, {}, 2**40, bytes(100)),
    "no JSON": lambda path: write_header(path, b"\xff\xfe" * 50),
    "a list": lambda path: write_header(path, [1, 2]),
    "deep": lambda path: write_header(path, b"[" * 100_000),
    "deeper than may be": lambda path: write_header(path, b'{"a":' + b"[" * 80 + b"]" * 80 + b"}"),
    "many parts": lambda path: write_header(path, b"[" + b"[]," * 1_100_000 + b"0]"),
    "a huge shape": lambda path: write_header(path, {"a": tensor([2**47] * 3, 0, 4)}, data=bytes(4)),
    "many dimensions": lambda path: write_header(path, {"a": tensor([1] * 1000, 0, 4)}, data=bytes(4)),
    "a negative shape": lambda path: write_header(path, {"a": tensor([-1], 0, 4)}, data=bytes(4)),
    "a shape of texts": lambda path: write_header(path, {"a": tensor(["x"], 0, 4)}, data=bytes(4)),
    "a shape that is not a number": lambda path: write_header(path, {"a": tensor([float("nan")], 0, 4)}, data=bytes(4)),
    "offsets beyond the file": lambda path: write_header(path, {"a": tensor([1], 2**60, 2**60 + 4)}, data=bytes(4)),
    "offsets that go back": lambda path: write_header(path, {"a": tensor([1], 4, 0)}, data=bytes(4)),
    "negative offsets": lambda path: write_header(path, {"a": tensor([1], -4, 0)}, data=bytes(4)),
    "offsets of another type": lambda path: write_header(path, {"a": tensor([1], "0", [4])}, data=bytes(4)),
    "tensors over each other": lambda path: write_header(
        path, {"a": tensor([2], 0, 8), "b": tensor([2], 0, 8)}, data=bytes(16)
    ),
    "a hole": lambda path: write_header(path, {"a": tensor([1], 4, 8)}, data=bytes(8)),
    "a tensor that is none": lambda path: write_header(path, {"a": None}),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_weights(name: str, folder: Path, sound: Path, tmp_path: Path) -> None:
    HEADERS[name](folder / "model.safetensors")
    found = outcomes(folder, tmp_path / "cache", sound, ("up", "download", "draft of up", "doctor"))
    assert all("is damaged: it has " in error for error in found.values()), found
    assert "is damaged: it has " in outcome(loaders(folder, tmp_path / "cache")["worker on transformers"])


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ({"a": "../other/model.safetensors"}, "as a file of weights"),
        ({"a": "/etc/model.safetensors"}, "as a file of weights"),
        ({"a": "a\0.safetensors"}, "as a file of weights"),
        ({"a": "model.bin"}, "as a file of weights"),
        ({"a": ""}, "as a file of weights"),
        ({"a": 7}, "as a file of weights"),
        ({"a": ["x.safetensors"]}, "as a file of weights"),
        ({"a": None}, "as a file of weights"),
        ({"a": "x" * 10_000 + ".safetensors"}, "lacks x"),
        (["model.safetensors"], "has no weight_map"),
        (None, "has no weight_map"),
    ],
)
def test_indexes_of_weights(weight_map: Any, sentence: str, folder: Path, sound: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = outcomes(folder, tmp_path / "cache", sound, ("up", "download", "doctor"))
    assert all(sentence in error for error in found.values()), found
    assert outcome(loaders(folder, tmp_path / "cache")["worker on transformers"]).startswith("ModelLoadError: ")


@pytest.mark.parametrize(
    "content", [b"[" * 10**6, b"{" * 10**6, b"[" + b"{}," * 1_500_000 + b"0]", b"\xff" * 100, b"7"]
)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"]
)
def test_documents_that_are_none(name: str, content: bytes, folder: Path, sound: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / name).write_bytes(content)
    found = outcomes(folder, tmp_path / "cache", sound, LIGHT)
    assert any(found.values())
    assert outcome(loaders(folder, tmp_path / "cache")["worker on transformers"]).startswith("ModelLoadError: ")


SIZES: list[tuple[str, Any]] = [
    *((name, value) for name in ("vocab_size", "hidden_size", "num_hidden_layers") for value in (10**12, 10**300, -1)),
    *((name, "2") for name in ("head_dim", "num_key_value_heads", "max_position_embeddings")),
    *((name, float("nan")) for name in ("intermediate_size", "max_position_embeddings", "num_attention_heads")),
    ("num_labels", 10**7),
    ("max_position_embeddings", [1]),
    ("num_hidden_layers", True),
    ("n_positions", 1e300),
]


@pytest.mark.parametrize(("name", "value"), SIZES)
def test_numbers_that_no_model_has(name: str, value: Any, folder: Path, sound: Path, tmp_path: Path) -> None:
    edit(folder / "config.json", **{name: value})
    found = outcomes(folder, tmp_path / "cache", sound, (*LIGHT[:6], *WORKERS))
    assert all(f" as {name}; it must be a whole number from " in error for error in found.values()), found


@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 2**17}, {"num_hidden_layers": 2**15}, {"intermediate_size": 2**20, "vocab_size": 2**20}]
)
def test_a_model_larger_than_its_files_takes_no_memory(sizes: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    edit(folder / "config.json", **sizes)
    error = outcome(loaders(folder, tmp_path / "cache")["worker on transformers"])
    assert "does not fit its config.json, which describes " in error


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["a secret", "a pipe", "a device", "itself", "nothing", "a long file"])
def test_files_that_are_no_files_of_the_folder(name: str, kind: str, folder: Path, sound: Path, tmp_path: Path) -> None:
    path, secret = folder / name, tmp_path / "id_rsa"
    secret.write_text((sound / name).read_text() if (sound / name).exists() else "a secret")
    path.unlink(missing_ok=True)
    match kind:
        case "a secret":
            path.symlink_to(secret)
        case "a pipe":
            os.mkfifo(path)
        case "a device":
            path.symlink_to("/dev/zero")
        case "itself":
            path.symlink_to(path)
        case "nothing":
            path.symlink_to(tmp_path / "nowhere")
        case "a long file":
            with path.open("wb") as file:
                file.truncate(2**40)
    found = outcomes(folder, tmp_path / "cache", sound, LIGHT[:6])
    assert all(error.startswith("ModelLoadError: ") for error in found.values()), found
    assert outcome(loaders(folder, tmp_path / "cache")["worker on transformers"]).startswith("ModelLoadError: ")


def test_links_by_which_folders_share_files_stay(folder: Path, sound: Path, tmp_path: Path) -> None:
    """To a file of the same name, and to what the hub's cache or a mounted volume keeps under another one."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(sound / "tokenizer.json")
    (folder / "..data").mkdir()
    (folder / "config.json").rename(folder / "..data" / "v1")
    (folder / "config.json").symlink_to("..data/v1")
    require_runnable(folder)
    repository = tmp_path / "models--org--name"
    (repository / "blobs").mkdir(parents=True)
    snapshot = Path(shutil.copytree(sound, repository / "snapshots" / "0123"))
    for path in list(snapshot.iterdir()):
        path.rename(repository / "blobs" / f"{len(path.name)}-{path.name.count('e')}")
        path.symlink_to(f"../../blobs/{len(path.name)}-{path.name.count('e')}")
    require_runnable(snapshot)


def test_an_adapter_is_not_left_out_in_silence(folder: Path) -> None:
    edit(folder / "adapter_config.json", base_model_name_or_path="../../elsewhere")
    with pytest.raises(ModelLoadError, match="holds an adapter"):
        require_runnable(folder)


@pytest.mark.parametrize("name", ["configuration_files", "transformers_weights", "fusion_config"])
def test_what_leads_transformers_elsewhere_is_refused(name: str, folder: Path) -> None:
    edit(folder / "config.json", **{name: ["config.4.0.0.json"]})
    with pytest.raises(ModelLoadError, match=f"has {name}, which this version does not follow"):
        require_runnable(folder)


ODD: list[Any] = [
    *(None, True, 0, -1, 7, 10**9, 10**30, 1e308, float("nan"), float("inf"), "", "x", "\x1b[2J", "\ud800", "9" * 5000),
    *([], {}, [[]], [None], ["a"], [10**30], {"a": 1}, {"content": 7}, {"content": []}),
    *({"rope_type": kind} for kind in ("linear", "yarn", "longrope", "dynamic", "llama3", ["x"], None)),
    {"rope_type": "longrope", "original_max_position_embeddings": "x", "short_factor": [1], "long_factor": [1]},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e12},
]
FIELDS = {
    "config.json": (
        *("architectures", "model_type", "text_config", "quantization_config", "compression_config", "auto_map"),
        *("rope_parameters", "rope_scaling", "rope_theta", "layer_types", "sliding_window", "hidden_act", "dtype"),
        *("num_labels", "id2label", "eos_token_id", "_attn_implementation", "to_dict", "attribute_map", "head_dim"),
        *("tie_word_embeddings", "rms_norm_eps", "base_model_tp_plan", "initializer_range", "pad_token_id"),
    ),
    "generation_config.json": (
        *("eos_token_id", "temperature", "top_k", "bad_words_ids", "stop_strings", "do_sample", "custom_generate"),
        *("transformers_version", "cache_implementation", "compile_config", "watermarking_config"),
    ),
    "tokenizer_config.json": ("eos_token", "bos_token", "extra_special_tokens", "auto_map", "added_tokens_decoder"),
    "special_tokens_map.json": ("eos_token", "extra_special_tokens", "pad_token"),
}
PLACES = [(file, name) for file, names in FIELDS.items() for name in names]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(edits=st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(ODD)), min_size=1, max_size=3))
@example(
    edits=[
        (
            ("config.json", "rope_parameters"),
            {"rope_type": "longrope", "original_max_position_embeddings": "x", "short_factor": [1], "long_factor": [1]},
        )
    ]
)
def test_odd_values_are_refused_or_served(
    edits: list[tuple[tuple[str, str], Any]], sound: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sound, tmp_path / "model", dirs_exist_ok=True))
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    for (file, name), value in edits:
        edit(folder / file, **{name: value})
    entries = loaders(folder, tmp_path / "cache", sound)
    for name in (*LIGHT, "worker on transformers"):
        with contextlib.suppress(BatonError):
            entries[name]()


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_changed_header_is_refused_or_right(data: st.DataObject, sound: Path, tmp_path: Path) -> None:
    content = bytearray((sound / "model.safetensors").read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, length - 1))
        content[place] = data.draw(st.sampled_from(b'0129-e"[]{},:x\x00\xff'))
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    try:
        heads = read_header(path)
    except ValueError:
        return
    assert sum(head.num_bytes for head in heads.values()) <= len(content)

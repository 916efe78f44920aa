"""No code of a model's folder is run, by no entry, and nobody is asked whether it may be."""

from __future__ import annotations

import json
import os
import pickle
import pty
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import ModelLoadError
from deploy.models.folder import check_folder
from tests.support.loaders import loaders, outcome

pytestmark = pytest.mark.slow

WORKERS = ("worker", "worker on transformers", "draft of a worker")
CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): model_type = {kind!r}
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
def generate(*_, **__): pass
"""
LOCAL = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None]}
REMOTE = dict.fromkeys(LOCAL, "org/other--evil.Config")


def tiny(folder: Path, kind: str = "llama") -> None:
    """A model that loads, of which nothing is code."""
    import tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(8)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    edit(folder / "config.json", model_type=kind)


def edit(path: Path, **values: Any) -> None:
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(before | values))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it-was-run"


def with_code(folder: Path, marker: Path, kind: str, named: Any) -> Path:
    folder.mkdir()
    tiny(folder, kind)
    code = CODE.format(marker=str(marker), kind=kind)
    (folder / "evil.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    edit(folder / "config.json", auto_map=named, architectures=["EvilForCausalLM"])
    edit(folder / "tokenizer_config.json", auto_map=named, tokenizer_class="Tokenizer")
    edit(folder / "generation_config.json", auto_map=named, custom_generate="custom_generate")
    return folder


@dataclass(frozen=True, slots=True)
class Terminal:
    """What came of folders in a process whose standard input is a terminal at which somebody says yes to all."""

    marker: Path
    folders: dict[str, Path]
    found: dict[str, dict[str, str]]
    """For each folder, what came of each entry."""
    said: bytes


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Terminal:
    place = tmp_path_factory.mktemp("terminal")
    marker = place / "it-was-run"
    wanted = {"here": ("evil", LOCAL), "elsewhere": ("evil", REMOTE), "known": ("llama", LOCAL)}
    folders = {name: with_code(place / name, marker, *which) for name, which in wanted.items()}
    keyboard, terminal = pty.openpty()
    os.write(keyboard, b"y\n" * 200)
    command = [sys.executable, "-m", "tests.support.loaders", str(place / "cache"), *map(str, folders.values())]
    environment = {**os.environ, "HF_HOME": str(place / "hub"), "HF_HUB_OFFLINE": "1"}
    with os.fdopen(keyboard), os.fdopen(terminal):
        done = subprocess.run(command, stdin=terminal, capture_output=True, timeout=280, check=True, env=environment)
    lines = [line[line.index(b"{") :] for line in done.stdout.splitlines() if b'{"router"' in line]
    found = dict(zip(folders, map(json.loads, lines), strict=True))
    return Terminal(marker, folders, found, done.stdout + done.stderr)


@pytest.mark.timeout(300)
def test_nothing_was_run_and_nobody_was_asked(terminal: Terminal) -> None:
    assert not terminal.marker.exists()
    assert b"[y/N]" not in terminal.said


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["here", "elsewhere"])
def test_a_model_that_needs_code_is_refused_by_every_worker(name: str, terminal: Terminal) -> None:
    """The other entries load its text files, or refuse them for their own reasons."""
    found, folder = terminal.found[name], terminal.folders[name]
    for entry in WORKERS:
        assert found[entry].startswith("ModelLoadError: "), entry
        assert f"{folder}/config.json names " in found[entry], entry
        assert "Baton runs none of it" in found[entry], entry
    assert all(error == "" or error.startswith("ModelLoadError: ") for error in found.values()), found
    assert len(found) == len(loaders(folder, folder))


@pytest.mark.timeout(300)
def test_a_model_that_transformers_knows_loads_without_the_code_beside_it(terminal: Terminal) -> None:
    assert set(terminal.found["known"].values()) == {""}, terminal.found["known"]


def test_a_tokenizer_that_is_code_is_named(tmp_path: Path, marker: Path) -> None:
    folder = with_code(tmp_path / "model", marker, "llama", LOCAL)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json names \S+.* as the tokenizer, .*runs none of it"):
        check_folder(folder)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("beside", ["nothing", "safetensors", "an index that names it"])
def test_nothing_is_unpickled(beside: str, tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    tiny(folder)
    weights = folder / "model.safetensors"
    torch.save({"model.norm.weight": Evil(marker)}, folder / "pytorch_model.bin")
    (folder / "other.pt").write_bytes(pickle.dumps(Evil(marker)))
    if beside != "nothing":
        weights.rename(folder / "of-another-name.safetensors")
    else:
        weights.unlink()
    if beside == "an index that names it":
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "pytorch_model.bin"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = {name: outcome(entry) for name, entry in loaders(folder, tmp_path / "cache").items()}
    assert not marker.exists()
    for name in ("worker", "worker on transformers", "draft of a worker"):
        assert found[name].startswith("" if beside == "safetensors" else "ModelLoadError: "), found
    if beside == "an index that names it":
        assert "names 'pytorch_model.bin' as a file of weights; each has to be a .safetensors file" in found["up"]

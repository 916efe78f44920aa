from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.utils._paths import filter_repo_objects
from huggingface_hub.utils.tqdm import disable_progress_bars
from rich.console import Console
from safetensors.numpy import save_file

from baton.config import ClusterConfig, ModelConfig
from baton.errors import ModelLoadError
from deploy.models import Progress, ProgressDisplay, cache_dir, resolve
from deploy.models.folder import NUM_SAMPLES, SAMPLE_BYTES, folder_revision, sample_offsets

CONFIG = '{"model_type": "llama"}'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "org" / "My-Model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(CONFIG)
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros(1000, dtype=np.uint8)}, folder / "model-00001-of-00002.safetensors")
    save_file(
        {"b": np.zeros(NUM_SAMPLES * SAMPLE_BYTES * 2, dtype=np.uint8)}, folder / "model-00002-of-00002.safetensors"
    )
    return folder


def test_a_local_folder_is_served_as_it_is(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve(ModelConfig(id=str(folder)), tmp_path)
    assert (resolved.path, resolved.served_name) == (folder, "My-Model")
    assert resolved.revision == folder_revision(folder)
    named = resolve(ModelConfig(id="anything", path=str(folder), served_name="mine", revision="r1"), tmp_path)
    assert (named.path, named.served_name, named.revision) == (folder, "mine", "r1")
    monkeypatch.chdir(tmp_path)  # a folder that is there wins over a hub id
    assert resolve(ModelConfig(id="org/My-Model"), tmp_path).path == folder


def edit_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama", "a": 1}')


def edit_first_byte(folder: Path) -> None:
    with (folder / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.write(b"x")


def edit_last_byte(folder: Path) -> None:
    with (folder / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")


def grow(folder: Path) -> None:
    with (folder / "model-00002-of-00002.safetensors").open("ab") as file:
        file.write(b"\0")


def rename(folder: Path) -> None:
    for path in folder.glob("model-*"):
        path.rename(folder / path.name.replace("model", "weights"))


def index(folder: Path, of_b: int) -> None:
    """Writes which shard tensor b is loaded from; both have one."""
    shard = "model-{:05}-of-00002.safetensors"
    placed = {"a": shard.format(1), "b": shard.format(of_b)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def test_a_tensor_of_another_shard_gives_another_revision(folder: Path) -> None:
    save_file({name: np.ones(1000, dtype=np.uint8) for name in "ab"}, folder / "model-00001-of-00002.safetensors")
    index(folder, 1)
    before = folder_revision(folder)
    index(folder, 2)
    assert folder_revision(folder) != before


@pytest.mark.parametrize("change", [edit_config, edit_first_byte, edit_last_byte, grow, rename])
def test_other_weights_have_another_revision(folder: Path, change: Callable[[Path], None]) -> None:
    before = folder_revision(folder)
    assert folder_revision(folder) == before
    change(folder)
    assert folder_revision(folder) != before


@pytest.mark.parametrize("size", [0, 1, SAMPLE_BYTES, NUM_SAMPLES * SAMPLE_BYTES, 10**9 + 7])
def test_samples_reach_from_the_first_byte_to_the_last(size: int) -> None:
    offsets = sample_offsets(size)
    assert offsets == sorted(set(offsets))
    assert len(offsets) <= NUM_SAMPLES
    if size:
        assert offsets[0] == 0
        assert offsets[-1] + SAMPLE_BYTES >= size > offsets[-1]


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("config.json", "has no config.json, so it is not a model"),
        ("*.safetensors", "has no .safetensors file; Baton reads no other format"),
        ("tokenizer.json", "has no tokenizer.json; write one with"),
    ],
)
def test_a_folder_that_is_not_whole_says_what_is_missing(folder: Path, missing: str, sentence: str) -> None:
    for path in folder.glob(missing):
        path.unlink()
    with pytest.raises(ModelLoadError, match=sentence):
        resolve(ModelConfig(id=str(folder)), folder)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, r"is empty; give the folder that holds config\.json"),
        ({"adapter_config.json": '{"base_model_name_or_path": "org/base"}'}, "an adapter for org/base .* merge it"),
        ({"adapter_config.json": "{}", "adapter_model.safetensors": ""}, "an adapter for another model"),
        ({"params.json": "{}", "tekken.json": "{}"}, "the original layout of Mistral .* in Hugging Face's layout"),
        ({"consolidated.00.pth": ""}, "the original layout of Mistral or Meta"),
        ({"notes.txt": ""}, "has no config.json, so it is not a model"),
    ],
)
def test_a_folder_of_another_kind_says_which(tmp_path: Path, files: dict[str, str], sentence: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelLoadError, match=sentence):
        resolve(ModelConfig(id=str(tmp_path)), tmp_path)


def test_weights_under_the_names_of_the_makers_are_refused(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file({"tok_embeddings.weight": np.zeros((2, 2), dtype=np.float32)}, folder / "consolidated.safetensors")
    with pytest.raises(ModelLoadError, match="the original layout of Mistral or Meta"):
        resolve(ModelConfig(id=str(folder)), folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00009-of-00009.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"lacks model-00009-of-00009\.safetensors"):
        resolve(ModelConfig(id=str(folder)), folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        resolve(ModelConfig(id=str(folder)), folder)


def test_weights_of_a_wrong_length_are_named_with_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    sentence = rf"{path} is damaged: it has {size - 1:,} bytes, and its header describes {size:,}; {{}}\."
    with pytest.raises(ModelLoadError, match=sentence.format("copy or download it again")):
        resolve(ModelConfig(id=str(folder)), folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(ModelLoadError, match=sentence.format("delete what it links to in the hub's cache, and .*")):
        resolve(ModelConfig(id="org/Model"), folder)
    path.write_bytes(path.read_bytes() + b"\0\0")
    with pytest.raises(ModelLoadError, match=f"it has {size + 1:,} bytes, and its header describes {size:,};"):
        resolve(ModelConfig(id=str(folder)), folder)
    for content in (b"", b"no weights at all", bytes(100)):
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match="is damaged: it has no header of safetensors; copy or download"):
            resolve(ModelConfig(id=str(folder)), folder)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "blobs/x"), RuntimeError("Data: No space left on device")],
)
def test_the_hubs_cache_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelLoadError, match=r"There is no space for org/model in \S+: .*No space left.+HF_HOME names"):
        resolve(ModelConfig(id="org/model"), tmp_path)


@pytest.mark.parametrize(
    ("model_id", "sentence"),
    [
        ("/nowhere/at/all", "does not exist"),
        ("smollm", "There is no model 'smollm'. Give a name of the catalogue .gemma-3-270m, smollm2-135m-instruct."),
        ("a/b/c", "There is no model 'a/b/c'"),
    ],
)
def test_what_cannot_be_found(model_id: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=sentence):
        resolve(ModelConfig(id=model_id), tmp_path)


def test_a_hub_model_has_its_commit_as_revision(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disable_progress_bars()  # as transformers does when it loads a model
    snapshot = folder.rename(folder.with_name("0123abcd"))
    asked = []

    def snapshot_download(repo_id: str, *, revision: str | None, tqdm_class: Any, **_: object) -> str:
        asked.append((repo_id, revision))
        with tqdm_class(unit="it", total=3), tqdm_class(unit="B", total=0, name="x", disable=None) as bar:
            bar.total += 10
            bar.refresh()
            bar.update(10)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    stages: list[Progress] = []
    resolved = resolve(ModelConfig(id="org/Model"), snapshot, stages.append)
    assert (resolved.path, resolved.served_name, resolved.revision) == (snapshot, "org/Model", "0123abcd")
    assert asked == [("org/Model", None)] * 2, "what is small, then the weights"
    assert stages[-1] == Progress(stage="download", done=10, total=10, detail="org/Model")
    assert {progress.stage for progress in stages} == {"download"}
    assert capsys.readouterr() == ("", "")


def test_the_hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"Cannot get org/model from the Hugging Face hub: .+ Check the network"):
        resolve(ModelConfig(id="org/model"), tmp_path)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir(ClusterConfig()) == Path("/x/baton")
    assert cache_dir(ClusterConfig(cache_dir="/y")) == Path("/y")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir(ClusterConfig()) == Path.home() / ".cache" / "baton"


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_bars_on_a_terminal_and_a_line_a_stage_elsewhere(terminal: bool) -> None:
    out = StringIO()
    with ProgressDisplay(Console(file=out, force_terminal=terminal, width=100)) as display:
        for done in range(1, 4):
            display.update(Progress(stage="download", done=done, total=3, detail="a wheel"))
        display.update(Progress(stage="dequantise", done=1, total=1))
    if terminal:
        assert "100%" in out.getvalue()
    else:
        assert out.getvalue() == "Downloading a wheel ...\nDequantising ...\n"


HUB_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    *("consolidated.safetensors", "onnx/model.safetensors", "onnx/config.json", "README.md"),
)


@pytest.mark.parametrize("weights", [True, False])
def test_of_the_hub_comes_what_is_wanted(folder: Path, monkeypatch: pytest.MonkeyPatch, weights: bool) -> None:
    fetched: list[str] = []

    def snapshot_download(_: str, *, allow_patterns: list[str], ignore_patterns: list[str], **__: object) -> str:
        chosen = filter_repo_objects(HUB_FILES, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        fetched.extend(chosen)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    if not weights:
        for path in folder.glob("*.safetensors"):
            path.unlink()
    assert resolve(ModelConfig(id="org/Model"), folder, weights=weights).weights_path == folder
    assert set(fetched) == set(HUB_FILES[:5]) | (set(HUB_FILES[5:7]) if weights else set())


def test_the_weights_of_a_model_that_does_not_run_are_not_fetched(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    asked: list[list[str]] = []

    def snapshot_download(_: str, *, allow_patterns: list[str], **__: object) -> str:
        asked.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ModelLoadError, match="holds a BertModel"):
        resolve(ModelConfig(id="org/Model"), folder)
    assert asked == [["*.json", "*.jinja"]]


def test_a_gguf_file_is_recognised(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "only").mkdir()
    for place in (tmp_path / "only" / "x.gguf", tmp_path / "x.gguf"):
        place.write_bytes(b"GGUF")
    for name in ("x.gguf", "only"):
        with pytest.raises(
            ModelLoadError, match=r"x\.gguf is a GGUF file, which this version does not serve; give the"
        ):
            resolve(ModelConfig(id=str(tmp_path / name)), tmp_path)
    with pytest.raises(ModelLoadError, match=r"config\.json is a file; give the folder"):
        resolve(ModelConfig(id=str(folder / "config.json")), tmp_path)
    (folder / "beside.gguf").write_bytes(b"GGUF")
    resolve(ModelConfig(id=str(folder)), tmp_path)


def test_a_folder_may_do_without_weights_where_it_is_said_which_they_are(folder: Path, tmp_path: Path) -> None:
    named, nameless = (ModelConfig(id=str(folder), revision=revision) for revision in ("r1", ""))
    assert resolve(nameless, tmp_path, weights=False).revision == folder_revision(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert resolve(named, tmp_path, weights=False).revision == "r1"
    for model, weights in ((named, True), (nameless, False)):
        with pytest.raises(ModelLoadError, match=r"has no \.safetensors file"):
            resolve(model, tmp_path, weights=weights)

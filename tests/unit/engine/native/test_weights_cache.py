"""Packed weights are kept by what they depend on: one file for each folder that is there."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.native import unused, weights_cache
from engine.native.weights_cache import (
    NUM_SAMPLES,
    SAMPLE_BYTES,
    KeptModel,
    StoredConfig,
    WeightsCache,
    logits_digest,
)
from tests.unit.engine.native.test_packed_file import some_weights

LARGE = 3 * weights_cache.WHOLE_BYTES


def some_model() -> KeptModel:
    return KeptModel(config=StoredConfig({"model_type": "llama"}), weights=some_weights(), logits="0a")


def make_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * LARGE)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "native"


def packed_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.packed"))


def test_what_is_kept_is_found_by_the_next(checkpoint: Path, folder: Path) -> None:
    cache = WeightsCache(folder, checkpoint)
    assert cache.find() is None
    kept = some_model()
    mapped = cache.keep(kept)
    found = WeightsCache(folder, checkpoint).find()
    for one in (mapped, found):
        assert one is not None
        assert (one.logits, one.config.to_dict()) == (kept.logits, {"model_type": "llama"})
        assert torch.equal(one.weights.norm, kept.weights.norm)
        assert one.weights.norm.data_ptr() != kept.weights.norm.data_ptr()


def test_weights_of_another_mode_are_others_and_lie_beside_them(checkpoint: Path, folder: Path) -> None:
    exact, rounded = WeightsCache(folder, checkpoint), WeightsCache(folder, checkpoint, "int8g")
    exact.keep(some_model())
    assert rounded.find() is None
    rounded.keep(some_model())
    assert exact.find() is not None
    assert len(packed_in(folder)) == 2
    edited(checkpoint)
    WeightsCache(folder, checkpoint, "int8g").keep(some_model())
    assert len(packed_in(folder)) == 2, "of its own mode the old content is of no use"


def edited(checkpoint: Path) -> None:
    """A byte that no sample has, with the time of writing of before."""
    path = checkpoint / "model.safetensors"
    state = path.stat()
    with path.open("r+b") as file:
        file.seek((LARGE - SAMPLE_BYTES) * 50 // (NUM_SAMPLES - 1) + 2 * SAMPLE_BYTES)
        file.write(b"v")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def of_another_size(checkpoint: Path) -> None:
    with (checkpoint / "model.safetensors").open("ab") as file:
        file.write(b"w")


def with_a_file_more(checkpoint: Path) -> None:
    (checkpoint / "adapter_config.json").write_text("{}")


def with_another_config(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("[]")


@pytest.mark.parametrize("change", [edited, of_another_size, with_a_file_more, with_another_config])
def test_another_content_of_the_folder_has_other_weights(
    checkpoint: Path, folder: Path, change: Callable[[Path], None]
) -> None:
    assert WeightsCache(folder, checkpoint).keep(some_model()) is not None
    change(checkpoint)
    cache = WeightsCache(folder, checkpoint)
    assert cache.find() is None
    assert cache.keep(some_model()) is not None
    assert len(packed_in(folder)) == 1, "those of the old content are of no use"


def test_content_is_seen_where_a_file_system_has_no_times(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def timeless(self: Path, **options: bool) -> SimpleNamespace:
        state = stat(self, **options)
        return SimpleNamespace(st_mode=state.st_mode, st_size=state.st_size, st_mtime_ns=0, st_ctime_ns=0)

    monkeypatch.setattr(Path, "stat", timeless)
    weights = checkpoint / "model.safetensors"
    found = set()
    for place in (0, LARGE // 2, LARGE - 1):
        weights.write_bytes(b"w" * place + b"v" * (LARGE - place))
        found.add(weights_cache._identity(checkpoint))
    (checkpoint / "config.json").write_text("[]")
    found.add(weights_cache._identity(checkpoint))
    assert len(found) == 4


@pytest.mark.parametrize("what", ["code", "torch", "transformers"])
def test_another_version_packs_anew(checkpoint: Path, folder: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WeightsCache(folder, checkpoint).keep(some_model())
    match what:
        case "code":
            monkeypatch.setattr(weights_cache, "CODE", (*weights_cache.CODE, "step.c"))
        case "torch":
            monkeypatch.setattr(torch, "__version__", "0.1")
        case _:
            monkeypatch.setattr("importlib.metadata.version", lambda name: f"{name} 0.1")
    assert WeightsCache(folder, checkpoint).find() is None


def test_files_of_folders_that_are_gone_go_too_and_no_others(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    gone, other = make_checkpoint(tmp_path / "gone"), make_checkpoint(tmp_path / "other")
    WeightsCache(folder, gone).keep(some_model())
    WeightsCache(folder, other).keep(some_model())
    assert len(packed_in(folder)) == 2
    for path in (*gone.iterdir(), gone):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / "weights-0000-0000.packed").write_text("broken")
    cache = WeightsCache(folder, checkpoint)
    assert cache._path is not None
    left = folder / f"{cache._path.stem}-0000.part"
    left.write_text("of one who has died")
    cache.keep(some_model())
    assert not left.exists()
    assert len(packed_in(folder)) == 2
    for one in (checkpoint, other):
        assert WeightsCache(folder, one).find() is not None


def test_weights_that_nobody_has_used_for_a_month_go_when_others_are_written(
    checkpoint: Path, folder: Path, tmp_path: Path
) -> None:
    used, tried = (WeightsCache(folder, make_checkpoint(tmp_path / name)) for name in ("used", "tried"))
    for cache in (used, tried):
        cache.keep(some_model())
    for path in folder.glob("*.packed"):
        os.utime(path, (path.stat().st_mtime - 2 * unused.UNUSED_S,) * 2)
    assert used.find() is not None
    WeightsCache(folder, checkpoint).keep(some_model())
    assert tried.find() is None
    assert used.find() is not None
    assert len(packed_in(folder)) == 2


def test_a_file_that_is_broken_is_said_and_not_found(
    checkpoint: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = WeightsCache(folder, checkpoint)
    cache.keep(some_model())
    (name,) = packed_in(folder)
    with (folder / name).open("r+b") as file:
        file.truncate(100)
    assert cache.find() is None
    assert "cannot be used and are made anew: it ends within its header" in caplog.text
    with cache.opened() as kept:
        assert kept is None
        cache.keep(some_model())
    assert cache.find() is not None


def test_where_nothing_can_be_written_there_is_no_cache(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "file").write_text("")
    cache = WeightsCache(tmp_path / "file" / "native", checkpoint)
    with cache.opened() as kept:
        assert kept is None
        assert cache.keep(some_model()) is None
    assert "the packed weights are not kept, each worker has its own: " in caplog.text


def test_weights_that_changed_while_they_were_loaded_are_not_kept(
    checkpoint: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = WeightsCache(folder, checkpoint)
    edited(checkpoint)
    assert cache.keep(some_model()) is None
    assert f"files in {checkpoint} cannot be read, or have changed" in caplog.text
    nowhere = WeightsCache(folder, checkpoint / "nowhere")
    assert nowhere.find() is nowhere.keep(some_model()) is None
    assert not folder.exists()


def test_who_comes_second_waits_and_finds_what_the_first_has_kept(checkpoint: Path, folder: Path) -> None:
    found: list[KeptModel | None] = []
    entered = threading.Event()

    def second() -> None:
        with WeightsCache(folder, checkpoint).opened() as kept:
            found.append(kept)
            entered.set()

    cache = WeightsCache(folder, checkpoint)
    thread = threading.Thread(target=second)
    with cache.opened() as kept:
        assert kept is None
        thread.start()
        assert not entered.wait(0.3)
        cache.keep(some_model())
    assert entered.wait(30)
    thread.join(30)
    assert found[0] is not None
    with cache.opened() as first, cache.opened() as other:  # nobody waits for what is there
        assert first is not None
        assert other is not None


def test_the_digest_of_logits_is_of_their_bits() -> None:
    logits = [torch.tensor([[0.0, 1.0]]), torch.tensor([[2.0]])]
    assert logits_digest(logits) == logits_digest([one.clone() for one in logits])
    assert logits_digest([-logits[0] * 0, logits[1]]) != logits_digest([logits[0] * 0, logits[1]])

"""The model that `speculation` measures with float32 weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.native.weights import Form, pack
from tests.bench import speculation


def test_moved_weights_are_held_in_float32_and_norms_stay(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "cache" / "model"
    model.mkdir()
    folder.parent.mkdir()
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-127, 128, (64, 64), generator=generator).float() / 64
    weights = {"matrix": torch.randn(64, 64, generator=generator).bfloat16().float(), "codes": codes}
    save_file({**weights, "norm": torch.ones(64)}, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    assert speculation._moved(model, folder) == folder
    moved = load_file(folder / "model.safetensors")
    assert (folder / "config.json").read_text() == "{}"
    assert torch.equal(moved["norm"], torch.ones(64))
    for name, weight in weights.items():
        assert pack([weight], [None]).form is not Form.F32
        assert pack([moved[name]], [None]).form is Form.F32
        torch.testing.assert_close(moved[name], weight, rtol=2.0**-12, atol=0)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    speculation._moved(model, folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_gates_are_those_of_copying_at_one_stream_and_of_free_text() -> None:
    gates = {part: [case.gate(part) for case in speculation.CASES] for part in speculation.PARTS}
    assert gates["codes"] == [1.4, None, 0.98, 0.98, 0.98, 0.98]
    assert gates["float32"] == [2.0, None, 0.98, 0.98, 0.98, 0.98]
    assert gates["transformers"][:2] == [None, None]
    assert set(gates["first_layers"] + gates["itself"]) == {0.98}

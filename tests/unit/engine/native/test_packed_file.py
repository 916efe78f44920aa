"""Packed weights come out of a file as they were put in, from memory that all who read it share; or not at all."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch

from engine.native import packed_file
from engine.native.weights import EmbeddingRows, Form, PackedLayer, PackedWeights, pack
from tests.unit.engine.native.test_weights import LOSSLESS, of_form

ABOUT = {"config": {"eps": 1e-5, "layers": [1, None]}, "logits": "0a"}


def some_weights() -> PackedWeights:
    """A layer of each form without loss, one matrix with a bias."""
    layers = [
        PackedLayer(norms={"key": torch.rand(7)}, matrices={"out": pack([of_form(form)], [torch.rand(70)])})
        for form in LOSSLESS
    ]
    codes = EmbeddingRows(Form.Q8_0, torch.arange(96, dtype=torch.int8).view(3, 32), torch.rand(3, 1))
    cos, sin = torch.rand(2, 5, 8)
    head = pack([of_form(Form.F32)], [None])
    return PackedWeights(cos=cos, sin=sin, embedding=codes, norm=torch.rand(3), head=head, layers=layers)


def leaves(value: object) -> Iterator[object]:
    if is_dataclass(value):
        for field in fields(value):
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from leaves(one)
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def mapped(path: Path) -> list[str]:
    """The rights of each mapping of a file in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if line.endswith(str(path))]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.packed"
    packed_file.write(path, ABOUT, some_weights())
    return path


def test_weights_come_back_bit_for_bit_and_aligned(tmp_path: Path) -> None:
    weights = some_weights()
    packed_file.write(tmp_path / "file", ABOUT, weights)
    found = packed_file.read(tmp_path / "file")
    assert found.about == packed_file.read_about(tmp_path / "file") == ABOUT
    num_tensors = 0
    for one, other in zip(leaves(found.weights), leaves(weights), strict=True):
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            assert one.data_ptr() % packed_file.ALIGNMENT == 0
            num_tensors += 1
        else:
            assert one == other
    assert num_tensors > 15
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_it_is_mapped_for_all_and_read_only_while_a_tensor_lives(path: Path) -> None:
    found = packed_file.read(path)
    assert mapped(path) == ["r--s"]
    norm = found.weights.norm
    before = norm.clone()
    path.unlink()
    del found
    gc.collect()
    assert torch.equal(norm, before)
    deleted = Path(f"{path} (deleted)")
    assert mapped(deleted) == ["r--s"]
    del norm
    gc.collect()
    assert mapped(deleted) == []


def cut(content: bytes) -> bytes:
    return content[:-1]


def lengthened(content: bytes) -> bytes:
    return content + b"\0"


def with_another_header(content: bytes) -> bytes:
    return content.replace(b'"logits": "0a"', b'"logits": "0b"')


def ended_in_its_header(content: bytes) -> bytes:
    return content[:100]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (cut, "bytes of"),
        (lengthened, "bytes of"),
        (with_another_header, "its header is not the one that was written"),
        (ended_in_its_header, "it ends within its header"),
        (lambda content: content[:20], "it is no file of packed weights"),
        (lambda content: b"other-w1" + content[8:], "it is no file of packed weights"),
        (lambda content: b"", "it is no file of packed weights"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(path: Path, change: Callable[[bytes], bytes], why: str) -> None:
    content = path.read_bytes()
    changed = change(content)
    assert changed != content
    path.write_bytes(changed)
    with pytest.raises(ValueError, match=why):
        packed_file.read(path)


def test_what_cannot_be_written_in_full_leaves_nothing_and_what_was_there(path: Path) -> None:
    content = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            packed_file.write(path, ABOUT, some_weights())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == content

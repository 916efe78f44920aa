"""Whatever a GGUF file announces, it is converted or refused by an error of ours, soon and in little memory."""

from __future__ import annotations

import shutil
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.errors import ModelLoadError
from deploy.models import ignore_progress
from deploy.models.gguf_folder import write_folder
from tests.unit.deploy.models.test_catalogue import write_gguf

MEMORY = 64 * 2**20
SECONDS = 30.0
UINT8, UINT32, STRING, ARRAY, UINT64 = 0, 4, 8, 9, 10


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: list[int], kind: int = 0, place: int = 0, num: int | None = None) -> bytes:
    shape = struct.pack("<I", len(dims) if num is None else num) + struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + shape + struct.pack("<IQ", kind, place)


def header(fields: list[bytes], tensors: list[bytes] = [], num: tuple[int, int] | None = None) -> bytes:  # noqa: B006
    counts = (len(tensors), len(fields)) if num is None else num
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(fields) + b"".join(tensors)


LLAMA = field(b"general.architecture", STRING, text(b"llama"))
NESTED = struct.pack("<IQ", ARRAY, 1) * 5000 + struct.pack("<IQ", UINT8, 1) + b"\0"
HEADERS = {
    "nothing": b"",
    "four bytes": b"GGUF",
    "another version": b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
    "the other order of bytes": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "fields without end": header([], num=(0, 2**63)),
    "tensors without end": header([LLAMA], num=(2**63, 1)),
    "no architecture": header([]),
    "a field twice": header([LLAMA, LLAMA]),
    "an architecture that is a number": header([field(b"general.architecture", UINT32, b"\1\0\0\0")]),
    "an architecture that is no text": header([field(b"general.architecture", STRING, text(b"\xff\xfe"))]),
    "a name that is no text": header([field(b"\xff\xfe", STRING, text(b"x")), LLAMA]),
    "a name without end": header([text(b"x", 2**62)]),
    "a text without end": header([field(b"x", STRING, text(b"x", 2**63 + 7))]),
    "a type that is none": header([field(b"x", 77, b"\0" * 8)]),
    "an array without end": header([field(b"x", ARRAY, struct.pack("<IQ", UINT8, 2**60))]),
    "an array of all there is": header([field(b"x", ARRAY, struct.pack("<IQ", UINT8, 2**22) + bytes(2**22))]),
    "texts without end": header([field(b"x", ARRAY, struct.pack("<IQ", STRING, 2**60))]),
    "arrays within arrays": header([field(b"x", ARRAY, NESTED)]),
    "an alignment of another type": header([LLAMA, field(b"general.alignment", STRING, text(b"x"))]),
    "an alignment of three": header([LLAMA, field(b"general.alignment", UINT32, b"\3\0\0\0")]),
    "a tensor of many dimensions": header([LLAMA], [tensor(b"output.weight", [], num=2**31)]),
    "a tensor without end": header([LLAMA], [tensor(b"output.weight", [2**62, 2**62])]) + bytes(64),
    "a tensor of nothing": header([LLAMA], [tensor(b"output.weight", [0])]) + bytes(64),
    "a tensor of a kind that is none": header([LLAMA], [tensor(b"output.weight", [1], kind=999)]) + bytes(64),
    "a tensor beyond the file": header([LLAMA], [tensor(b"output.weight", [1], place=2**62)]) + bytes(64),
    "tensors over each other": header([LLAMA], [tensor(b"%d" % i, [256]) for i in range(1000)]) + bytes(2048),
    "a tensor twice": header([LLAMA], [tensor(b"output.weight", [1])] * 2) + bytes(64),
}


def converted(path: Path, folder: Path) -> str:
    """What comes of the file, soon and in little memory; empty: a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    began_s = time.monotonic()
    tracemalloc.start()
    try:
        write_folder(path, folder, {}, ignore_progress)
    except ModelLoadError as error:
        return str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY
        assert time.monotonic() - began_s < SECONDS
    return ""


@pytest.mark.parametrize("name", HEADERS)
def test_headers(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(HEADERS[name])
    error = converted(path, tmp_path / "model")
    assert error.startswith(("a.gguf ", "The GGUF file has no general.architecture")), error


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "tiny.gguf"
    write_gguf(path)
    return path


OTHER_VALUES: dict[str, Callable[[gguf.GGUFWriter], Any]] = {
    "heads": lambda writer: writer.add_head_count(0),
    "many heads": lambda writer: writer.add_head_count(2**31),
    "layers": lambda writer: writer.add_block_count(2**31),
    "length": lambda writer: writer.add_context_length(2**31),
    "special token": lambda writer: writer.add_bos_token_id(10**6),
    "tokens": lambda writer: writer.add_token_list(["a"]),
    "kinds": lambda writer: writer.add_token_types([3]),
    "merges": lambda writer: writer.add_token_merges(["a b c", "nothing"]),
    "rope": lambda writer: writer.add_rope_dimension_count(2**31),
}


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_values_that_do_not_fit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gguf"
    write = gguf.GGUFWriter.write_header_to_file

    def changed(writer: gguf.GGUFWriter) -> None:
        fields = writer.kv_data[0]
        writer.kv_data[0] = {}
        OTHER_VALUES[name](writer)
        writer.kv_data[0] = fields | writer.kv_data[0]
        write(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", changed)
    write_gguf(path)
    assert converted(path, tmp_path / "model")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_changed_header_is_refused_or_converted(data: st.DataObject, sound: Path, tmp_path: Path) -> None:
    content = bytearray(sound.read_bytes())
    end = content.index(b"blk.0.attn_norm.weight") + 200
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(4, end))
        content[place] = data.draw(st.sampled_from([0, 1, 4, 8, 9, 10, 13, 127, 128, 255]))
    cut = data.draw(st.one_of(st.just(len(content)), st.integers(0, end)))
    path = tmp_path / "changed.gguf"
    path.write_bytes(content[:cut])
    converted(path, tmp_path / "model")

"""The kernels, compiled for GPUs that are not there."""

from __future__ import annotations

import importlib.resources
import importlib.util
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import pytest

from tests.support import compiled, interpreted

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux"),
]
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Shared memory that a program may have at most, by compute capability; a kernel that wants more does not start."""

SPILLED_WITH_SINKS = 8
"""Bytes that sinks cost the invariant kernel on the newest architecture; the others spill none."""


def at_leisure(case: Any) -> Any:
    """A case of `make chaos`."""
    return pytest.param(case, marks=pytest.mark.chaos)


ARCHES = [at_leisure(80), 90, at_leisure(100)]
COMPILED = [("float16", 64, 8), ("bfloat16", 128, 4), ("float32", 256, 8)]
FURTHER = [("bfloat16", 96, 16), ("bfloat16", 256, 2), ("float32", 80, 1)]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """Nothing that was compiled before is taken for what is there now."""
    if not any(importlib.resources.files("triton").glob("backends/nvidia/bin/ptxas*")):  # type: ignore[attr-defined]
        pytest.skip("needs ptxas, which is in Triton's wheel")
    with interpreted.process(TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("cache"))) as pool:
        yield pool


@pytest.mark.parametrize("arch", ARCHES[1:])
@pytest.mark.parametrize(
    "case", [("bfloat16", 128, 4), *map(at_leisure, [("float32", 64, 3), ("bfloat16", 256, 2)])], ids=str
)
def test_no_register_is_spilled_over_pages_of_8_bit_floats(
    case: tuple[str, int, int], arch: int, compiler: Executor
) -> None:
    for name, found in compiler.submit(compiled.spills, arch, *case, "float8_e4m3fn").result().items():
        assert found.spilled_bytes == 0, name
        assert found.shared_bytes < SHARED_BYTES[arch], name


@pytest.mark.parametrize("arch", ARCHES[1:])
@pytest.mark.parametrize("columns", [4096, 14336])
def test_no_register_is_spilled_where_rows_become_8_bit_floats(columns: int, arch: int, compiler: Executor) -> None:
    assert compiler.submit(compiled.quantizer, arch, "bfloat16", columns).result().spilled_bytes == 0


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", [*COMPILED, *map(at_leisure, FURTHER)], ids=str)
def test_no_register_is_spilled(case: tuple[str, int, int], arch: int, compiler: Executor) -> None:
    for name, found in compiler.submit(compiled.spills, arch, *case).result().items():
        assert found.spilled_bytes == 0, name
        assert found.shared_bytes < SHARED_BYTES[arch], name


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("case", "terms"),
    [(("bfloat16", 256, 2), {"is_capped": True}), (("bfloat16", 64, 8), {"has_sinks": True})],
    ids=["limited", "sinks"],
)
def test_no_register_is_spilled_for_other_scores(
    case: tuple[str, int, int], terms: dict[str, Any], arch: int, compiler: Executor
) -> None:
    for name, found in compiler.submit(compiled.spills, arch, *case, **terms).result().items():
        assert found.spilled_bytes <= SPILLED_WITH_SINKS, name
        assert found.shared_bytes < SHARED_BYTES[arch], name


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", [("bfloat16", 4096, 128), ("float32", 16384, 256), ("float16", 896, 80)], ids=str)
def test_no_register_of_a_fused_kernel_is_spilled(case: tuple[str, int, int], arch: int, compiler: Executor) -> None:
    for name, found in compiler.submit(compiled.fused_spills, arch, *case).result().items():
        assert found.spilled_bytes == 0, name
        assert found.shared_bytes < SHARED_BYTES[arch], name


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("segment", [2, 512, 1024])
def test_copies_of_chunks_spill_no_register(segment: int, arch: int, compiler: Executor) -> None:
    for name, found in compiler.submit(compiled.copies, arch, segment).result().items():
        assert found.spilled_bytes == 0, name
        assert found.num_registers <= 64, f"{name}: eight programs a multiprocessor have room"


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_invariant_kernels_spill_no_register(dtype: str, arch: int, compiler: Executor) -> None:
    for name, found in compiler.submit(compiled.invariant_spills, arch, dtype).result().items():
        assert found.spilled_bytes == 0, name
        assert found.shared_bytes < SHARED_BYTES[arch], name

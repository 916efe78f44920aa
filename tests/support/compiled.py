"""The kernels, compiled ahead of time for GPUs that are not there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import replace
from typing import Any, NamedTuple

from engine.core.runner import DTYPE_BYTES

NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8e4nv"}
FLOATS = {"peaks", "sums", "shares", "scales", "numbers"}
KEPT = {"pages", "codes"}
"""Pointers to what is kept in another data type than that of the arithmetic."""
WHOLE = {"tables", "rows", "places", "tiles"}
ALIGNED = {"query", "key", "value", "pages", "out", "shares", "peaks", "sinks", "sums", "inputs", "codes", "scales"}
"""Pointers that torch gives, and the strides of queries, K and V: multiples of 16."""
FUSED = {"x", "more", "weight", "total", "heads", "cos", "sin", "joined"}
"""Pointers of the fused kernels, which torch gives, too."""
INVARIANT = {"given", "weights", "bias", "numbers", "num_inputs", "num_outputs"}
"""Pointers and widths of the invariant ones."""


class Compiled(NamedTuple):
    """What a kernel needs on a GPU."""

    spilled_bytes: int
    num_registers: int
    shared_bytes: int


def spills(
    arch: int, dtype: str, dim: int, sharing: int, pool: str = "", *, is_capped: bool = False, has_sinks: bool = False
) -> dict[str, Compiled]:
    """What each kernel needs, compiled as it is launched: for tiles of one token, of many, of drafts.

    Args:
        pool: the pages' data type; empty: that of the arithmetic.
        is_capped: whether scores are limited.
        has_sinks: whether there are sinks.
    """
    from engine.model import kernels

    shape = kernels.HeadShape(
        num_kv_heads=8, num_sharing=sharing, block_size=16, k_dim=dim, v_dim=dim, itemsize=DTYPE_BYTES[dtype],
        capability=arch,
    )  # fmt: skip
    found = {}
    for name, of_one_token, shares in (
        ("decode", True, 16),
        ("segment", False, 1),
        ("drafts", False, 16),
        ("invariant", True, 1),
    ):
        shape = replace(shape, is_invariant=name == "invariant")
        tiling = shape.tiling(of_one_token=of_one_token, is_shared=shares > 1)
        division = {"KEYS": tiling.keys, "SHARES": shares, "SHARE": kernels.SHARE_KEYS}
        kind = {"SHARING": sharing, "ROWS": tiling.rows, "IS_CAPPED": is_capped, "HAS_SINKS": has_sinks}
        constants = {**shape.pages, **division, **kind, "IN_ORDER": shape.is_invariant}
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        found[name] = _compiled(kernels.attend, arch, (dtype, pool or dtype), constants, options)
        if shares > 1:
            of_heads = {"HEADS": 8 * sharing, "V_DIM": dim, "V_WIDTH": shape.pages["V_WIDTH"]}
            constants = {**of_heads, **division, "HAS_SINKS": has_sinks}
            found[f"combine of {name}"] = _compiled(kernels.combine, arch, (dtype, dtype), constants, {})
    constants = {**shape.pages, "TOKENS": kernels.WRITE_TOKENS}
    found["write"] = _compiled(kernels.write, arch, (dtype, pool or dtype), constants, {})
    return found


def fused_spills(arch: int, dtype: str, length: int, dim: int) -> dict[str, Compiled]:
    """What each fused kernel needs, compiled as it is launched: for rows so long, and heads of so many dimensions."""
    from engine.model import fused_kernels as kernels

    found = {}
    for name, kernel, constants in (
        ("norm", kernels.norm, {"ROW": length, "HEAD": 0, **kernels.row_of(length)}),
        ("norm of heads", kernels.norm, {"ROW": 48 * dim, "HEAD": dim, **kernels.row_of(dim)}),
        ("sum and norm", kernels.add_norm, kernels.row_of(length)),
        ("rotate", kernels.rotate, kernels.turn_of(48 * dim, dim, 40, dim // 2)),
        ("gate", kernels.gate, {"LENGTH": length, "PIECE": kernels.PIECE}),
    ):
        options = {"num_warps": constants.pop("num_warps", 4)}
        found[name] = _compiled(kernel, arch, (dtype, dtype), constants, options)
    return found


def quantizer(arch: int, dtype: str, columns: int) -> Compiled:
    """What the kernel needs that makes rows 8-bit floats."""
    from engine.model import fp8_kernels

    constants = {"COLUMNS": columns, "PIECE": fp8_kernels.PIECE}
    return _compiled(fp8_kernels.quantize, arch, (dtype, "float8_e4m3fn"), constants, {"num_warps": 8})


def invariant_spills(arch: int, dtype: str) -> dict[str, Compiled]:
    """What the kernels of `engine.batch_invariant` need, compiled as they are launched."""
    from engine.model import invariant_kernels

    widths = {"WIDTH": 4096, "BLOCK": invariant_kernels.SUMMED_NUMBERS}
    found = {"sums": _compiled(invariant_kernels.add_up, arch, (dtype, dtype), widths | {"DIVISOR": 4096}, {})}
    found["running sums"] = _compiled(invariant_kernels.run_up, arch, (dtype, dtype), widths, {})
    for num_rows in (1, 512):
        tiling = invariant_kernels.tiling_of(num_rows, DTYPE_BYTES[dtype])
        constants = {"ROWS": tiling.rows, "OUTPUTS": tiling.outputs, "INPUTS": tiling.inputs, "TILES": 8}
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
        for is_whole in (True, False):
            flags = {"HAS_BIAS": True, "IS_WHOLE": is_whole}
            name = f"{num_rows} rows, whole: {is_whole}"
            found[name] = _compiled(invariant_kernels.multiply, arch, (dtype, dtype), constants | flags, options)
    return found


def _compiled(
    kernel: Any, arch: int, dtypes: tuple[str, str], constants: dict[str, int], options: dict[str, int]
) -> Compiled:
    """What a kernel needs; `dtypes` are those of the arithmetic and of pages."""
    names = kernel.arg_names
    computed, kept = (NAMES[dtype] for dtype in dtypes)
    signature = {name: _type_of(name, kept if name in KEPT else computed, constants) for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name in ALIGNED | FUSED | INVARIANT or name.endswith(("_head", "_token"))
    }
    return compiled_as(kernel, arch, signature, constants, aligned, options)


def copies(arch: int, segment: int) -> dict[str, Compiled]:
    """What the kernels that copy chunks need, for segments of so many words."""
    from kvstore.transfer.copy import kernels

    constants = {"SEGMENT": segment, "ROWS": kernels.TILE // segment}
    found = {}
    for kernel in (kernels.gather, kernels.scatter):
        pointers = dict.fromkeys(("pages", "payload", "index", "sums"), "*i64")
        signature = {name: pointers.get(name, "i32") for name in kernel.arg_names}
        signature |= dict.fromkeys(constants, "constexpr")
        aligned = {(index,): [["tt.divisibility", 16]] for index in (0, 1)}
        found[kernel.__name__] = compiled_as(kernel, arch, signature, constants, aligned, {"num_warps": 4})
    return found


def compiled_as(
    kernel: Any, arch: int, signature: dict[str, str], constants: dict[str, int], aligned: Any, options: dict[str, int]
) -> Compiled:
    """Compiles a kernel for arguments of these types, of which some are aligned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.compiler import ASTSource

    source = ASTSource(kernel, signature, constants, aligned)
    found = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(found.asm["ptx"])
        file.flush()
        command = [get_ptxas(arch).path, "-v", "--regAllocOptLevel=2", f"--gpu-name={sm_arch_from_capability(arch)}"]
        log = subprocess.run([*command, file.name, "-o", "/dev/null"], capture_output=True, text=True, check=True)
    (spilled,) = re.findall(r"(\d+) bytes spill stores", log.stderr)
    (registers,) = re.findall(r"Used (\d+) registers", log.stderr)
    return Compiled(int(spilled), int(registers), found.metadata.shared)


def _type_of(name: str, dtype: str, constants: dict[str, int]) -> str:
    if name in constants:
        return "constexpr"
    if name in FLOATS or (name == "out" and constants.get("SHARES", 1) > 1 and "ROWS" in constants):
        return "*fp32"
    if name in WHOLE:
        return "*i64"
    if name in ("query", "key", "value", "out", "pages", "sinks", "inputs", "codes") or name in FUSED | {
        "given",
        "weights",
        "bias",
    }:
        return f"*{dtype}"
    return "fp32" if name in ("scale", "cap_scale", "eps") else "i32"

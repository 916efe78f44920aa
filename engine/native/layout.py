"""ctypes structures of `step.c`, field by field, and the functions of its library."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from baton.own_files import open_own

PANEL = 32
"""Outputs in a panel of packed weights."""
BLOCK = 32
"""Inputs that share a scale."""
KV_FORMS = {"float32": 0, "bfloat16": 1, "int8": 2}
"""Page formats by data type."""
FAULTS = {
    1: "more tokens than a step may have, or another number than its sequences'",
    2: "a token id outside the vocabulary",
    3: "a sequence that is longer than the model's longest",
    4: "a block that is not there",
    5: "logits of a token that is not in the step",
    6: "a layer that the model does not have",
}
"""Meaning of the error codes that `baton_step` returns for an invalid batch."""


class MatrixStruct(Structure):
    """`Matrix`."""

    _fields_ = (
        ("form", c_int32), ("outputs", c_int32), ("inputs", c_int32), ("panels", c_int32),
        ("weights", c_void_p), ("scale", c_void_p), ("least", c_void_p), ("bias", c_void_p),
    )  # fmt: skip


class ExpertsStruct(Structure):
    """`Experts`."""

    _fields_ = (
        ("count", c_int32), ("chosen", c_int32), ("inner", c_int32), ("normalized", c_int32),
        ("router", MatrixStruct), ("gate_up", POINTER(MatrixStruct)), ("down", POINTER(MatrixStruct)),
    )  # fmt: skip


class LayerStruct(Structure):
    """`Layer`."""

    _fields_ = (
        ("before_attention", c_void_p), ("query", c_void_p), ("key", c_void_p),
        ("after_attention", c_void_p), ("before_mlp", c_void_p), ("after_mlp", c_void_p),
        ("qkv", MatrixStruct), ("out", MatrixStruct), ("gate_up", MatrixStruct), ("down", MatrixStruct),
        ("window", c_int32), ("rotates", c_int32), ("experts", POINTER(ExpertsStruct)),
    )  # fmt: skip


class ModelStruct(Structure):
    """`Model`."""

    _fields_ = (
        ("layers", c_int32), ("hidden", c_int32), ("heads", c_int32), ("kv_heads", c_int32),
        ("head_dim", c_int32), ("rotary_dim", c_int32), ("intermediate", c_int32), ("vocab", c_int32),
        ("activation", c_int32), ("qk_norm", c_int32), ("block_size", c_int32), ("blocks", c_int32),
        ("max_len", c_int32), ("max_tokens", c_int32), ("threads", c_int32), ("embedding_form", c_int32),
        ("norm_kind", c_int32), ("rotates_neighbours", c_int32), ("gated", c_int32), ("parallel", c_int32),
        ("kv_form", c_int32),
        ("eps", c_float), ("embedding_scale", c_float), ("attention_scale", c_float),
        ("residual_scale", c_float), ("logits_divisor", c_float), ("clip", c_float),
        ("embedding", c_void_p), ("embedding_codes_scale", c_void_p),
        ("cos", c_void_p), ("sin", c_void_p), ("norm", c_void_p),
        ("layer", POINTER(LayerStruct)), ("head", POINTER(MatrixStruct)), ("kv", c_void_p), ("layer_stride", c_int64),
    )  # fmt: skip


class BatchStruct(Structure):
    """`Batch`."""

    _fields_ = (
        ("sequences", c_int32), ("tokens", c_int32), ("table_stride", c_int32), ("rows", c_int32),
        ("token_ids", c_void_p), ("begin", c_void_p), ("count", c_void_p), ("tables", c_void_p), ("row", c_void_p),
        ("logits", c_void_p),
    )  # fmt: skip


def load(path: Path) -> ctypes.CDLL:
    """Load a library that `build` made. Its calls release the GIL.

    Raises:
        ForeignFile: another user of this machine may have written it.
        OSError: it cannot be loaded.
    """
    is_part = path.is_relative_to(Path(__file__).parent)  # a user who can write there can also change this code
    library = ctypes.CDLL(str(path)) if is_part else _own_library(path)
    library.baton_open.argtypes = [POINTER(ModelStruct)]
    library.baton_open.restype = c_void_p
    library.baton_step.argtypes = [c_void_p, POINTER(BatchStruct), c_int, c_int]
    library.baton_step.restype = c_int
    library.baton_close.argtypes = [c_void_p]
    library.baton_close.restype = None
    return library


def _own_library(path: Path) -> ctypes.CDLL:
    with open_own(path) as file:
        # Load the file that was checked, even if its path leads elsewhere by now. The loader identifies a library by
        # its name, and would confuse it with a later one of the same descriptor number, so the descriptor stays open.
        return ctypes.CDLL(f"/proc/self/fd/{os.dup(file.fileno())}")

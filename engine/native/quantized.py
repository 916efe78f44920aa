"""Converts a model's exact weights to the format of `model.weights`.

    bf16     all matrix products except a router's use bfloat16: float32 weights are rounded to it, codes are kept and
             rounded when they are used, inputs are rounded, and sums are float32. So does attention
    int8g    the matrices of the layers are multiplied as integers, in groups of 32 inputs: codes are kept, and other
             weights become signed bytes. A router of experts is unchanged, and so is a matrix whose number of inputs
             is not a multiple of 32. A head of 8-bit codes keeps them, and is multiplied as 16-bit integers

The step is first checked with the exact weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from engine.native.layout import BLOCK, PANEL
from engine.native.weights import EmbeddingRows, Form, PackedLayer, PackedMatrix, PackedWeights

FOUR = 4
"""Inputs that one instruction multiplies and adds."""


def quantized(exact: PackedWeights, mode: str) -> PackedWeights:
    """Return the weights in a format of `model.weights`."""
    match mode:
        case "exact":
            return exact
        case "bf16":
            rows, layers = _rounded_rows(exact.embedding), _layers(exact, _of_pairs)
            return replace(exact, embedding=rows, head=_of_pairs(exact.head), layers=layers)
    return replace(exact, head=_of_fine_dots(exact.head), layers=_layers(exact, _of_dots))


def _layers(exact: PackedWeights, made: Callable[[PackedMatrix], PackedMatrix]) -> list[PackedLayer]:
    """Return the layers with converted matrices, except for routers."""
    return [
        replace(
            layer,
            matrices={place: matrix if place == "router" else made(matrix) for place, matrix in layer.matrices.items()},
        )
        for layer in exact.layers
    ]


def _of_pairs(matrix: PackedMatrix) -> PackedMatrix:
    """Return a matrix for products of bfloat16."""
    match matrix.form:
        case Form.Q8_0:
            return replace(matrix, form=Form.PAIRS_Q8, weights=_together(matrix.weights, 2))
        case Form.Q4_1:
            codes = torch.cat([matrix.weights & 15, matrix.weights >> 4], -1).view(-1, matrix.num_inputs, PANEL)
            lower, upper = _together(codes, 2).flatten(2).chunk(2, -1)
            return replace(matrix, form=Form.PAIRS_Q4, weights=lower | (upper << 4))
        case Form.BF16:
            halves = matrix.weights
        case _:
            halves = matrix.weights.bfloat16().view(torch.int16)
    padded = torch.nn.functional.pad(halves, (0, 0, 0, -matrix.num_inputs % BLOCK))
    return replace(matrix, form=Form.PAIRS, weights=_together(padded, 2))


def _rounded_rows(embedding: EmbeddingRows) -> EmbeddingRows:
    if embedding.form is not Form.F32:
        return embedding
    return EmbeddingRows(Form.BF16, embedding.rows.bfloat16().view(torch.int16))


def _of_dots(matrix: PackedMatrix) -> PackedMatrix:
    """Return a matrix for integer products, or the same matrix if that is not possible."""
    if matrix.num_inputs % BLOCK:
        return matrix
    match matrix.form:
        case Form.Q4_1:
            codes = torch.cat([matrix.weights & 15, matrix.weights >> 4], -1).view(-1, matrix.num_inputs, PANEL)
            lower, upper = _together(codes, FOUR).view(-1, 2, BLOCK // 2 * PANEL).unbind(1)
            return replace(matrix, form=Form.DOT_Q4, weights=lower | (upper << 4))
        case Form.Q8_0:
            codes, scale = matrix.weights, matrix.scale
        case Form.BF16:
            codes, scale = _codes((matrix.weights.int() << 16).view(torch.float32), matrix.num_inputs)
        case _:
            codes, scale = _codes(matrix.weights, matrix.num_inputs)
    return replace(matrix, form=Form.DOT_Q8, weights=_unsigned(codes, matrix.num_inputs), scale=scale)


def _of_fine_dots(matrix: PackedMatrix) -> PackedMatrix:
    """Return a matrix of 8-bit codes for products with 16-bit inputs, or the same matrix if it has no such codes."""
    if matrix.form is not Form.Q8_0:
        return matrix
    return replace(matrix, form=Form.DOT_FINE, weights=_unsigned(matrix.weights, matrix.num_inputs))


def _unsigned(codes: torch.Tensor, num_inputs: int) -> torch.Tensor:
    return (_together(codes.view(-1, num_inputs, PANEL), FOUR).short() + 128).to(torch.uint8)


def _codes(panels: torch.Tensor, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return panels of float32 as codes from -127 to 127, and as scales in float16, `[panels, blocks, 32]`."""
    blocks = panels.view(-1, num_inputs // BLOCK, BLOCK, PANEL)
    scale = (blocks.abs().amax(2) / 127).half()
    codes = (blocks / torch.where(scale == 0, 1, scale.float())[:, :, None]).round_().clamp_(-127, 127)
    return codes.to(torch.int8), scale


def _together(panels: torch.Tensor, count: int) -> torch.Tensor:
    """Return panels, `[panels, inputs, 32]`, with `count` adjacent inputs of an output next to each other.

    The result is `[panels, inputs / count, 32, count]`.
    """
    return panels.reshape(len(panels), -1, count, PANEL).transpose(2, 3).contiguous()

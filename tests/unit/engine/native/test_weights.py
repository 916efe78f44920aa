"""Weights are held in the smallest form that gives them back, and in no smaller one."""

from __future__ import annotations

import pytest
import torch

from engine.native.layout import BLOCK, PANEL
from engine.native.weights import Form, PackedMatrix, embedding_rows, pack

OUTPUTS, INPUTS = 70, 96
LOSSLESS = [Form.F32, Form.BF16, Form.Q8_0, Form.Q4_1]


def unpacked(matrix: PackedMatrix) -> torch.Tensor:
    """What `step.c` makes of a packed matrix: `[outputs, inputs]`."""
    num_panels = -(-matrix.num_outputs // PANEL)

    def rows(panels: torch.Tensor) -> torch.Tensor:
        return (
            panels.reshape(num_panels, -1, PANEL).transpose(1, 2).reshape(num_panels * PANEL, -1)[: matrix.num_outputs]
        )

    def wide(scales: torch.Tensor | None) -> torch.Tensor:
        assert scales is not None
        return rows(scales).float().repeat_interleave(BLOCK, 1)

    def apart(pairs: torch.Tensor) -> torch.Tensor:
        return pairs.reshape(-1, PANEL, 2).transpose(1, 2)

    match matrix.form:
        case Form.F32:
            return rows(matrix.weights)
        case Form.BF16:
            return (rows(matrix.weights).int() << 16).view(torch.float32)
        case Form.Q8_0:
            return rows(matrix.weights).float() * wide(matrix.scale)
        case Form.Q4_1:
            halves = torch.cat([matrix.weights & 15, matrix.weights >> 4], -1)
            return rows(halves).float() * wide(matrix.scale) + wide(matrix.least)
        case Form.DOT_Q8 | Form.DOT_FINE:
            fours = matrix.weights.view(-1, PANEL, 4).transpose(1, 2)
            return (rows(fours).float() - 128) * wide(matrix.scale)
        case Form.PAIRS:
            return (rows(apart(matrix.weights)).int() << 16).view(torch.float32)[:, : matrix.num_inputs]
        case Form.PAIRS_Q8:
            return rows(apart(matrix.weights)).float() * wide(matrix.scale)
        case Form.PAIRS_Q4:
            codes = torch.cat([matrix.weights & 15, matrix.weights >> 4], -1)
            return rows(apart(codes)).float() * wide(matrix.scale) + wide(matrix.least)
        case Form.DOT_Q4:
            fours = matrix.weights.view(-1, 1, 4, PANEL, 4)
            halves = torch.cat([fours & 15, fours >> 4], 1).transpose(3, 4)
            return rows(halves).float() * wide(matrix.scale) + wide(matrix.least)


def of_form(form: Form, like: torch.Tensor | None = None) -> torch.Tensor:
    """Weights of a form: random ones, or those next to `like`."""
    torch.manual_seed(1)
    weight = torch.randn(OUTPUTS, INPUTS) if like is None else like
    blocks = weight.view(len(weight), -1, BLOCK)
    match form:
        case Form.F32:
            return weight
        case Form.BF16:
            return weight.bfloat16().float()
        case Form.Q8_0:
            scale = (blocks.abs().amax(-1, True) / 127).half().float()
            return ((blocks / scale).round().clamp(-127, 127).to(torch.int8) * scale).view_as(weight)
        case Form.Q4_1:
            least = blocks.amin(-1, True).half().float()
            scale = ((blocks.amax(-1, True) - least) / 15).half().float()
            codes = ((blocks - least) / scale).round().clamp(0, 15)
            codes[..., 0], codes[..., 1] = 0, 15
            return (codes * scale + least).view_as(weight)
        case _:
            raise ValueError(f"{form} is made of others")


@pytest.mark.parametrize("form", LOSSLESS)
def test_weights_come_back_bit_for_bit_from_the_smallest_form(form: Form) -> None:
    weight = of_form(form)
    matrix = pack([weight], [None])
    assert matrix.form is form
    assert torch.equal(unpacked(matrix).view(torch.int32), weight.view(torch.int32))
    assert matrix.num_bytes == pytest.approx(
        96 * INPUTS * {Form.F32: 4, Form.BF16: 2, Form.Q8_0: 1 + 2 / 32, Form.Q4_1: 0.5 + 4 / 32}[form]
    )


@pytest.mark.parametrize("form", [Form.BF16, Form.Q8_0, Form.Q4_1])
@pytest.mark.parametrize("row", [3, OUTPUTS - 1])
def test_one_other_bit_anywhere_and_the_form_is_another(form: Form, row: int) -> None:
    weight = of_form(form)
    weight.view(torch.int32)[row, 50] ^= 1
    matrix = pack([weight], [None])
    assert matrix.form is Form.F32
    assert torch.equal(unpacked(matrix).view(torch.int32), weight.view(torch.int32))


def test_parts_lie_one_below_the_other_or_in_panels_of_their_own() -> None:
    first, second = of_form(Form.F32)[:40], of_form(Form.F32)[40:]
    bias = torch.arange(30.0)
    joined = pack([first, second], [None, bias])
    assert torch.equal(unpacked(joined), torch.cat([first, second]))
    assert joined.bias is not None
    assert torch.equal(joined.bias[:70], torch.cat([torch.zeros(40), bias]))
    apart = pack([first, second], [None, bias], apart=True)
    assert apart.num_outputs == 64 + 32
    assert torch.equal(unpacked(apart)[64:94], second)
    assert apart.bias is not None
    assert torch.equal(apart.bias[64:94], bias)


def test_a_zero_with_a_sign_is_no_code() -> None:
    weight = of_form(Form.Q8_0)
    assert bool((weight == 0).any()), "or it would not matter"
    weight[weight == 0] = -0.0
    assert pack([weight], [None]).form is Form.F32


def test_inputs_that_fill_no_block_have_no_codes() -> None:
    weight = of_form(Form.Q8_0)[:, :80]
    assert pack([weight], [None]).form is Form.F32


@pytest.mark.parametrize("form", [Form.F32, Form.BF16, Form.Q8_0])
def test_the_embedding_is_held_row_by_row_in_the_smallest_form(form: Form) -> None:
    weight = of_form(form)
    found = embedding_rows(weight)
    assert found.form is form
    match form:
        case Form.BF16:
            again = (found.rows.int() << 16).view(torch.float32)
        case Form.Q8_0:
            assert found.scale is not None
            again = found.rows.float() * found.scale.repeat_interleave(BLOCK, 1)
        case _:
            again = found.rows
    assert torch.equal(again.view(torch.int32), weight.view(torch.int32))
    assert embedding_rows(of_form(Form.Q4_1)).form is Form.F32

"""What `model.weights` names is made of the exact weights: codes stay, others are rounded as little as they must."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.native.quantized import quantized
from engine.native.weights import EmbeddingRows, Form, PackedMatrix, PackedWeights, pack
from tests.unit.engine.native.test_packed_file import some_weights
from tests.unit.engine.native.test_weights import INPUTS, LOSSLESS, OUTPUTS, of_form, unpacked


def weights_of(matrices: dict[str, PackedMatrix]) -> PackedWeights:
    exact = some_weights()
    layer = replace(exact.layers[0], matrices=matrices)
    return replace(exact, head=pack([of_form(Form.F32)], [None]), layers=[layer])


def made(weight: torch.Tensor, mode: str, place: str = "down", bias: torch.Tensor | None = None) -> PackedMatrix:
    return quantized(weights_of({place: pack([weight], [bias])}), mode).layers[0].matrices[place]


@pytest.mark.parametrize("form", [Form.Q8_0, Form.Q4_1])
def test_codes_are_multiplied_as_they_are(form: Form) -> None:
    weight, bias = of_form(form), torch.arange(float(OUTPUTS))
    matrix = made(weight, "int8g", bias=bias)
    assert matrix.form is (Form.DOT_Q8 if form is Form.Q8_0 else Form.DOT_Q4)
    assert torch.equal(unpacked(matrix).view(torch.int32), weight.view(torch.int32))
    assert matrix.bias is not None
    assert torch.equal(matrix.bias[:OUTPUTS], bias)
    assert matrix.num_bytes == pack([weight], [bias]).num_bytes


@pytest.mark.parametrize("form", [Form.F32, Form.BF16])
def test_other_weights_become_bytes_in_groups_of_32(form: Form) -> None:
    weight = of_form(form)
    weight[3, 32:64] = 0
    matrix = made(weight, "int8g")
    assert matrix.form is Form.DOT_Q8
    step = weight.view(OUTPUTS, -1, 32).abs().amax(-1, True) / 127
    off = (unpacked(matrix) - weight).view(OUTPUTS, -1, 32).abs()
    assert bool((off <= step * 0.501).all()), "half a step of the group's own scale"
    assert bool((off > step * 0.1).any()), "or nothing was rounded"


PAIRS = {Form.F32: Form.PAIRS, Form.BF16: Form.PAIRS, Form.Q8_0: Form.PAIRS_Q8, Form.Q4_1: Form.PAIRS_Q4}


@pytest.mark.parametrize("form", LOSSLESS)
def test_bf16_lays_inputs_in_pairs_rounds_what_is_float32_and_keeps_codes(form: Form) -> None:
    weight = of_form(form)
    matrix = made(weight, "bf16")
    assert matrix.form is PAIRS[form]
    expected = weight.bfloat16().float() if form is Form.F32 else weight
    assert torch.equal(unpacked(matrix), expected)
    assert matrix.num_bytes == pack([expected], [None]).num_bytes


def test_bf16_fills_the_last_inputs_up_and_leaves_routers() -> None:
    weight = of_form(Form.BF16)[:, : INPUTS - 16]
    matrix = made(weight, "bf16")
    assert matrix.num_inputs == INPUTS - 16
    assert torch.equal(unpacked(matrix), weight)
    assert matrix.weights.shape == (3, INPUTS // 2, 32, 2)
    assert not matrix.weights[:, (INPUTS - 16) // 2 :].any()
    router = weights_of({"router": pack([weight], [None])})
    assert quantized(router, "bf16").layers[0].matrices == router.layers[0].matrices


def test_a_head_without_codes_embedding_routers_and_uneven_inputs_keep_their_weights_in_int8g() -> None:
    exact = weights_of(
        {"router": pack([of_form(Form.F32)], [None]), "out": pack([of_form(Form.F32)[:, : INPUTS - 16]], [None])}
    )
    found = quantized(exact, "int8g")
    assert found.head is exact.head
    assert found.embedding is exact.embedding
    assert found.layers[0].matrices == exact.layers[0].matrices
    assert found.layers[0].norms is exact.layers[0].norms


def test_a_head_of_codes_keeps_them_in_int8g() -> None:
    weight = of_form(Form.Q8_0)
    head = quantized(replace(weights_of({}), head=pack([weight], [None])), "int8g").head
    assert head.form is Form.DOT_FINE
    assert torch.equal(unpacked(head).view(torch.int32), weight.view(torch.int32))


def test_head_and_embedding_are_rounded_in_bf16() -> None:
    rows = of_form(Form.F32)
    exact = replace(weights_of({}), embedding=EmbeddingRows(Form.F32, rows))
    found = quantized(exact, "bf16")
    assert found.head.form is Form.PAIRS
    assert found.embedding.form is Form.BF16
    assert torch.equal(found.embedding.rows.view(torch.bfloat16), rows.bfloat16())
    coded = replace(exact, embedding=EmbeddingRows(Form.Q8_0, rows, rows))
    assert quantized(coded, "bf16").embedding is coded.embedding
    assert quantized(exact, "exact") is exact

"""The same bits beside others, in chunks and after a resume: kernels and whole models, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Executor

import pytest
import torch

from baton.errors import ConfigError
from engine.core.runner import FP8
from engine.model.batch_invariance import RowByRow, refuse_unkept
from tests.support import invariant

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, which is for Linux")
PRODUCTS = {
    "few rows": ((40, 96, 48), "float32", False),
    "many rows": ((150, 128, 40), "float32", True),
    "odd numbers": ((70, 77, 33), "float32", True),
    "halves": ((140, 256, 130), "float16", True),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_is_multiplied_as_if_alone(name: str, interpreter: Executor) -> None:
    difference, others = interpreter.submit(invariant.product_differs_by, *PRODUCTS[name]).result()
    assert others == []
    assert difference <= (3e-2 if name == "halves" else 3e-5)


@pytest.mark.parametrize("width", [8, 33, 1024, 2500])
def test_a_mean_is_its_rows(width: int, interpreter: Executor) -> None:
    difference, is_alone = interpreter.submit(invariant.means_are_those_of_rows, width).result()
    assert difference <= 1e-6
    assert is_alone


@pytest.mark.slow
def test_a_draw_and_its_scores_are_its_rows(interpreter: Executor) -> None:
    assert interpreter.submit(invariant.samples_differ).result() == []


@pytest.mark.parametrize("dims", [(64, 1), pytest.param((80, 3), marks=pytest.mark.chaos)])
@pytest.mark.parametrize("asked", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_token_is_attended_as_if_alone_where_that_is_asked_for(
    dims: tuple[int, int], asked: bool, interpreter: Executor
) -> None:
    assert interpreter.submit(invariant.attention_is_invariant, dims, asked=asked).result() == asked


@pytest.mark.full
def test_over_pages_of_8_bit_floats_too(interpreter: Executor) -> None:
    assert interpreter.submit(invariant.attention_is_invariant, (64, 1), asked=True, pages=FP8).result()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", pytest.param("cohere", marks=pytest.mark.chaos)])
def test_no_way_to_the_same_tokens_has_other_bits(kind: str, interpreter: Executor) -> None:
    assert interpreter.submit(invariant.ways_differ, kind).result() == []


@pytest.mark.slow
def test_rows_of_a_graph_that_are_nobodys_change_nothing(interpreter: Executor) -> None:
    assert not interpreter.submit(invariant.graphs_differ, "llama").result()


def test_what_is_not_known_is_refused_by_name(interpreter: Executor) -> None:
    words = interpreter.submit(invariant.refusal_of, "qwen3_moe").result()
    assert "engine.batch_invariant is not supported with Qwen3MoeExperts, Qwen3MoeTopKRouter" in words


@pytest.mark.parametrize(
    ("device", "weights", "words"),
    [("cpu", "exact", "on a CPU needs the native step"), ("cuda", "fp8", "with model.weights fp8")],
)
def test_devices_and_weights_that_cannot_keep_it_are_refused(device: str, weights: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse_unkept(torch.device(device), weights)
    refuse_unkept(torch.device("cuda"), "exact")


def test_sums_that_nobody_has_asked_for_yet_are_not_left_to_torch() -> None:
    numbers = torch.ones(2, 3)
    with RowByRow():
        assert (numbers > 0).sum(0).tolist() == [2, 2, 2], "those of whole numbers are exact"
        with pytest.raises(NotImplementedError, match=r"torch's sum with \(0,\)"):
            numbers.sum(0)

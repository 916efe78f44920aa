from __future__ import annotations

import math
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.sampling import SamplingParams


@pytest.mark.parametrize(
    ("param", "value", "sentence"),
    [
        ("max_tokens", 0, "sampling.max_tokens must be at least 1; got 0. Change or unset it."),
        ("max_tokens", -3, "sampling.max_tokens must be at least 1; got -3. Change or unset it."),
        ("temperature", -0.1, "sampling.temperature must be between 0 and 2; got -0.1. Change or unset it."),
        ("temperature", 2.1, "sampling.temperature must be between 0 and 2; got 2.1. Change or unset it."),
        ("temperature", math.nan, "sampling.temperature must be between 0 and 2; got nan. Change or unset it."),
        ("temperature", math.inf, "sampling.temperature must be between 0 and 2; got inf. Change or unset it."),
        ("top_k", -2, "sampling.top_k must be -1 or 0 (all tokens) or at least 1; got -2. Change or unset it."),
        ("top_p", 0.0, "sampling.top_p must be greater than 0 and at most 1; got 0.0. Change or unset it."),
        ("top_p", 1.5, "sampling.top_p must be greater than 0 and at most 1; got 1.5. Change or unset it."),
        ("top_p", math.nan, "sampling.top_p must be greater than 0 and at most 1; got nan. Change or unset it."),
        ("min_p", -0.1, "sampling.min_p must be between 0 and 1; got -0.1. Change or unset it."),
        ("min_p", 1.1, "sampling.min_p must be between 0 and 1; got 1.1. Change or unset it."),
        ("n", 0, "sampling.n must be between 1 and 16; got 0. Change or unset it."),
        ("n", 17, "sampling.n must be between 1 and 16; got 17. Change or unset it."),
        ("seed", 2**63, f"sampling.seed must be a signed 64-bit integer; got {2**63}. Change or unset it."),
        ("stop_token_ids", (5,) * 4097, "sampling.stop_token_ids must be at most 4096 ids; got 4097 ids. "
         "Change or unset it."),
        ("stop", ("x",) * 17, "sampling.stop must be at most 16 strings; got 17 strings. Change or unset it."),
        ("stop", ("a", ""), "sampling.stop must be strings of 1 to 256 characters; got one of 0 characters. "
         "Change or unset it."),
        ("stop", ("x" * 257,), "sampling.stop must be strings of 1 to 256 characters; got one of 257 characters. "
         "Change or unset it."),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named_with_its_range(param: str, value: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**{param: value})
    assert str(refusal.value) == sentence
    assert refusal.value.param == param


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens": 1, "temperature": 0, "top_k": -1, "top_p": 1e-9, "min_p": 0, "n": 1, "seed": -(2**63) + 1},
        {"temperature": 2.0, "top_k": 10**6, "top_p": 1.0, "min_p": 1.0, "n": 16, "seed": 2**63 - 1},
        {"stop": ("x" * 256,) * 16, "stop_token_ids": (0, 5) * 2048, "ignore_eos": True},
    ],
)
def test_the_edges_of_the_ranges_are_inside(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    assert all(getattr(params, name) == value for name, value in values.items())

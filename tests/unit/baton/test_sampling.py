from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields, replace
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
        ("logprobs", -1, "sampling.logprobs must be between 0 and 20; got -1. Change or unset it."),
        ("logprobs", 21, "sampling.logprobs must be between 0 and 20; got 21. Change or unset it."),
        ("logprob_token_ids", (4,) * 21, "sampling.logprob_token_ids must be at most 20 ids; got 21 ids. "
         "Change or unset it."),
        ("min_tokens", -1, "sampling.min_tokens must be at least 0; got -1. Change or unset it."),
        ("repetition_penalty", 0.0, "sampling.repetition_penalty must be between 0.01 and 2; got 0.0. "
         "Change or unset it."),
        ("repetition_penalty", math.nan, "sampling.repetition_penalty must be between 0.01 and 2; got nan. "
         "Change or unset it."),
        ("presence_penalty", 2.1, "sampling.presence_penalty must be between -2 and 2; got 2.1. Change or unset it."),
        ("presence_penalty", math.nan, "sampling.presence_penalty must be between -2 and 2; got nan. "
         "Change or unset it."),
        ("frequency_penalty", -2.1, "sampling.frequency_penalty must be between -2 and 2; got -2.1. "
         "Change or unset it."),
        ("logit_bias", ((4, 100.5),), "sampling.logit_bias must be numbers between -100 and 100; "
         "got 100.5 for token 4. Change or unset it."),
        ("logit_bias", ((4, math.nan),), "sampling.logit_bias must be numbers between -100 and 100; "
         "got nan for token 4. Change or unset it."),
        ("logit_bias", ((4, 1.0),) * 1025, "sampling.logit_bias must be at most 1024 ids; got 1025 ids. "
         "Change or unset it."),
        ("bad_words", ("x",) * 129, "sampling.bad_words must be at most 128 strings; got 129 strings. "
         "Change or unset it."),
        ("bad_words", ("",), "sampling.bad_words must be strings of 1 to 256 characters; got one of 0 characters. "
         "Change or unset it."),
        ("bad_word_ids", ((),), "sampling.bad_word_ids must be sequences of 1 to 64 ids; got one of 0 ids. "
         "Change or unset it."),
        ("bad_word_ids", ((5,) * 65,), "sampling.bad_word_ids must be sequences of 1 to 64 ids; got one of 65 ids. "
         "Change or unset it."),
        ("bad_word_ids", ((5,),) * 257, "sampling.bad_word_ids must be at most 256 sequences; got 257 sequences. "
         "Change or unset it."),
        ("bad_word_ids", ((5,) * 64,) * 65, "sampling.bad_word_ids must be at most 4096 ids together; got 4160. "
         "Change or unset it."),
        ("allowed_token_ids", (5,) * 1025, "sampling.allowed_token_ids must be at most 1024 ids; got 1025 ids. "
         "Change or unset it."),
        ("typical_p", 0.0, "sampling.typical_p must be greater than 0 and at most 1; got 0.0. Change or unset it."),
        ("dry_multiplier", -0.1, "sampling.dry_multiplier must be between 0 and 100; got -0.1. Change or unset it."),
        ("dry_multiplier", math.inf, "sampling.dry_multiplier must be between 0 and 100; got inf. "
         "Change or unset it."),
        ("dry_base", 0.9, "sampling.dry_base must be between 1 and 4; got 0.9. Change or unset it."),
        ("dry_base", 4.1, "sampling.dry_base must be between 1 and 4; got 4.1. Change or unset it."),
        ("dry_allowed_length", 0, "sampling.dry_allowed_length must be between 1 and 50; got 0. "
         "Change or unset it."),
        ("dry_range", -1, "sampling.dry_range must be between 0 (all tokens) and 2147483647; got -1. "
         "Change or unset it."),
        ("dry_sequence_breakers", ("x",) * 65, "sampling.dry_sequence_breakers must be at most 64 strings; "
         "got 65 strings. Change or unset it."),
        ("dry_sequence_breakers", ("",), "sampling.dry_sequence_breakers must be strings of 1 to 256 characters; "
         "got one of 0 characters. Change or unset it."),
        ("dry_breaker_ids", (5,) * 129, "sampling.dry_breaker_ids must be at most 128 ids; got 129 ids. "
         "Change or unset it."),
        ("xtc_probability", 1.1, "sampling.xtc_probability must be between 0 and 1; got 1.1. Change or unset it."),
        ("xtc_threshold", -0.1, "sampling.xtc_threshold must be between 0 and 1; got -0.1. Change or unset it."),
        ("xtc_exempt_token_ids", (5,) * 1025, "sampling.xtc_exempt_token_ids must be at most 1024 ids; got 1025 ids. "
         "Change or unset it."),
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


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.min_tokens must be at most max_tokens, 4; got 5"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(InvalidRequest, match="allowed_token_ids must be ids of which not all are bad words"):
        SamplingParams(allowed_token_ids=(4, 5), bad_word_ids=((4,), (5,), (6, 7)))
    SamplingParams(allowed_token_ids=(4, 5), bad_word_ids=((4,), (5, 5)))


def test_a_plain_request_adjusts_nothing() -> None:
    assert not SamplingParams().adjusts_logits
    assert not SamplingParams(temperature=0.5, typical_p=0.5, xtc_probability=1.0, stop_token_ids=(4,)).adjusts_logits
    with_history: list[dict[str, Any]] = [
        {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"dry_multiplier": 1.0},
        {"bad_word_ids": ((4, 5),)},
    ]  # fmt: skip
    for asked in with_history:
        assert SamplingParams(**asked).needs_history
        assert SamplingParams(**asked).adjusts_logits
    without: list[dict[str, Any]] = [
        {"bad_word_ids": ((4,),)},
        {"min_tokens": 1},
        {"logit_bias": ((4, 1.0),)},
        {"allowed_token_ids": (4,)},
    ]
    for asked in without:
        assert not SamplingParams(**asked).needs_history
        assert SamplingParams(**asked).adjusts_logits


def test_every_field_with_token_ids_is_known_as_one() -> None:
    """These are checked against the vocabulary."""
    named = set(SamplingParams().named_token_ids)
    assert named == {field.name for field in fields(SamplingParams) if field.name.endswith(("_ids", "_id"))} | {
        "logit_bias"
    }


def test_a_seed_is_set_without_another_change() -> None:
    plain = SamplingParams(temperature=0.5, stop=("a",), max_tokens=3)
    seeded = plain.seeded(-7)
    assert seeded == replace(plain, seed=-7)
    assert seeded.asked == replace(plain, seed=-7).asked == {**plain.asked, "seed": -7}
    assert plain.seed is None
    assert "seed" not in plain.asked
    with pytest.raises(FrozenInstanceError):
        seeded.seed = 8  # type: ignore[misc]

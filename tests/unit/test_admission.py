from __future__ import annotations

from typing import Any

import pytest

from baton.errors import InvalidRequest, ModelNotFound, Overloaded
from baton.sampling import SamplingParams
from router.admission import (
    Limiter,
    ModelFacts,
    check_length,
    check_model,
    check_prompt,
    check_request_id,
    sampling_params,
    with_max_tokens,
)

FACTS = ModelFacts("tiny", 500, 100, SamplingParams(temperature=0.2, top_p=0.9, stop_token_ids=(7,)))


def params_of(asked: dict[str, Any], facts: ModelFacts) -> SamplingParams:
    """For a prompt of 20 tokens."""
    return with_max_tokens(sampling_params(asked, facts), 20, facts)


@pytest.mark.parametrize("request_id", ["x" * 129, "a\nb", "\ud800", "naïve"])
def test_a_request_id_is_short_and_printable(request_id: str) -> None:
    check_request_id("")
    check_request_id("chatcmpl-" + "0" * 32)
    with pytest.raises(InvalidRequest, match="at most 128 printable ASCII characters"):
        check_request_id(request_id)


def test_the_model_may_be_left_out_but_not_mistaken() -> None:
    check_model("", FACTS)
    check_model("tiny", FACTS)
    with pytest.raises(ModelNotFound, match="the model 'Tiny' is not served here; use 'tiny'") as refusal:
        check_model("Tiny", FACTS)
    assert (refusal.value.param, refusal.value.http) == ("model", 404)


@pytest.mark.parametrize("prompt", [[0], [499], [1] * 99])
def test_prompts_at_the_edges_are_let_in(prompt: list[int]) -> None:
    check_prompt(prompt, FACTS)


@pytest.mark.parametrize(
    ("prompt", "param", "sentence"),
    [
        ([], "input", "the prompt is empty; send at least one token"),
        ([1] * 100, "input", "the prompt has 100 tokens, but tiny takes at most 99"),
        ([1, 500, 2], "token_ids", "token id 500 is outside the vocabulary of tiny; ids go from 0 to 499"),
        ([1, -1], "token_ids", "token id -1 is outside the vocabulary"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[int], param: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as refusal:
        check_prompt(prompt, FACTS)
    assert refusal.value.param == param


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    check_length(1000, 10, FACTS)
    with pytest.raises(InvalidRequest, match="the prompt has 1001 characters, but the 99 tokens that tiny takes"):
        check_length(1001, 10, FACTS)


def test_the_models_defaults_fill_in_what_was_not_asked() -> None:
    params = params_of({"top_p": 0.5, "max_tokens": 10}, FACTS)
    assert params == SamplingParams(temperature=0.2, top_p=0.5, max_tokens=10, stop_token_ids=(7,))
    assert params_of({"temperature": 0.0}, FACTS).temperature == 0


@pytest.mark.parametrize(("default", "expected"), [(0, 80), (16, 16), (1000, 80)])
def test_the_answers_length_when_nobody_says(default: int, expected: int) -> None:
    facts = ModelFacts("tiny", 500, 100, SamplingParams(), default)
    assert params_of({}, facts).max_tokens == expected


def test_prompt_and_answer_must_fit_the_context_window() -> None:
    assert params_of({"max_tokens": 80}, FACTS).max_tokens == 80
    with pytest.raises(
        InvalidRequest, match="context window of tiny is 100; lower max_tokens to at most 80"
    ) as refusal:
        params_of({"max_tokens": 81}, FACTS)
    assert refusal.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("asked", "param"),
    [({"stop_token_ids": (5, 500)}, "stop_token_ids"), ({"top_p": 0.0}, "top_p"), ({"n": 17}, "n")],
)
def test_bad_values_are_refused_by_name(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"sampling\.{param}") as refusal:
        params_of(asked, FACTS)
    assert refusal.value.param == param


def test_the_limiter_counts_choices() -> None:
    limiter = Limiter(4)
    with limiter.slot("a", 3):
        assert limiter.num_in_flight == 3
        with pytest.raises(Overloaded, match="3 of at most 4 answers are being generated"), limiter.slot("b", 2):
            pass
        with limiter.slot("b", 1):
            assert limiter.num_in_flight == 4
        assert limiter.num_in_flight == 3
    assert limiter.num_in_flight == 0


def test_a_request_id_is_unique_while_it_is_in_flight() -> None:
    limiter = Limiter(4)
    with limiter.slot("a", 1):
        with pytest.raises(InvalidRequest, match="request_id 'a' is in flight") as refusal, limiter.slot("a", 1):
            pass
        assert refusal.value.param == "request_id"
        assert limiter.num_in_flight == 1
        with pytest.raises(InvalidRequest), limiter.slot("a", 1):
            pass
    with limiter.slot("a", 1):
        pass


def test_a_slot_is_free_again_after_an_error() -> None:
    limiter = Limiter(1)
    with pytest.raises(RuntimeError), limiter.slot("a", 1):
        raise RuntimeError
    with limiter.slot("a", 1):
        pass
    assert limiter.num_in_flight == 0


def test_retry_after_follows_how_long_requests_take() -> None:
    limiter = Limiter(1)

    def retry_after_s() -> float:
        with limiter.slot("a", 1):
            try:
                with limiter.slot("b", 1):
                    raise AssertionError("let in")
            except Overloaded as refusal:
                return refusal.retry_after_s

    first = retry_after_s()
    for _ in range(50):
        limiter.record(20.0)
    assert first < retry_after_s() <= 20.0
    assert retry_after_s() > 18.0
    for _ in range(200):
        limiter.record(0.0)
    assert retry_after_s() == 0.1, "never at once"

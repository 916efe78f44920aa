from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api import GenerateRequest, Text
from baton.errors import InvalidRequest, ModelNotFound, Overloaded
from baton.sampling import SamplingParams
from router.admission import (
    Limiter,
    ModelFacts,
    check_length,
    check_model,
    check_prompt,
    check_request_id,
    check_resume,
    check_vocabulary,
    model_not_found,
    nearest_model,
    sampling_params,
    with_lengths,
)
from router.admission.gate import CROWDED, CROWDED_S
from router.admission.limits import Limits
from router.admission.tenants import DEFAULT_TENANT, Tenant

FACTS = ModelFacts(
    id="tiny",
    vocab_size=500,
    max_model_len=100,
    default_sampling=SamplingParams(temperature=0.2, top_p=0.9, stop_token_ids=(7,)),
)


def params_of(asked: dict[str, Any], facts: ModelFacts) -> SamplingParams:
    """For a prompt of 20 tokens."""
    return with_lengths(sampling_params(asked, facts), asked, 20, facts)


@pytest.mark.parametrize("request_id", ["x" * 129, "a\nb", "\ud800", "naïve"])
def test_a_request_id_is_short_and_printable(request_id: str) -> None:
    check_request_id("")
    check_request_id("chatcmpl-" + "0" * 32)
    with pytest.raises(InvalidRequest, match="at most 128 printable ASCII characters"):
        check_request_id(request_id)


@pytest.mark.parametrize(
    ("request_id", "resume_from", "max_tokens", "param"),
    [
        ("", {}, 5, ""),
        ("r", {0: 0, 2: 5}, 5, ""),
        ("r", {1: 10_000}, None, ""),
        ("", {0: 1}, 5, "request_id"),
        ("r", {3: 0}, 5, "resume_from"),
        ("r", {-1: 0}, 5, "resume_from"),
        ("r", {0: 1, 1: 6}, 5, "resume_from"),
        ("r", {0: -1}, 5, "resume_from"),
        ("r", {0: -1}, None, "resume_from"),
    ],
)
def test_what_is_continued_is_of_this_request(
    request_id: str, resume_from: dict[int, int], max_tokens: int | None, param: str
) -> None:
    request = GenerateRequest(prompt=Text("x"), request_id=request_id, resume_from=resume_from)
    params = SamplingParams(n=3, max_tokens=max_tokens)
    if not param:
        check_resume(request, params)
        return
    with pytest.raises(InvalidRequest, match=param) as refusal:
        check_resume(request, params)
    assert refusal.value.param == param


def test_the_model_may_be_left_out_but_not_mistaken() -> None:
    check_model("", FACTS)
    check_model("tiny", FACTS)
    with pytest.raises(ModelNotFound, match="the model 'Tiny' does not exist; did you mean 'tiny'") as refusal:
        check_model("Tiny", FACTS)
    assert (refusal.value.param, refusal.value.http) == ("model", 404)


@pytest.mark.parametrize(
    ("name", "known", "sentence"),
    [
        ("lama-3", ["gpt", "llama-3", "llama-2"], "the model 'lama-3' does not exist; did you mean 'llama-3'?"),
        ("qwen", ["tiny"], "the model 'qwen' does not exist; use 'tiny'"),
        ("qwen", ["tiny", "poet"], "the model 'qwen' does not exist; /v1/models lists those that you can use"),
        ("qwen", [], "the model 'qwen' does not exist; no model is available to this API key"),
        ("x\ny", ["tiny"], r"the model 'x\ny' does not exist; use 'tiny'"),
    ],
)
def test_a_name_that_is_not_served_leads_to_those_that_are(name: str, known: list[str], sentence: str) -> None:
    error = model_not_found(name, known)
    assert str(error).startswith(sentence)
    assert (error.param, error.http, error.status) == ("model", 404, "NOT_FOUND")


def test_a_name_is_looked_for_among_thousands_in_a_moment() -> None:
    """Adapters' names may all be alike, and clients may send a name of any length."""
    known = [f"adapter-of-the-customer-{number * 7919 % 10_000:05d}" for number in range(10_000)]
    start = time.process_time()
    assert nearest_model("Adapter-of-the-customer-0791", known).startswith("adapter-of-the-customer-0791")
    assert nearest_model("adapter-of-the-customer-" + "x" * 10**6, known) == ""
    assert len(str(model_not_found("x" * 10**6, known))) < 400
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("prompt", [[0], [499], [1] * 99])
def test_prompts_at_the_edges_are_admit(prompt: list[int]) -> None:
    check_prompt(prompt, FACTS)
    check_vocabulary(prompt, FACTS)


@pytest.mark.parametrize(
    ("prompt", "param", "sentence"),
    [
        ([], "input", "the prompt is empty; send at least one token"),
        ([1] * 100, "input", "the prompt has 100 tokens, but tiny takes at most 99"),
    ],
)
def test_bad_prompts_are_refused(prompt: list[int], param: str, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as refusal:
        check_prompt(prompt, FACTS)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([1, 500, 2], "token id 500 is outside the vocabulary of tiny; ids go from 0 to 499"),
        ([1, -1], "token id -1 is outside the vocabulary"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(prompt: list[int], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as refusal:
        check_vocabulary(prompt, FACTS)
    assert refusal.value.param == "token_ids"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    check_length(1000, 10, FACTS)
    with pytest.raises(InvalidRequest, match="the prompt has 1001 characters, but tiny accepts 99 prompt tokens"):
        check_length(1001, 10, FACTS)


def test_the_models_defaults_fill_in_what_was_not_asked() -> None:
    params = params_of({"top_p": 0.5, "max_tokens": 10}, FACTS)
    assert params == SamplingParams(temperature=0.2, top_p=0.5, max_tokens=10, stop_token_ids=(7,))
    assert params_of({"temperature": 0.0}, FACTS).temperature == 0


@pytest.mark.parametrize(
    "asked",
    [
        {"stop_token_ids": (1, 500)},
        {"logit_bias": ((1, 1.0), (500, 1.0))},
        {"bad_word_ids": ((1, 2), (3, 500, 4))},
        {"allowed_token_ids": (500,)},
        {"logprob_token_ids": (500,)},
        {"dry_breaker_ids": (500,)},
        {"xtc_exempt_token_ids": (-1,)},
    ],
)
def test_ids_that_the_sampling_names_are_the_vocabularys(asked: dict[str, Any]) -> None:
    (name,) = asked
    sentence = rf"sampling\.{name} holds (500|-1), outside the vocabulary of tiny; ids go from 0 to 499"
    with pytest.raises(InvalidRequest, match=sentence) as refusal:
        sampling_params(asked, FACTS)
    assert refusal.value.param == name


def test_a_recommended_least_length_gives_way_to_a_shorter_answer() -> None:
    facts = replace(FACTS, default_sampling=SamplingParams(min_tokens=5))
    assert params_of({}, facts).min_tokens == 5
    assert params_of({"max_tokens": 3}, facts).min_tokens == 3
    short = replace(facts, default_max_tokens=2)
    assert (params_of({}, short).min_tokens, params_of({}, short).max_tokens) == (2, 2)
    for as_recommended_or_not in (4, 5):
        with pytest.raises(InvalidRequest, match="min_tokens must be at most max_tokens, 2; got"):
            params_of({"min_tokens": as_recommended_or_not}, short)
    with pytest.raises(InvalidRequest, match="min_tokens must be at most max_tokens, 3; got 4"):
        params_of({"max_tokens": 3, "min_tokens": 4}, facts)
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1"):
        params_of({"max_tokens": -3}, facts)


@pytest.mark.parametrize(("default", "expected"), [(0, 80), (16, 16), (1000, 80)])
def test_the_answers_length_when_nobody_says(default: int, expected: int) -> None:
    facts = ModelFacts(
        id="tiny", vocab_size=500, max_model_len=100, default_sampling=SamplingParams(), default_max_tokens=default
    )
    assert params_of({}, facts).max_tokens == expected


def test_prompt_and_answer_must_fit_the_context_window() -> None:
    assert params_of({"max_tokens": 80}, FACTS).max_tokens == 80
    with pytest.raises(
        InvalidRequest, match="context window of tiny is 100; lower max_tokens to at most 80"
    ) as refusal:
        params_of({"max_tokens": 81}, FACTS)
    assert refusal.value.param == "max_tokens"


@pytest.mark.parametrize(("num_prompt_tokens", "asked", "expected"), [(20, 79, 79), (20, 81, 80), (99, 5000, 1)])
def test_an_answer_is_shortened_to_the_window_if_the_request_allows_that(
    num_prompt_tokens: int, asked: int, expected: int
) -> None:
    fields = {"max_tokens": asked}
    params = with_lengths(sampling_params(fields, FACTS), fields, num_prompt_tokens, FACTS, shortens=True)
    assert params.max_tokens == expected


@pytest.mark.parametrize(
    ("asked", "param"),
    [({"stop_token_ids": (5, 500)}, "stop_token_ids"), ({"top_p": 0.0}, "top_p"), ({"n": 17}, "n")],
)
def test_bad_values_are_refused_by_name(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"sampling\.{param}") as refusal:
        params_of(asked, FACTS)
    assert refusal.value.param == param


def test_an_answer_is_no_longer_than_the_tenant_may_have() -> None:
    facts = FACTS.of(Tenant(id="acme", max_answer_tokens=30), "tiny")
    assert FACTS.of(Tenant(id="acme"), "tiny") is FACTS
    of_models = Tenant(id="acme", max_answer_tokens=50, model_limits=(("tiny*", Limits(max_answer_tokens=30)),))
    assert (FACTS.of(of_models, "tiny"), FACTS.of(of_models, "poet").max_answer_tokens) == (facts, 50)
    assert params_of({}, facts).max_tokens == 30
    assert params_of({}, replace(facts, default_max_tokens=10)).max_tokens == 10
    assert params_of({}, replace(facts, max_answer_tokens=90)).max_tokens == 80
    assert params_of({"max_tokens": 30, "min_tokens": 30}, facts).max_tokens == 30
    for name in ("max_tokens", "min_tokens"):
        with pytest.raises(InvalidRequest, match=f"{name} must be at most 30 with this API key, got 31") as caught:
            params_of({"max_tokens": 31, name: 31} if name == "max_tokens" else {name: 31}, facts)
        assert caught.value.param == name
    recommended = replace(facts, default_sampling=replace(FACTS.default_sampling, min_tokens=40))
    assert params_of({}, recommended).min_tokens == 30


def test_a_tenant_whose_weight_changes_keeps_what_it_has() -> None:
    limiter = Limiter(10)
    other = Tenant(id="other")
    with limiter.slot("a", 4, Tenant(id="acme")), limiter.slot("o", 4, other):
        with pytest.raises(Overloaded, match="8 of at most 10 answers are being generated, 4 of them yours"):
            limiter.slot("b", 2, Tenant(id="acme", weight=0.5)).__enter__()
        with limiter.slot("c", 2, Tenant(id="acme", weight=3.0)):
            assert limiter.num_in_flight == 10
    assert limiter.num_in_flight == 0


def test_a_router_is_crowded_for_a_while_after_it_refused_somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    limiter = Limiter(1)
    with limiter.slot("a", 1):
        assert not limiter.is_crowded, "full, but nobody is refused"
        with pytest.raises(Overloaded):
            limiter.slot("b", 1).__enter__()
    crowded = [limiter.is_crowded]
    now_s += CROWDED_S
    crowded.append(limiter.is_crowded)
    assert crowded == [True, False]


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


A, B, HEAVY = Tenant(id="a"), Tenant(id="b"), Tenant(id="heavy", weight=3.0)


class InFlight:
    """Requests that take slots of a limiter and keep them until they leave."""

    def __init__(self, max_in_flight: int) -> None:
        self.limiter = Limiter(max_in_flight)
        self.open: list[tuple[Tenant, contextlib.ExitStack]] = []

    def admitted(self, tenant: Tenant, num_requests: int = 100) -> int:
        """How many of so many requests are admitted."""
        for num in range(num_requests):
            stack = contextlib.ExitStack()
            try:
                stack.enter_context(self.limiter.slot(f"r{len(self.open)}-{id(stack)}", 1, tenant))
            except Overloaded:
                return num
            self.open.append((tenant, stack))
        return num_requests

    def leave(self, tenant: Tenant, num_requests: int) -> None:
        for request in [each for each in self.open if each[0] == tenant][:num_requests]:
            self.open.remove(request)
            request[1].close()


def test_a_tenant_that_is_alone_may_take_everything() -> None:
    assert InFlight(10).admitted(A) == 10


def test_near_the_limit_each_tenant_gets_its_share() -> None:
    in_flight = InFlight(20)
    assert in_flight.admitted(B, 1) == 1
    assert in_flight.admitted(A) == CROWDED * 20 - 1, "up to there anybody takes what is free"
    assert in_flight.admitted(B) == 4, "the rest is kept for who has less than its half"
    assert in_flight.limiter.num_in_flight == 20


def test_what_becomes_free_goes_to_who_has_less_than_its_share() -> None:
    in_flight = InFlight(20)
    assert (in_flight.admitted(B, 1), in_flight.admitted(A, 19)) == (1, 15)
    assert in_flight.admitted(B, 4) == 4
    for _ in range(5):
        in_flight.leave(A, 1)
        assert (in_flight.admitted(A), in_flight.admitted(B)) == (0, 1)
    in_flight.leave(A, 1)
    assert (in_flight.admitted(B), in_flight.admitted(A)) == (0, 1), "each has its half"


def test_shares_go_by_weight_among_those_that_are_served() -> None:
    in_flight = InFlight(20)
    assert (in_flight.admitted(A, 8), in_flight.admitted(HEAVY, 8)) == (8, 8)
    assert in_flight.admitted(A) == 0, "more than a quarter"
    assert in_flight.admitted(HEAVY) == 4, "less than three quarters"
    in_flight.leave(A, 8)
    assert in_flight.admitted(HEAVY) == 8, "nobody else is there now"


def test_a_tenant_is_told_how_many_are_its_own() -> None:
    in_flight = InFlight(5)
    in_flight.admitted(A, 3)
    in_flight.admitted(B, 1)
    with pytest.raises(Overloaded, match="4 of at most 5 answers are being generated, 3 of them yours"):
        in_flight.limiter.slot("r", 1, A).__enter__()
    with pytest.raises(Overloaded, match="4 of at most 5 answers are being generated, 0 of them yours"):
        in_flight.limiter.slot("r", 2, HEAVY).__enter__()


def test_nobody_has_more_choices_than_there_are_slots() -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.n must be at most 4 here; lower it") as refusal:
        Limiter(4).slot("r", 5).__enter__()
    assert refusal.value.param == "n"


def test_a_request_id_is_one_tenants_own() -> None:
    limiter = Limiter(10)
    with limiter.slot("r", 1, A), limiter.slot("r", 1, B):
        with pytest.raises(InvalidRequest, match="request_id 'r' is in flight"), limiter.slot("r", 1, B):
            pass
        assert limiter.num_in_flight == 2
    with limiter.slot("r", 1, A):
        pass


ARRIVALS = st.lists(st.tuples(st.sampled_from([A, B, HEAVY]), st.booleans(), st.integers(1, 4)), max_size=60)


@settings(max_examples=60)
@given(ARRIVALS)
def test_the_limit_holds_and_the_accounting_returns_to_empty(arrivals: list[tuple[Tenant, bool, int]]) -> None:
    in_flight = InFlight(12)
    for tenant, is_leaving, num in arrivals:
        if is_leaving:
            in_flight.leave(tenant, num)
        else:
            in_flight.admitted(tenant, num)
        assert in_flight.limiter.num_in_flight == len(in_flight.open) <= 12
    for tenant in (A, B, HEAVY):
        in_flight.leave(tenant, 12)
    assert in_flight.limiter.num_in_flight == 0
    assert not in_flight.limiter._by_tenant
    assert not in_flight.limiter._request_ids


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
                    raise AssertionError("admitted")
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


def test_who_waits_for_a_slot_hears_of_the_next_free_one_once() -> None:
    limiter, heard = Limiter(2), list[int]()
    with limiter.slot("a", 2):
        limiter.on_room(lambda: heard.append(limiter.num_in_flight))
        assert not limiter.has_room(1, DEFAULT_TENANT)
    assert heard == [0]
    with limiter.slot("b", 1):
        assert limiter.has_room(1, DEFAULT_TENANT)
    assert heard == [0]

"""Patterns of models' names, and the limits that they select."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.limits import MAX_PATTERN, MAX_PATTERNS, Limits, match_any, matches, tighter
from router.admission.tenants import DEFAULT_TENANT, Tenant

NARROW, WIDE = Limits(requests_per_minute=1, max_answer_tokens=9), Limits(requests_per_minute=50, tokens_per_day=7)


def reference(pattern: str, name: str) -> bool:
    """What `fnmatch.fnmatchcase` does, without its `?` and `[`."""
    expression = "".join(".*" if letter == "*" else re.escape(letter) for letter in pattern)
    return re.fullmatch(expression, name, re.DOTALL) is not None


@given(st.text("aB*", max_size=8), st.text("aB*", max_size=10))
def test_a_star_is_any_text_and_all_else_is_itself(pattern: str, name: str) -> None:
    assert matches(pattern, name) == reference(pattern, name)


@given(st.lists(st.text("aB*", max_size=5), max_size=4), st.text("aB*", max_size=6))
def test_one_pattern_of_several_is_enough(patterns: list[str], name: str) -> None:
    assert match_any(tuple(patterns), name) == any(reference(pattern, name) for pattern in patterns)


@given(st.text("a*?[].\\\n/é", max_size=8), st.data())
def test_a_name_made_from_a_pattern_matches_it(pattern: str, data: st.DataObject) -> None:
    texts = pattern.split("*")
    fillings = [data.draw(st.text("a*?[]\n/é", max_size=4)) for _ in texts[1:]]
    name = texts[0] + "".join(filling + text for filling, text in zip(fillings, texts[1:], strict=True))
    assert matches(pattern, name)
    other = data.draw(st.text("a*?[].\\\n/é", max_size=8))
    assert matches(pattern, other) == reference(pattern, other)


@pytest.mark.parametrize(
    ("pattern", "name", "is_match"),
    [
        ("llama-*", "llama-3", True),
        ("llama-*", "llama-", True),
        ("llama-*", "Llama-3", False),
        ("llama-*", "my-llama-3", False),
        ("llama", "llama-3", False),
        ("*/llama*", "meta/llama-3", True),
        ("*", "", True),
        ("a*a", "a", False),
        ("a*a*a", "aa", False),
        ("*ab*ba*", "aba", False),
        ("*ab*ba", "aba", False),
        ("gpt-[45]", "gpt-4", False),
        ("gpt-?", "gpt-4", False),
        ("gpt.4", "gpt-4", False),
    ],
)
def test_examples(pattern: str, name: str, is_match: bool) -> None:
    assert matches(pattern, name) is is_match


def test_no_pattern_takes_long() -> None:
    """A matcher that goes back would try each division of the name over the stars."""
    pattern = "*a" * (MAX_PATTERN // 2 - 1) + "*b"
    tenant = Tenant(id="t", models=(pattern,) * MAX_PATTERNS)
    start = time.process_time()
    assert not tenant.may_use("a" * 100_000)
    assert not tenant.may_use("a" * 100_000 + "b" + "a")
    assert time.process_time() - start < 1.0


def test_a_tenant_uses_the_models_of_its_patterns_and_without_patterns_all() -> None:
    tenant = Tenant(id="t", models=("llama-*", "poet"))
    assert [name for name in ("llama-3", "poet", "poet-2", "gpt", "") if tenant.may_use(name)] == ["llama-3", "poet"]
    assert all(each.may_use("gpt") for each in (Tenant(id="t"), DEFAULT_TENANT))


def test_the_first_pattern_that_matches_sets_the_limits_of_a_model() -> None:
    tenant = Tenant(id="t", model_limits=(("llama-70b", NARROW), ("llama-small", Limits()), ("llama-*", WIDE)))
    found = {name: tenant.limits_of(name) for name in ("llama-70b", "llama-small", "llama-8b", "gpt")}
    assert found == {"llama-70b": NARROW, "llama-small": Limits(), "llama-8b": WIDE, "gpt": Limits()}


def test_the_tighter_of_each_limit_applies() -> None:
    assert tighter(NARROW, WIDE) == Limits(requests_per_minute=1, tokens_per_day=7, max_answer_tokens=9)
    tenant = Tenant(id="t", max_answer_tokens=5, max_in_flight=3, model_limits=(("llama", NARROW), ("gpt", WIDE)))
    assert tenant.tightest("llama") == Limits(requests_per_minute=1, max_in_flight=3, max_answer_tokens=5)
    assert tenant.tightest("gpt") == tighter(WIDE, Limits(max_in_flight=3, max_answer_tokens=5))
    assert tenant.tightest("other") == Limits(max_in_flight=3, max_answer_tokens=5)


@pytest.mark.parametrize("name", ["requests_per_minute", "tokens_per_minute", "tokens_per_day", "max_in_flight"])
def test_a_limit_that_is_counted_needs_an_account(name: str) -> None:
    assert Limits(**{name: 1}).need_an_account
    assert not Limits(max_answer_tokens=1).need_an_account

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core import ngrams
from engine.core.ngrams import BEGINNING, GROUP, NO_GUESS, NgramIndex

ALPHABET = st.integers(0, 3)


def index_of(token_ids: list[int], num_prompt_tokens: int = 0, step: int = 1, size: int = 1 << 15) -> NgramIndex:
    """Reads the tokens as they come, after the prompt `step` at a time."""
    index = NgramIndex(size)
    for end in range(max(num_prompt_tokens, 1), len(token_ids) + step, step):
        assert index.read(token_ids[:end], num_prompt_tokens)
    return index


def guessed(token_ids: list[int], most: int = 4) -> tuple[int, ...]:
    return index_of(token_ids, len(token_ids)).guess(token_ids, most).token_ids


def test_what_followed_the_last_tokens_before_is_the_guess() -> None:
    assert guessed([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == (4, 5, 6, 9)
    assert guessed([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3]) == (5, 9, 1, 2), "the last time counts"
    assert guessed([1, 2, 3, 4, 5, 6, 7]) == ()
    assert guessed([1, 2, 9, 1, 2]) == (), "two tokens are no group"
    assert guessed([]) == guessed([1]) == guessed([1, 1]) == ()


def test_a_guess_that_comes_to_the_end_of_the_text_goes_on_with_itself() -> None:
    assert guessed([7, 7, 7, 7], 6) == (7, 7, 7, 7, 7, 7)
    assert guessed([1, 2, 3, 1, 2, 3], 7) == (1, 2, 3, 1, 2, 3, 1)


def test_a_guess_is_the_surer_the_longer_it_has_been_alike() -> None:
    """Each of its tokens makes the two places alike for one more."""
    token_ids = [*range(100, 130), 100, 101, 102]
    found = index_of(token_ids, len(token_ids)).guess(token_ids, 16)
    assert found.token_ids == tuple(range(103, 119))
    expected, chance = [], 1.0
    for number_alike in range(3, 19):
        chance *= BEGINNING[sum(number_alike >= least for least in (4, 6, 10, 18))]
        expected.append(chance)
    assert found.chances == pytest.approx(expected)


@given(st.lists(ALPHABET, max_size=60), st.integers(0, 60), st.integers(1, 9), st.integers(1, 9))
def test_a_guess_is_always_what_stood_somewhere(tokens: list[int], num_prompt: int, step: int, most: int) -> None:
    """And is found however the tokens came, if the last ones have stood before."""
    index = index_of(tokens, min(num_prompt, len(tokens)), step)
    guess = index.guess(tokens, most)
    last = tokens[-GROUP:]
    places = [n for n in range(GROUP, len(tokens)) if tokens[n - GROUP : n] == last]
    assert bool(guess.token_ids) == bool(places and len(last) == GROUP)
    assert len(guess.token_ids) == len(guess.chances)
    assert list(guess.chances) == sorted(guess.chances, reverse=True)
    if guess.token_ids:
        text = [*tokens, *guess.token_ids]
        assert any(text[n : n + len(guess.token_ids)] == list(guess.token_ids) for n in places)


def test_a_small_table_forgets_and_never_guesses_wrong_tokens() -> None:
    """Groups of one place overwrite each other; what is found is compared."""
    draw = random.Random(1)
    tokens = [draw.randrange(50_000) for _ in range(300)]
    tokens += tokens[:100]
    index = NgramIndex(0)
    assert index._mask == 3
    num_guessed = 0
    for end in range(1, len(tokens) + 1):
        index.read(tokens[:end], 0)
        if guess := index.guess(tokens[:end], 1).token_ids:
            num_guessed += 1
            assert end > 300
            assert guess[0] == (tokens[end] if end < 400 else tokens[100])
    assert 0 <= num_guessed < 100


def test_memory_is_bounded() -> None:
    index = NgramIndex(10**6)
    assert len(index._table) == 2**15
    assert len(NgramIndex(100)._table) == 512


def test_a_long_text_is_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "MAX_READ", 10)
    tokens = [1, 2, 3, 4, *range(100, 120), 1, 2, 3]
    index = NgramIndex(100)
    assert [index.read(tokens, len(tokens)) for _ in range(3)] == [False, False, True]
    assert index.guess(tokens, 2).token_ids == (4, 100)


def test_the_longer_it_was_right_the_likelier_it_is() -> None:
    tokens = [*range(40), *range(20)]
    index = index_of(tokens, 40)
    chances = [index_of([*range(40), *range(n)], 40 + n).guess([*range(40), *range(n)], 1).chances for n in (3, 4, 6)]
    assert chances == [(BEGINNING[0],), (BEGINNING[1],), (BEGINNING[2],)], "of a prompt nothing is counted"
    assert index.guess(tokens, 1).chances > (BEGINNING[4],), "right 17 times"


def test_what_was_wrong_before_is_less_likely_and_costs_nothing_to_find_out() -> None:
    """Nobody has computed a guess: what came is compared with what would have been guessed."""
    tokens: list[int] = []
    for n in range(12):
        tokens += [1, 2, 3, 100 + n]
    index = index_of(tokens, 4)
    tokens += [1, 2, 3]
    index.read(tokens, 4)
    (chance,) = index.guess(tokens, 1).chances
    assert chance < 0.1
    assert index._length == GROUP


def test_after_a_wrong_guess_the_place_is_looked_for_anew() -> None:
    tokens = [*range(20), 1, 2, 3, 50, 9, 10, 11]
    assert index_of(tokens, 20).guess(tokens, 2).token_ids == (12, 13)
    assert index_of(tokens[:-1], 20).guess(tokens[:-1], 2) == NO_GUESS

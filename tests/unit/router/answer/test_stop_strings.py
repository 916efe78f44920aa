from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.answer import StopChecker


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    found = [i for stop in stops if (i := text.find(stop)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool, StopChecker]:
    checker = StopChecker(stops)
    out = ""
    for piece in pieces:
        text, stopped = checker.push(piece)
        out += text
        if stopped:
            break
    text, stopped = checker.flush()
    return out + text, stopped, checker


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


# A small alphabet, so that stop strings overlap each other and themselves.
letters = st.text("ab\n", max_size=30)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


@given(letters, stop_lists, st.lists(st.integers(0, 30), max_size=12))
def test_the_answer_is_that_of_text_find_however_the_stream_is_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    out, stopped, checker = run(split(text, cuts), stops)
    assert (out, stopped) == naive(text, stops)
    assert checker.num_kept == len(out)
    assert checker.num_held == 0
    assert checker.matched in ([None] if not stopped else stops)


@given(letters, stop_lists)
def test_only_a_beginning_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    seen = out = ""
    for letter in text:
        new, stopped = checker.push(letter)
        seen, out = seen + letter, out + new
        if stopped:
            break
        held = seen.removeprefix(out)
        assert not held or any(stop.startswith(held) or (stop in held) for stop in stops)
        assert len(held) < max((len(stop) for stop in stops), default=1)


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["Hello", "\n", "\nUser", ": x"], ["\n\nUser:"], ("Hello", True)),
        (["ab", "c"], ["bc", "abd"], ("a", True)),  # "ab" might have become "abd", and "bc" waited for that
        (["ab", "d"], ["b", "abd"], ("", True)),  # the match that begins earliest wins, though "b" was seen first
        (["ab"], ["b", "abd"], ("a", True)),  # ... and at the end of the stream, what did match counts
        (["x", "END", "y"], ["END"], ("x", True)),
        (["aab"], ["ab"], ("a", True)),
        (["日", "本", "語"], ["本語"], ("日", True)),
        (["text"], [], ("text", False)),
    ],
)
def test_examples(pieces: list[str], stops: list[str], expected: tuple[str, bool]) -> None:
    assert run(pieces, stops)[:2] == expected


def test_it_is_deaf_once_stopped() -> None:
    checker = StopChecker(["."])
    assert checker.push("One. Two") == ("One", True)
    assert checker.push("Three.") == ("", True)
    assert checker.flush() == ("", True)
    assert (checker.num_kept, checker.matched) == (3, ".")


@pytest.mark.parametrize("includes_match", [False, True])
def test_what_may_not_stop_is_text(includes_match: bool) -> None:
    checker = StopChecker(("ab", "c"), includes_match)
    assert checker.push("xabca", may_stop=False) == ("xabc", False)
    assert checker.num_kept == 4
    assert checker.push("b-", may_stop=True) == ("ab" if includes_match else "", True)
    assert checker.matched == "ab"


@pytest.mark.parametrize("rest", ["z", ""])
def test_what_was_complete_too_early_stops_nothing_later(rest: str) -> None:
    """Also while it was held back for a longer one."""
    checker = StopChecker(("abcX", "b"))
    assert checker.push("ab", may_stop=False) == ("", False)
    text, stopped = checker.push(rest) if rest else checker.flush()
    assert (text, stopped) == ("ab" + rest, False)
    assert checker.push("bc") == ("", True) if rest else True

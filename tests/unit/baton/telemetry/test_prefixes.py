"""What a cache that forgets nothing would have had, and which beginnings are common."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.telemetry.prefixes import HOTTEST, RECENT, PrefixBook


def chain(*parts: int) -> list[bytes]:
    """Keys of which each names all that comes before it, as block keys do."""
    return [repr(parts[: end + 1]).encode() for end in range(len(parts))]


def test_what_came_before_is_known_as_far_as_it_is_the_same() -> None:
    book = PrefixBook()
    assert book.see_prompt(chain(1, 2, 3)) == 0
    assert book.see_prompt(chain(1, 2, 3)) == 3
    assert book.see_prompt(chain(1, 2, 4, 5)) == 2
    assert book.see_prompt(chain(2, 3)) == 0, "the same tokens somewhere else are another prefix"
    assert book.see_prompt([]) == 0


def test_an_answer_counts_for_the_prompt_that_repeats_it() -> None:
    book = PrefixBook()
    book.see_prompt(chain(1, 2))
    book.see(chain(1, 2, 3, 4))
    assert book.see_prompt(chain(1, 2, 3, 4, 5)) == 4


def test_at_least_the_latest_are_known_and_at_most_twice_as_many() -> None:
    kept, length = 1000, 10
    book = PrefixBook(kept)
    for number in range(1000):
        book.see_prompt(chain(number, *range(length - 1)))
        assert len(book._young) + len(book._old) <= 2 * kept + length
    latest = [book.see(chain(number, *range(length - 1))) for number in range(999, 1000 - kept // length, -1)]
    assert set(latest) == {length}
    assert book.see(chain(0, *range(length - 1))) == 0


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=60))
def test_bisection_finds_what_a_search_would(prompts: list[list[int]]) -> None:
    """While nothing is forgotten."""
    book, seen = PrefixBook(10_000), set[bytes]()
    for prompt in prompts:
        keys = chain(*prompt)
        assert book.see_prompt(keys) == sum(key in seen for key in keys)
        seen.update(keys)


def test_common_beginnings_and_their_share() -> None:
    book = PrefixBook()
    for _ in range(3):
        book.see_prompt([b"\x01" * 16, b"\x02" * 16])
    book.see_prompt([b"\x03" * 16])
    book.see_prompt([])
    book.see_prompt([])
    assert book.hottest() == [("01010101", 0.5)], "no block is one for nobody, and one prompt is not many"


def test_only_the_latest_prompts_and_the_most_common_beginnings_count() -> None:
    book = PrefixBook()
    for _ in range(10):
        book.see_prompt([b"old"])
    for number in range(RECENT):
        book.see_prompt([bytes([number % 8]) * 16])
    hottest = book.hottest()
    assert len(hottest) == HOTTEST
    assert {share for _, share in hottest} == {1 / 8}
    assert len(book._beginnings) == 8

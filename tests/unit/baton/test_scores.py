from __future__ import annotations

import pytest

from baton.scores import NO_SCORES, TokenScores

SCORES = TokenScores((-1.0, -2.0, -3.0), (1, 2, 3, 4, 5, 6), (-0.1, -0.2, -0.3, -0.4, -0.5, -0.6))


def test_parts_make_the_whole() -> None:
    for cut in range(4):
        assert TokenScores.joined([SCORES.part(0, cut), NO_SCORES, SCORES.part(cut, 3)]) == SCORES
    assert SCORES.part(1, 2) == TokenScores((-2.0,), (3, 4), (-0.3, -0.4))
    assert SCORES.part(1, 1) == NO_SCORES
    assert SCORES.top(2) == [(5, -0.5), (6, -0.6)]
    assert TokenScores.joined([]) == NO_SCORES
    assert (NO_SCORES.part(0, 5), NO_SCORES.num_top, len(SCORES)) == (NO_SCORES, 0, 3)


@pytest.mark.parametrize(
    ("logprobs", "top_ids", "top_logprobs"),
    [((), (1,), (-0.1,)), ((-1.0, -2.0), (1, 2, 3), (-0.1, -0.2, -0.3)), ((-1.0,), (1, 2), (-0.1,))],
)
def test_scores_that_fit_no_tokens_are_refused(
    logprobs: tuple[float, ...], top_ids: tuple[int, ...], top_logprobs: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match="scores of"):
        TokenScores(logprobs, top_ids, top_logprobs)


def test_they_are_the_same_however_they_are_given_and_none_is_rounded() -> None:
    given = TokenScores([-0.1], [2**32 - 1], [-0.3])
    assert {given, TokenScores((-0.1,), (2**32 - 1,), (-0.3,))} == {given}
    assert (list(given.logprobs), given.top(0)) == ([-0.1], [(2**32 - 1, -0.3)])

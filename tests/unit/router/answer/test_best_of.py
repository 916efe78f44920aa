"""The best of more answers than a client wants come whole, once all have ended."""

from __future__ import annotations

import pytest

from baton.api import GenerateChunk
from baton.errors import InvalidRequest
from baton.sampling import FinishReason, SamplingParams
from baton.scores import NO_SCORES, TokenScores
from router.answer import AnswerSelection


def chunk(index: int, *logprobs: float, ends: bool = False, text: str = "") -> GenerateChunk:
    return GenerateChunk(
        request_id="r",
        choice_index=index,
        text=text or f"{index}",
        reasoning=f"r{index}",
        token_ids=tuple(range(len(logprobs))),
        finish_reason=FinishReason.STOP if ends else None,
        stop_reason=index if ends else None,
        scores=TokenScores(logprobs),
    )


STREAM = [
    chunk(0, -1.0, -1.0),
    chunk(2, -0.5),
    chunk(1, -0.2, ends=True),
    chunk(3, -9.0, ends=True),
    chunk(2, -0.1, -0.3, ends=True),
    chunk(0, -1.0, ends=True),
]
"""Means of -1, -0.2, -0.3 and -9; the longest one has the least sum."""


def test_the_best_come_whole_and_in_order() -> None:
    selection = AnswerSelection(SamplingParams(n=2, best_of=4, logprobs=0), {})
    *kept, best = [selection.take(each) for each in STREAM]
    assert kept == [[]] * 5
    first, second = best
    assert (first.choice_index, first.text, first.token_ids, first.stop_reason) == (0, "1", (0,), 1)
    assert (first.reasoning, second.reasoning) == ("r1", "r2r2")
    assert (second.choice_index, second.text, second.token_ids, second.stop_reason) == (1, "22", (0, 0, 1), 2)
    assert second.scores == TokenScores((-0.5, -0.1, -0.3))
    assert second.finish_reason is FinishReason.STOP


def test_nobody_gets_scores_who_has_not_asked() -> None:
    selection = AnswerSelection(SamplingParams(n=1, best_of=4), {})
    (best,) = [ready for each in STREAM for ready in selection.take(each)]
    assert (best.text, best.scores) == ("1", NO_SCORES)


def test_what_the_client_has_does_not_come_again() -> None:
    selection = AnswerSelection(SamplingParams(n=2, best_of=4, logprobs=0), {0: 1})
    first, second = [ready for each in STREAM for ready in selection.take(each)]
    assert (first.text, first.reasoning, first.token_ids, first.scores) == ("", "", (), NO_SCORES)
    assert first.finish_reason is FinishReason.STOP
    assert second.text == "22"


def test_of_equal_ones_the_first_is_the_best() -> None:
    selection = AnswerSelection(SamplingParams(n=1, best_of=3), {})
    ends = [chunk(2, -1.0, ends=True), chunk(1, -1.0, -1.0, ends=True), chunk(0, -2.0, ends=True)]
    (best,) = [ready for each in ends for ready in selection.take(each)]
    assert best.text == "1"


@pytest.mark.parametrize("params", [SamplingParams(n=3), SamplingParams(n=3, best_of=3)])
def test_nothing_is_selected_where_the_client_gets_all(params: SamplingParams) -> None:
    assert not params.is_selected


@pytest.mark.parametrize("asked", [{"n": 3, "best_of": 2}, {"best_of": 0}, {"best_of": 17}])
def test_what_cannot_be_selected_is_refused(asked: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.best_of must be between n, \d, and 16") as refusal:
        SamplingParams(**asked)  # type: ignore[arg-type]
    assert refusal.value.param == "best_of"

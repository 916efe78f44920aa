"""Who writes the record of a request that several calls have served."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.api import Usage
from router.timeline.usage_record import UsageCall, UsageMark, UsageRecord, ended, is_due, placed

FIRST, NEXT = UsageCall("1", "d", False), UsageCall("2", "d", True)
RECORD = UsageRecord(
    time_s=1_800_000_000.25, request_id="r", tenant="acme", model="m", usage=Usage(10, 4, 8, 1),
    finish_reasons=(), status="cancelled", is_resumption=False,
)  # fmt: skip
WHOLE = replace(RECORD, usage=Usage(10, 9, 8, 1), finish_reasons=("stop",), status="ok", is_resumption=True)


def test_a_call_that_ends_well_writes_at_once_and_one_that_does_not_when_nobody_comes_back() -> None:
    mark = placed(None, FIRST).mark
    assert ended(mark, FIRST, WHOLE).record == WHOLE
    held = ended(mark, FIRST, RECORD)
    assert held.record is None
    assert is_due(held.mark).record == RECORD
    assert is_due(is_due(held.mark).mark).record is None


def test_a_call_that_goes_on_writes_for_both_whichever_ends_first() -> None:
    left = ended(placed(None, FIRST).mark, FIRST, RECORD).mark
    after = placed(left, NEXT)
    assert after.record is None
    assert is_due(after.mark).record is None
    assert ended(after.mark, NEXT, WHOLE).record == WHOLE
    late = ended(placed(placed(None, FIRST).mark, NEXT).mark, FIRST, RECORD)
    assert late == (None, None), "the first call was not over when the next one began"


def test_a_call_that_was_never_placed_takes_no_record_away() -> None:
    left = ended(placed(None, FIRST).mark, FIRST, RECORD).mark
    assert is_due(left).record == RECORD


def test_who_comes_back_late_is_billed_for_what_is_new() -> None:
    written = is_due(ended(placed(None, FIRST).mark, FIRST, RECORD).mark).mark
    step = ended(placed(written, NEXT).mark, NEXT, WHOLE)
    assert step.record is not None
    assert step.record.usage == Usage(0, 5, 0, 0)
    again = ended(placed(step.mark, NEXT._replace(token="3")).mark, NEXT._replace(token="3"), WHOLE)
    assert again.record is None


def test_a_call_that_sent_less_than_was_recorded_changes_nothing_of_that() -> None:
    whole = ended(placed(None, FIRST).mark, FIRST, WHOLE).mark
    left = ended(placed(whole, NEXT).mark, NEXT, RECORD).mark
    due = is_due(left)
    assert due.record is None
    last = NEXT._replace(token="3")
    assert ended(placed(due.mark, last).mark, last, WHOLE).record is None


def test_another_prompt_under_the_same_id_is_another_request() -> None:
    left = ended(placed(None, FIRST).mark, FIRST, RECORD).mark
    other = UsageCall("2", "e", True)
    after = placed(left, other)
    assert after.record == RECORD
    assert ended(after.mark, FIRST, RECORD).record == RECORD
    assert ended(after.mark, other, WHOLE).record == WHOLE


def test_the_same_prompt_asked_anew_is_another_request_too() -> None:
    left = ended(placed(None, FIRST).mark, FIRST, RECORD).mark
    again = FIRST._replace(token="2")
    after = placed(left, again)
    assert after.record == RECORD
    assert ended(after.mark, again, WHOLE).record == WHOLE


def test_without_a_mark_all_is_written_once_it_is_due() -> None:
    assert ended(None, NEXT, WHOLE).record == WHOLE
    assert is_due(ended(None, NEXT, RECORD).mark).record == RECORD
    assert is_due(None).record is None


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_records_add_up_to_the_longest_answer_of_calls_that_follow_one_another(
    calls: list[tuple[int, bool, bool]],
) -> None:
    """Each goes on from what the one before had sent, at most; sometimes its record is due before the next begins."""
    mark, total, records = None, 0, []
    for number, (num_tokens, is_ok, is_due_before) in enumerate(calls):
        call = UsageCall(str(number), "d", number > 0)
        total = max(total, num_tokens)
        step = placed(mark, call)
        records.append(step.record)
        record = replace(RECORD, usage=Usage(10, total, 0, 0), status="ok" if is_ok else "error")
        step = ended(step.mark, call, record)
        records.append(step.record)
        mark = step.mark
        if is_due_before or number == len(calls) - 1:
            step = is_due(mark)
            records.append(step.record)
            mark = step.mark or mark
    written = [record.usage for record in records if record is not None]
    assert sum(usage.completion_tokens for usage in written) == total
    assert sum(usage.prompt_tokens for usage in written) == 10


@pytest.mark.parametrize("held", [None, RECORD, WHOLE])
def test_a_mark_is_read_as_it_was_written(held: UsageRecord | None) -> None:
    mark = UsageMark(digest="d", token="1", recorded=Usage(1, 2, 3, 4), held=held)
    assert UsageMark.decode(mark.encode()) == mark


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "7", "[]", "{}", '["d", "1", [1, 2, 3], null]', '["d", "1", [1, 2, 3, -4], null]', "[" * 10**5,
        '["d", "1", [0, 0, 0, 0], {}]', '["d", "1", [0, 0, 0, 0], {"usage": [0, 0, 0, 0], "finish_reasons": []}]',
        '["d", "1", [0, 0, 0, true], null]', '["d", "1", [0, 0, 0, 0], 5]', '["d", "1", 5, null]',
    ],
)  # fmt: skip
def test_what_is_no_mark_is_an_error_of_values(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        UsageMark.decode(text.encode())


def test_a_line_names_what_is_billed_and_nothing_else() -> None:
    assert RECORD.line() == (
        '{"time": "2027-01-15T08:00:00.250+00:00", "request_id": "r", "tenant": "acme", "model": "m", '
        '"prompt_tokens": 10, "completion_tokens": 4, "cached_tokens": 8, "reasoning_tokens": 1, '
        '"finish_reasons": [], "status": "cancelled", "is_resumption": false}'
    )

"""What the messages of an answer are filled up with while others want its place."""

from __future__ import annotations

import pytest

from router.api.delivery import FRAME_BYTES, GRPC, HTTP, AnswerPadding, Unread

LENGTH = 300
UNREAD = pytest.mark.parametrize("unread", [GRPC, HTTP])


@UNREAD
def test_nothing_is_filled_up_while_nobody_wants_its_place(unread: Unread) -> None:
    padding = AnswerPadding(unread, lambda: False)
    assert [padding.of_next(LENGTH) for _ in range(300)] == [0] * 300


@UNREAD
def test_few_messages_come_to_as_much_as_is_taken_unread_and_no_more(unread: Unread) -> None:
    padding = AnswerPadding(unread, lambda: True)
    sizes = [padding.of_next(LENGTH) for _ in range(300)]
    num_padded = sizes.index(0)
    *whole, last = sizes[:num_padded]
    assert whole == [unread.part_bytes] * (num_padded - 1)
    assert 0 < last <= unread.part_bytes
    so_far = sum(sizes) + num_padded * (LENGTH + FRAME_BYTES)
    assert so_far == unread.num_bytes, "the next message waits, and is a small one"
    assert sizes[num_padded:] == [0] * (300 - num_padded)
    assert num_padded <= 32


@UNREAD
def test_what_has_been_sent_before_counts(unread: Unread) -> None:
    is_crowded = False
    half, whole = (AnswerPadding(unread, lambda: is_crowded) for _ in range(2))
    half.of_next(unread.num_bytes // 2)
    whole.of_next(unread.num_bytes)
    is_crowded = True
    assert 0 < sum(half.of_next(LENGTH) > 0 for _ in range(300)) <= 16
    assert whole.of_next(LENGTH) == 0

"""What the messages of an answer over gRPC are filled up with while requests are refused."""

from __future__ import annotations

from baton.v1 import inference_pb2
from router.api.padding import PADDING_BYTES, WINDOW_BYTES, Padding


def message(num_bytes: int = 300) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(text="x" * num_bytes)


def test_nothing_is_filled_up_while_nobody_is_refused() -> None:
    padding = Padding(lambda: False)
    assert [padding.fill(message()) for _ in range(300)] == [message()] * 300


def test_few_messages_come_to_as_much_as_grpc_takes_unread_and_no_more() -> None:
    padding = Padding(lambda: True)
    filled = [padding.fill(message()) for _ in range(300)]
    sizes = [len(each.padding) for each in filled]
    num_padded = sizes.index(0)
    assert sizes == [PADDING_BYTES] * num_padded + [0] * (300 - num_padded)
    assert sum(each.ByteSize() for each in filled[:num_padded]) >= WINDOW_BYTES
    assert sum(each.ByteSize() for each in filled[: num_padded - 1]) < WINDOW_BYTES
    assert num_padded <= 16
    assert {each.text for each in filled} == {message().text}


def test_an_answer_that_has_come_to_as_much_before_is_not_filled_up() -> None:
    is_crowded = False
    padding = Padding(lambda: is_crowded)
    padding.fill(message(WINDOW_BYTES // 2))
    is_crowded = True
    num_padded = sum(bool(padding.fill(message()).padding) for _ in range(300))
    assert 0 < num_padded <= 8
    is_crowded, read = False, Padding(lambda: is_crowded)
    read.fill(message(WINDOW_BYTES))
    is_crowded = True
    assert not read.fill(message()).padding

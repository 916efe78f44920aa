"""A message is bounded by what it becomes in memory, before it is read."""

from __future__ import annotations

import pytest

from baton.errors import InvalidRequest
from baton.v1 import inference_pb2
from baton.wire import check_num_fields
from baton.wire.convert import MAX_FIELDS, MAX_NUMBERS, SHORT_BYTES

DESCRIPTOR = inference_pb2.GenerateRequest.DESCRIPTOR
CHAT = inference_pb2.GenerateRequest.CHAT_FIELD_NUMBER << 3 | 2
TEXT = inference_pb2.GenerateRequest.TEXT_FIELD_NUMBER << 3 | 2
PRIORITY = inference_pb2.GenerateRequest.PRIORITY_FIELD_NUMBER << 3
LONG_TEXT = inference_pb2.GenerateRequest(text="\x0a" * SHORT_BYTES).SerializeToString()


def chat_of(num_messages: int) -> bytes:
    """A chat whose messages have two fields each, and a field after it."""
    message = inference_pb2.ChatMessage(role="user", content="a")
    chat = inference_pb2.ChatInput(messages=[message] * num_messages)
    return inference_pb2.GenerateRequest(chat=chat, priority=1).SerializeToString()


def filled(raw: bytes) -> bytes:
    """The same with a text that makes it long enough for a count; one field more."""
    return raw + LONG_TEXT


@pytest.mark.parametrize(
    "raw",
    [
        filled(chat_of(MAX_FIELDS // 3)),
        filled(bytes([PRIORITY, 1]) * MAX_FIELDS),
        filled(bytes([CHAT, 0]) * MAX_FIELDS),
        filled(b"\x7d" * 5 * MAX_FIELDS),
        filled(b"\x79" * 9 * MAX_FIELDS),
        filled(b"\x7b" * MAX_FIELDS),
        filled(bytes([PRIORITY, 1]) * MAX_FIELDS) + b"\xff" * 11,
    ],
    ids=["messages", "numbers", "one after another", "4 bytes", "8 bytes", "groups", "malformed behind"],
)
def test_a_message_of_too_many_fields_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"more than {MAX_FIELDS} fields"):
        check_num_fields(raw, DESCRIPTOR)


@pytest.mark.parametrize("token_id", [5, 300])
def test_token_ids_are_counted(token_id: int) -> None:
    """Not by their bytes: one may have several."""
    ids = [token_id] * MAX_NUMBERS
    check_num_fields(ids_of(ids), DESCRIPTOR)
    with pytest.raises(InvalidRequest, match=f"more than {MAX_NUMBERS} numbers"):
        check_num_fields(ids_of([*ids, token_id]), DESCRIPTOR)


def ids_of(ids: list[int]) -> bytes:
    return inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids)).SerializeToString()


@pytest.mark.parametrize(
    "raw",
    [
        filled(chat_of(MAX_FIELDS // 3 - 1)),
        filled(bytes([PRIORITY, 0x80, 0x80, 1]) * (MAX_FIELDS - 1)),
        filled(b"\x7d" * 5 * (MAX_FIELDS - 1)),
        filled(b"\x79" * 9 * (MAX_FIELDS - 1)),
        inference_pb2.GenerateRequest(text="\x0a" * 2**20).SerializeToString(),
    ],
    ids=["messages", "numbers", "4 bytes", "8 bytes", "a text"],
)
def test_one_of_as_many_as_may_be_is_not(raw: bytes) -> None:
    check_num_fields(raw, DESCRIPTOR)


@pytest.mark.parametrize(
    "raw",
    [
        bytes([PRIORITY]) + b"\xff" * 10 * (MAX_FIELDS // 2),
        bytes([TEXT]) + b"\x80\x80\x80\x80\x80\x20" + b"\x08" * 2**20,
        LONG_TEXT + b"\x80",
    ],
    ids=["no number ends", "a length beyond the end", "the end is missing"],
)
def test_what_protobuf_does_not_read_is_left_to_it(raw: bytes) -> None:
    check_num_fields(raw, DESCRIPTOR)

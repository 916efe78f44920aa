"""What identifies a session: it stays the same while a conversation grows, in every API."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import inference_pb2
from router.api.anthropic.body import MessageBody
from router.api.openai.body import CompletionBody
from router.api.openai.chat import ChatBody
from router.api.responses.body import ResponsesBody
from router.api.sessions import FIRST_CHARACTERS, opening_of, opening_of_message

USER, ANSWER, NEXT = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"), ("user", "no"))
)
SYSTEM = {"role": "system", "content": "Be brief."}
LONG = "x" * FIRST_CHARACTERS


@pytest.mark.parametrize(
    ("kind", "first", "later", "other"),
    [
        (
            ChatBody,
            {"messages": [SYSTEM, USER]},
            {"messages": [SYSTEM, USER, ANSWER, NEXT]},
            {"messages": [SYSTEM, NEXT]},
        ),
        (
            MessageBody,
            {"model": "m", "max_tokens": 1, "messages": [USER], "system": "Be brief."},
            {"model": "m", "max_tokens": 1, "messages": [USER, ANSWER, NEXT], "system": "Be brief."},
            {"model": "m", "max_tokens": 1, "messages": [USER], "system": "Be long."},
        ),
        (
            ResponsesBody,
            {"input": [USER]},
            {"input": [USER, ANSWER, NEXT]},
            {"input": [USER], "instructions": "Be long."},
        ),
        (CompletionBody, {"prompt": LONG}, {"prompt": LONG + " and on"}, {"prompt": "y" + LONG}),
        (CompletionBody, {"prompt": [[1] * 64]}, {"prompt": [[1] * 64 + [2]]}, {"prompt": [[2] * 64]}),
        (CompletionBody, {"prompt": [1] * 64}, {"prompt": [1] * 64 + [2]}, {"prompt": [2] * 64}),
        (CompletionBody, {"prompt": [LONG, "a"]}, {"prompt": [LONG, "b"]}, {"prompt": ["a", LONG]}),
    ],
)  # fmt: skip
def test_a_conversation_keeps_its_session(
    kind: Any, first: dict[str, Any], later: dict[str, Any], other: dict[str, Any]
) -> None:
    openings = [opening_of(kind.model_validate(each)) for each in (first, later, other)]
    assert openings[0] == openings[1] != openings[2]


def chat(*messages: dict[str, Any]) -> inference_pb2.GenerateRequest:
    written = [inference_pb2.ChatMessage(**message) for message in messages]
    return inference_pb2.GenerateRequest(chat=inference_pb2.ChatInput(messages=written))


def test_a_conversation_over_grpc_keeps_its_session() -> None:
    first, later, other = (opening_of_message(chat(*each)) for each in ([USER], [USER, ANSWER, NEXT], [NEXT]))
    assert first == later != other
    ids = [inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[number] * 80)) for number in (1, 2)]
    assert len({opening_of_message(each) for each in ids}) == 2
    text = opening_of_message(inference_pb2.TokenizeRequest(text=LONG + "more"))
    assert text == opening_of_message(inference_pb2.GenerateRequest(text=LONG))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "a"]), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["messages", "input", "prompt", "system", "tokens", "model"]), JSON))
def test_any_body_has_an_opening(body: dict[str, Any]) -> None:
    """The endpoint picker reads bodies that no API has checked."""
    assert isinstance(opening_of(body), str)

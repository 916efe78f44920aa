"""Turns tokens into the client's answer: incremental detokenization, stop strings, and the channels of an answer.

Plain state without I/O, rebuilt by replaying the tokens of a choice. The output depends on the tokens alone, however
they are grouped.
"""

from router.answer.call_format import CallForm, Written, form_of, known_form
from router.answer.call_readers import JsonCalls, JsonKeys, Taken
from router.answer.channels import CallIds, Calls, Channels, Delta, Parted, ReasoningReader, Split
from router.answer.format import PLAIN, AnswerFormat, AnswerPlan, with_reasoning, with_tool_choice
from router.answer.marks import Mark, Reasoning
from router.answer.tag_calls import TagCalls, Tags, typed_text
from router.answer.writer import (
    AnswerChunks,
    AnswerSelection,
    AnswerWriter,
    IncrementalDetokenizer,
    Piece,
    SentAnswer,
    StopChecker,
)

__all__ = [
    "PLAIN",
    "AnswerChunks",
    "AnswerFormat",
    "AnswerPlan",
    "AnswerSelection",
    "AnswerWriter",
    "CallForm",
    "CallIds",
    "Calls",
    "Channels",
    "Delta",
    "IncrementalDetokenizer",
    "JsonCalls",
    "JsonKeys",
    "Mark",
    "Parted",
    "Piece",
    "Reasoning",
    "ReasoningReader",
    "SentAnswer",
    "Split",
    "StopChecker",
    "TagCalls",
    "Tags",
    "Taken",
    "Written",
    "form_of",
    "known_form",
    "typed_text",
    "with_reasoning",
    "with_tool_choice",
]

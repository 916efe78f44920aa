"""Turns tokens into the text that a client sees: incremental detokenization, stop strings, reasoning and content.

Plain state without I/O, rebuilt by replaying the tokens of a choice: fed the same tokens in any grouping, it has given
out the same text.
"""

from router.answer.best_of import AnswerSelection
from router.answer.channels import Channels, Delta
from router.answer.detokenizer import IncrementalDetokenizer
from router.answer.format import PLAIN, AnswerFormat, AnswerPlan, with_reasoning
from router.answer.marks import Mark, Reasoning
from router.answer.stop_strings import StopChecker
from router.answer.writer import AnswerChunks, AnswerWriter, Piece

__all__ = [
    "PLAIN",
    "AnswerChunks",
    "AnswerFormat",
    "AnswerPlan",
    "AnswerSelection",
    "AnswerWriter",
    "Channels",
    "Delta",
    "IncrementalDetokenizer",
    "Mark",
    "Piece",
    "Reasoning",
    "StopChecker",
    "with_reasoning",
]

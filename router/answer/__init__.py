"""Turns tokens into the text that a client sees: incremental detokenization and stop strings.

Plain state without I/O, rebuilt by replaying the tokens of a choice: fed the same tokens in any grouping, it has given
out the same text.
"""

from router.answer.best_of import AnswerSelection
from router.answer.detokenizer import IncrementalDetokenizer
from router.answer.stop_strings import StopChecker
from router.answer.writer import AnswerChunks, AnswerWriter, Piece

__all__ = ["AnswerChunks", "AnswerSelection", "AnswerWriter", "IncrementalDetokenizer", "Piece", "StopChecker"]

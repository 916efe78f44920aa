"""Text in, token ids out, and back: `Tokenizer`, `IncrementalDetokenizer`, `StopChecker`.

All three are plain state without I/O. `Tokenizer` keeps what chats have in common (`router.text.segments`), and may be
used by several threads. The last two are rebuilt by replaying the tokens of a choice: fed the same tokens in any
grouping, they have given out the same text.
"""

from router.text.answer import AnswerWriter, Piece
from router.text.chat import ChatTemplate
from router.text.detokenizer import IncrementalDetokenizer
from router.text.stop import StopChecker
from router.text.tokenizer import Tokenizer

__all__ = ["AnswerWriter", "ChatTemplate", "IncrementalDetokenizer", "Piece", "StopChecker", "Tokenizer"]

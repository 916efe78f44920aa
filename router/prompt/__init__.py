"""Makes token ids of what a client wrote, and the sequence that workers compute of them: chat template, tokenizer, the
cache of segments that chats share.

Plain state without I/O. A `Tokenizer` may be used by several threads.
"""

from router.prompt.chat import RESERVED, ChatTemplate
from router.prompt.sequence import PromptEncoder, SequenceBuilder
from router.prompt.structure import StructureChecker
from router.prompt.tokenizer import Tokenizer
from router.prompt.words import in_tokens

__all__ = ["RESERVED", "ChatTemplate", "PromptEncoder", "SequenceBuilder", "StructureChecker", "Tokenizer", "in_tokens"]

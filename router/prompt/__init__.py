"""From what a client wrote to token ids: chat template, tokenizer, and the cache of segments that chats share.

Plain state without I/O. A `Tokenizer` may be used by several threads.
"""

from router.prompt.chat import ChatTemplate
from router.prompt.encode import PromptEncoder
from router.prompt.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "PromptEncoder", "Tokenizer"]

"""Turns a client's prompt into token ids and a sequence for workers: chat template, tokenizer, cache of segments.

A `Tokenizer` may be used by several threads.
"""

from router.prompt.chat import RESERVED, ChatTemplate
from router.prompt.sequence import PromptEncoder, SequenceBuilder, StructureChecker, in_tokens, with_images
from router.prompt.tokenizer import Tokenizer

__all__ = [
    "RESERVED",
    "ChatTemplate",
    "PromptEncoder",
    "SequenceBuilder",
    "StructureChecker",
    "Tokenizer",
    "in_tokens",
    "with_images",
]

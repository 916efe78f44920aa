"""Turns a prompt into token ids, and checks that the model can take them."""

from __future__ import annotations

import asyncio

from baton.api import Chat, Prompt, Text, TokenIds
from router.admission import ModelFacts, check_length, check_prompt, check_vocabulary
from router.prompt.tokenizer import Tokenizer

MAX_INLINE_CHARACTERS = 16_384
"""Longest prompt that is tokenized on the event loop, in about 10 ms; longer ones go to a thread."""


class PromptEncoder:
    """Prompts of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def encode(self, prompt: Prompt, scope: str, facts: ModelFacts) -> tuple[int, ...]:
        """The prompt's token ids.

        Args:
            scope: the tenant's cache scope: what has been encoded for it is not encoded again.

        Raises:
            InvalidRequest: the prompt is empty, too long, not renderable, or has ids outside the vocabulary.
        """
        num_characters = 0
        match prompt:
            case Text(text):
                num_characters = len(text)
            case Chat(messages):
                num_characters = sum(len(message.content) for message in messages)
        check_length(num_characters, self._tokenizer.longest_token, facts)
        if num_characters > MAX_INLINE_CHARACTERS:
            token_ids = await asyncio.to_thread(self._encode, prompt, scope)
        else:
            token_ids = self._encode(prompt, scope)
        check_prompt(token_ids, facts)
        if not isinstance(prompt, Chat):  # a chat's are the vocabulary's; what is put around a text may be anything
            check_vocabulary(token_ids, facts)
        return token_ids

    def _encode(self, prompt: Prompt, scope: str) -> tuple[int, ...]:
        match prompt:
            case Text(text):
                return tuple(self._tokenizer.encode(text))
            case Chat(messages):
                return tuple(self._tokenizer.encode_chat(messages, scope=scope))
            case TokenIds(ids):
                return ids

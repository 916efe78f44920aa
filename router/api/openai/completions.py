"""The body of /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from baton.api import PromptInput, Text, TokenIds
from baton.errors import InvalidRequest
from router.api.openai.body import Body
from router.api.several import MAX_PROMPTS
from router.prompt import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""
NO_PROMPT = "prompt must be a string, a list of strings, or lists of token ids"


class CompletionBody(Body):
    """A text to be continued."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    """Whether the text begins with the prompt, and its log probabilities with those of the prompt."""
    add_special_tokens: bool | None = None
    """Whether what the model wants around a text is added; None: yes."""

    def prompts(self, max_tokens: int) -> list[PromptInput]:
        """One text, a list of texts, one list of token ids, or a list of such lists.

        Args:
            max_tokens: the longest prompt of token ids.

        Raises:
            InvalidRequest: it is none of that, more than MAX_PROMPTS, or longer than the model takes.
        """
        match self.prompt:
            case str(text):
                return [self._text(text)]
            case [str() | list(), *_] as prompts:
                if len(prompts) > MAX_PROMPTS:
                    raise InvalidRequest(f"prompt holds {len(prompts)} prompts; send at most {MAX_PROMPTS}", "prompt")
                if all(isinstance(item, str) for item in prompts):
                    return [self._text(item) for item in prompts]
                if all(isinstance(item, list) for item in prompts):
                    return [self._ids(item, max_tokens) for item in prompts]
            case list(ids):
                return [self._ids(ids, max_tokens)]
        raise InvalidRequest(NO_PROMPT, "prompt")

    def _ids(self, token_ids: list[Any], max_tokens: int) -> TokenIds:
        kept = TokenIds.of(token_ids, max_tokens, self.truncation)
        if not set(map(type, kept.ids)) <= {int}:
            raise InvalidRequest(NO_PROMPT, "prompt")
        return kept

    def _text(self, text: str) -> Text:
        return Text(text, bool(self.parse_special), self.add_special_tokens is not False)

    async def echoed(self, prompts: Sequence[PromptInput], tokenizer: Tokenizer) -> tuple[str, ...]:
        """Returns the texts with which the answers of each prompt begin; empty: the client does not ask for them.

        Raises:
            InvalidRequest: they could be of prompts that are cut.
        """
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequest("an echo is of the whole prompt; unset echo, or truncate_prompt_tokens", "echo")
        texts = []
        for prompt in prompts if self.echo else ():
            match prompt:
                case Text(text=text):
                    texts.append(text)
                case TokenIds(ids):
                    texts.append(await asyncio.to_thread(tokenizer.decode_all, ids))
        return tuple(texts)

    @property
    def is_scoring(self) -> bool:
        """Whether the client wants the prompt's scores, and no answer: OpenAI's and vLLM's way to ask for them."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> dict[str, Any]:
        scores: dict[str, Any] = {} if self.logprobs is None else {"logprobs": self.logprobs}
        if self.is_scoring:
            scores["max_tokens"] = 1  # the least that is generated; the client does not get it
        if self.echo and self.logprobs is not None:
            scores["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return super().sampling() | scores

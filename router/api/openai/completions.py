"""The body of /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from baton.api import PromptInput, Text, TokenIds
from baton.errors import InvalidRequest
from router.api.answering import MAX_PROMPTS
from router.api.openai.body import Body
from router.prompt import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""
NO_PROMPT = "prompt must be a string, a list of strings, or lists of token ids"


class CompletionBody(Body):
    """Request to continue a text."""

    prompt: Any
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    logprobs: int | None = None
    echo: bool | None = None
    """Whether the answer starts with the prompt, and its log probabilities with those of the prompt."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer's special tokens, such as BOS, are added to a text; None: yes."""

    def prompts(self, max_tokens: int) -> list[PromptInput]:
        """Return the prompts of the body.

        Args:
            max_tokens: maximum length of a prompt of token ids.

        Raises:
            InvalidRequest: `prompt` has a wrong type, more than MAX_PROMPTS prompts, or a prompt that is too long.
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
        """Return the text of each prompt that its answers start with; empty: the client does not ask for an echo.

        Raises:
            InvalidRequest: the prompts may be truncated.
        """
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequest("echo cannot be combined with truncate_prompt_tokens; unset one of them", "echo")
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
        """True if the client wants only the prompt's scores, which OpenAI and vLLM express as an echo of 0 tokens."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> dict[str, Any]:
        scores: dict[str, Any] = {} if self.logprobs is None else {"logprobs": self.logprobs}
        if self.is_scoring:
            scores["max_tokens"] = 1  # the minimum; the client does not get this token
        if self.echo and self.logprobs is not None:
            scores["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return super().sampling() | scores

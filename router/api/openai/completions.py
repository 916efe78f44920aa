"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any

from baton.api import PromptInput, Text, TokenIds
from baton.errors import InvalidRequest
from router.api.openai.body import Body
from router.api.several import MAX_PROMPTS
from router.prompt import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""


class CompletionBody(Body):
    """A text to be continued."""

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    """Whether the text begins with the prompt, and its log probabilities with those of the prompt."""
    add_special_tokens: bool | None = None
    """Whether what the model wants around a text is added; None: yes."""

    def prompts(self) -> list[PromptInput]:
        """One text, a list of texts, one list of token ids, or a list of such lists.

        Raises:
            InvalidRequest: it is none of that, or more than MAX_PROMPTS.
        """
        prompts = self._prompts()
        if len(prompts) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt holds {len(prompts)} prompts; send at most {MAX_PROMPTS}", "prompt")
        return prompts

    def _prompts(self) -> list[PromptInput]:
        match self.prompt:
            case str(text):
                return [self._text(text)]
            case [_, *_] as texts if all(isinstance(item, str) for item in texts):
                return [self._text(item) for item in texts]
            case list(ids) if all(_is_token_id(item) for item in ids):
                return [TokenIds(tuple(ids))]
            case list(lists) if all(isinstance(ids, list) and all(_is_token_id(i) for i in ids) for ids in lists):
                return [TokenIds(tuple(ids)) for ids in lists]
        raise InvalidRequest("prompt must be a string, a list of strings, or lists of token ids", "prompt")

    def _text(self, text: str) -> Text:
        return Text(text, bool(self.parse_special), self.add_special_tokens is not False)

    def echoed(self, tokenizer: Tokenizer) -> tuple[str, ...]:
        """Returns the texts with which the answers of each prompt begin; empty: the client does not ask for them.

        Raises:
            InvalidRequest: they could be of prompts that are cut.
        """
        if self.echo and self.truncate_prompt_tokens is not None:
            raise InvalidRequest("an echo is of the whole prompt; unset echo, or truncate_prompt_tokens", "echo")
        texts = []
        for prompt in self.prompts() if self.echo else ():
            match prompt:
                case Text(text=text):
                    texts.append(text)
                case TokenIds(ids):
                    texts.append(tokenizer.decode_all(ids))
        return tuple(texts)

    def sampling(self) -> dict[str, Any]:
        scores = {} if self.logprobs is None else {"logprobs": self.logprobs}
        if self.echo and self.logprobs is not None:
            scores["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return super().sampling() | scores


def _is_token_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)

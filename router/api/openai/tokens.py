"""The bodies of /tokenize and /detokenize, which are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from baton.model_files import read_json
from baton.tokenizer_file import special_tokens
from router.api.fields import WithoutEffect
from router.api.openai.thinking import ThinkingFields
from router.api.strict import Listed, StrictBody
from router.prompt import Tokenizer


class TokenizeBody(ThinkingFields):
    """Request to tokenize a prompt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    tools: Listed[Any] | None = None
    documents: Listed[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer's special tokens, such as BOS, are added to a text; None: yes."""
    parse_special: bool | None = None
    return_token_strs: bool | None = None
    include_reasoning: Annotated[bool | None, WithoutEffect("it concerns answers only")] = None


def description_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Describe a tokenizer as vLLM does: its tokenizer_config.json, with the chat template in use.

    Raises:
        ModelLoadError: the file cannot be read.
    """
    config = read_json(tokenizer.folder / "tokenizer_config.json")
    template = {"chat_template": tokenizer.chat_template.source} if tokenizer.chat_template.source else {}
    return {**config, **special_tokens(tokenizer.folder), **template}


class DetokenizeBody(StrictBody):
    """Request to convert tokens to text."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]

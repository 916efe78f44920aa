"""OpenAI's request and answer bodies, as far as they are built.

What is part of OpenAI's or vLLM's API and not built yet is refused by name, unless it asks for what happens anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pydantic import BaseModel, ConfigDict

from baton.api import Chat, ChatMessage, GenerateChunk, Prompt, Text, Timing, TokenIds, Usage
from baton.errors import BatonError, InvalidRequest, Overloaded, Unauthenticated, Unsupported

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (), "audio": (), "best_of": (1,), "detokenize": (True,), "echo": (False,),
    "frequency_penalty": (0,), "function_call": ("none",), "functions": ([],), "logit_bias": ({},),
    "length_penalty": (1,), "logprobs": (False,), "max_logprobs": (), "min_tokens": (0,), "modalities": (["text"],),
    "parallel_tool_calls": (True, False), "prediction": (), "presence_penalty": (0,),
    "reasoning_effort": (), "repetition_penalty": (1,), "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],), "top_logprobs": (0,), "use_beam_search": (False,),
    "verbosity": ("medium",), "web_search_options": (),
}  # fmt: skip
"""OpenAI's and vLLM's fields that are not built yet -> the values that ask for nothing. null always does."""
IGNORED = {
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "store", "user",
}  # fmt: skip
"""Fields that do not change an answer."""

TIMING_NAMES = tuple(field.name for field in fields(Timing))


class SloBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None


class _Body(BaseModel):
    """What /v1/chat/completions and /v1/completions have in common."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    request_id: str | None = None
    priority: int = 0
    """vLLM's name. Higher runs earlier here."""
    slo: SloBody | None = None
    """Ours: objectives in place of the SLO class's."""

    def sampling(self) -> dict[str, Any]:
        """What the client set, by our names."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in IGNORED:
                continue
            if name not in NEUTRAL:
                raise InvalidRequest(f"unknown field {name!r}; remove it or correct its name", name)
            if not any(_is_same(value, neutral) for neutral in NEUTRAL[name]):
                raise Unsupported(f"{name} is not supported yet; leave it out", name)
        for name, value in (self.stream_options or {}).items():
            if name not in ("include_usage", "include_obfuscation") and value:
                raise Unsupported(f"stream_options.{name} is not supported yet; leave it out", "stream_options")
        names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "ignore_eos")
        asked = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop:
            asked["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids:
            asked["stop_token_ids"] = tuple(self.stop_token_ids)
        return asked

    @property
    def include_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class ChatBody(_Body):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None

    def prompt(self) -> Prompt:
        return Chat(tuple(chat_message(message, index) for index, message in enumerate(self.messages)))

    def sampling(self) -> dict[str, Any]:
        asked = super().sampling()
        if self.max_completion_tokens is not None:
            asked["max_tokens"] = self.max_completion_tokens
        return asked


class CompletionBody(_Body):
    prompt: str | list[Any]

    def prompts(self) -> list[Prompt]:
        """One text, a list of texts, one list of token ids, or a list of such lists."""
        if isinstance(self.prompt, str):
            return [Text(self.prompt)]
        if self.prompt and all(isinstance(item, str) for item in self.prompt):
            return [Text(item) for item in self.prompt]
        if all(_is_token_id(item) for item in self.prompt):
            return [TokenIds(tuple(self.prompt))]
        if all(isinstance(item, list) and all(_is_token_id(i) for i in item) for item in self.prompt):
            return [TokenIds(tuple(item)) for item in self.prompt]
        raise InvalidRequest("prompt must be a string, a list of strings, or lists of token ids", "prompt")

    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": DEFAULT_COMPLETION_TOKENS, **super().sampling()}


class TokenizeBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Shape:
    """How one of the two endpoints writes an answer. `timing` is not OpenAI's: where the time went."""

    id: str
    created: int
    model: str
    is_chat: bool

    def whole(self, choices: Mapping[int, Answer], usage: Usage, timing: Timing) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        written = [self._choice(i, a) for i, a in choices.items()]
        return {**self._head(kind), "choices": written, "usage": _usage(usage), "timing": _timing(timing)}

    def chunk(self, index: int, chunk: GenerateChunk, is_first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": chunk.finish_reason, "logprobs": None}
        if self.is_chat:
            choice["delta"] = {**({"role": "assistant"} if is_first else {}), "content": chunk.text}
        else:
            choice["text"] = chunk.text
        return {**self._head("chat.completion.chunk" if self.is_chat else "text_completion"), "choices": [choice]}

    def usage_chunk(self, usage: Usage, timing: Timing) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": _usage(usage), "timing": _timing(timing)}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason, "logprobs": None}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        else:
            choice["text"] = answer.text
        return choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class Answer:
    text: str = ""
    finish_reason: str | None = None


def chat_message(message: Mapping[str, Any], index: int) -> ChatMessage:
    """A message of text; parts of text are joined, as `router.text.chat` joins them."""
    where = f"messages[{index}]"
    for name in set(message) - {"role", "content", "name"}:
        if message[name]:
            raise Unsupported(f"{where}.{name!a} is not supported yet; leave it out", where)
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of(part, where) for part in content)
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        raise InvalidRequest(f"{where} must have a role and content, both strings", where)
    name = message.get("name") or ""
    if not isinstance(name, str):
        raise InvalidRequest(f"{where}.name must be a string", where)
    return ChatMessage(message["role"], content, name)


def _text_of(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise Unsupported(f"{where}.content may hold text parts only", where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.content holds a part whose text is not a string", where)
    text: str = part["text"]
    return text


def _is_same(value: Any, neutral: Any) -> bool:
    """Equality that tells False from 0: `logprobs: 0` asks for the chosen token's."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _is_token_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _timing(timing: Timing) -> dict[str, Any]:
    return {name: getattr(timing, name) for name in TIMING_NAMES}


def error_body(error: BatonError) -> dict[str, Any]:
    is_clients_fault = isinstance(error, (InvalidRequest, Unauthenticated, Unsupported))
    kind = "invalid_request_error" if is_clients_fault else "server_error"
    if isinstance(error, Overloaded):
        kind = "rate_limit_error"
    param = error.param if isinstance(error, (InvalidRequest, Unsupported)) else None
    code = "invalid_api_key" if isinstance(error, Unauthenticated) else type(error).__name__
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}

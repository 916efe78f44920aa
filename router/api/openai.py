"""OpenAI's request and answer bodies, as far as they are built.

What is part of OpenAI's or vLLM's API and not built yet is refused by name, unless it asks for what happens anyway.
null stands for a field that is not set, where the field is known. What nobody knows is refused whatever its value, at
any depth, and so is a value of another type: "0.5" is no number, and 1.0 no count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from baton.api import Chat, ChatMessage, GenerateChunk, Prompt, Text, Timing, TokenIds, Usage
from baton.errors import BatonError, InvalidRequest, Overloaded, Unauthenticated, Unsupported
from baton.sampling import SamplingParams

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
NEUTRAL_IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "annotations": ([],), "audio": (), "function_call": (), "reasoning": (), "reasoning_content": (), "refusal": (),
    "tool_call_id": (), "tool_calls": ([],),
}  # fmt: skip
"""The same of a message: a client sends an answer back with all its fields."""

TIMING_NAMES = tuple(field.name for field in fields(Timing))


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SloBody(_Strict):
    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None


class StreamOptionsBody(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: with `include_usage`, every event carries the usage so far."""
    include_obfuscation: bool | None = None


def _listed(value: Any) -> Any:
    return ([value] if value else []) if isinstance(value, str) else value


class _Body(BaseModel):
    """What /v1/chat/completions and /v1/completions have in common."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptionsBody | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_listed)] = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    ignore_eos: bool | None = None
    request_id: str | None = None
    priority: int | None = None
    """vLLM's name. Higher runs earlier here."""
    slo: SloBody | None = None
    """Ours: objectives in place of the SLO class's."""
    # These do not change an answer.
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    user: str | None = None

    def sampling(self) -> dict[str, Any]:
        """What the client set, by our names."""
        for name, value in (self.model_extra or {}).items():
            if name not in NEUTRAL:
                raise InvalidRequest(f"unknown field {name!a}; remove it or correct its name", name)
            _check_asks_for_nothing(name, value, NEUTRAL[name])
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise _unsupported("stream_options.include_obfuscation")
        asked = {field.name: getattr(self, field.name) for field in fields(SamplingParams)}
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in asked.items()
            if value is not None and value != []
        }

    @property
    def include_usage(self) -> bool:
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)


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
    prompt: Any

    def prompts(self) -> list[Prompt]:
        """One text, a list of texts, one list of token ids, or a list of such lists."""
        match self.prompt:
            case str(text):
                return [Text(text)]
            case [_, *_] as texts if all(isinstance(item, str) for item in texts):
                return [Text(item) for item in texts]
            case list(ids) if all(_is_token_id(item) for item in ids):
                return [TokenIds(tuple(ids))]
            case list(lists) if all(isinstance(ids, list) and all(_is_token_id(i) for i in ids) for ids in lists):
                return [TokenIds(tuple(ids)) for ids in lists]
        raise InvalidRequest("prompt must be a string, a list of strings, or lists of token ids", "prompt")

    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": DEFAULT_COMPLETION_TOKENS, **super().sampling()}


class TokenizeBody(_Strict):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class DetokenizeBody(_Strict):
    model: str | None = None
    tokens: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How one of the two endpoints writes an answer. `timing` is not OpenAI's: where the time went."""

    id: str
    created: int
    model: str
    is_chat: bool
    continuous_usage: bool
    """Whether every event of a stream carries the usage so far."""

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
        body = {**self._head("chat.completion.chunk" if self.is_chat else "text_completion"), "choices": [choice]}
        return {**body, "usage": _usage(chunk.usage)} if self.continuous_usage and chunk.usage else body

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
    """A message of text; parts of text are joined, as `router.prompt.chat` joins them."""
    where = f"messages[{index}]"
    for name in message.keys() - {"role", "content", "name"}:
        if name not in NEUTRAL_IN_MESSAGE:
            raise _unsupported(f"{where}.{name}")
        _check_asks_for_nothing(f"{where}.{name}", message[name], NEUTRAL_IN_MESSAGE[name])
    content: Any = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    author = "" if message.get("name") is None else message["name"]
    for name, value in (("role", message.get("role")), ("content", content), ("name", author)):
        if not isinstance(value, str):
            raise InvalidRequest(f"{where}.{name} must be a string", f"{where}.{name}")
    return ChatMessage(message["role"], content, author)


def _text_of(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise Unsupported(f"{where} must be a part of text; others are not supported yet", where)
    for name in part.keys() - {"type", "text"}:
        raise _unsupported(f"{where}.{name}")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a string", f"{where}.text")
    text: str = part["text"]
    return text


def _check_asks_for_nothing(where: str, value: Any, neutral: tuple[Any, ...]) -> None:
    """Raises Unsupported unless the value of a field that is not built yet asks for what happens anyway."""
    if value is not None and not any(_is_same(value, each) for each in neutral):
        raise _unsupported(where)


def _unsupported(where: str) -> Unsupported:
    return Unsupported(
        f"{where.encode('ascii', 'backslashreplace').decode()} is not supported yet; leave it out", where
    )


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
    code = type(error).__name__
    if isinstance(error, Unauthenticated):
        code = "invalid_api_key"
    if isinstance(error, Unsupported):
        code = "unsupported_parameter"
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}

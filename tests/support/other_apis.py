"""Requests of Anthropic's API and of OpenAI's Responses, asked by the packages of both, and their answers."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import anthropic
import openai

REQUEST_ID = "x-request-id"
ANSWER_S = 240.0
NUM_KINDS = 5
"""Requests have stop strings, a structure, tools (twice), or none of that."""
MODEL = "smollm2-135m-instruct"
_CAT = {"properties": {"name": {"type": "string", "maxLength": 9}, "lives": {"type": "integer"}}, "type": "object"}
_WORDS = {"enum": ["no", "yes, please", "größer als 😀"]}
_VOLATILE = {"created_at", "completed_at", "timing", "parsed_output"}
"""When it was, how long it took and where, and what Anthropic's package adds to streams."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class ApiRequest:
    """A request of one of both APIs. Without a seed, its id alone determines what is drawn."""

    is_anthropics: bool
    request_id: str
    body: dict[str, Any]

    def answered(self, http: str, *, is_streamed: bool) -> Answer:
        """What is the same every time: how many prompt tokens came from a cache is left out."""
        with self._client(http) as client:
            if not is_streamed:
                return _same(self._endpoint(client).create(**self._asked))
            if self.is_anthropics:
                with self._endpoint(client).stream(**self._asked) as stream:
                    return _same(stream.get_final_message())
            with self._endpoint(client).create(**self._asked, stream=True) as events:
                return _same(list(events)[-1].response)

    def left(self, http: str, num_events: int) -> None:
        """Hears so many events of it, and leaves."""
        with self._client(http) as client, self._endpoint(client).create(**self._asked, stream=True) as events:
            for _ in itertools.islice(events, num_events):
                pass

    @property
    def _asked(self) -> dict[str, Any]:
        return self.body | {"extra_headers": {REQUEST_ID: self.request_id}}

    def _client(self, http: str) -> anthropic.Anthropic | openai.OpenAI:
        kind: Any = anthropic.Anthropic if self.is_anthropics else openai.OpenAI
        path = "" if self.is_anthropics else "/v1"
        client: anthropic.Anthropic | openai.OpenAI = kind(
            base_url=f"http://{http}{path}", api_key="none", timeout=ANSWER_S, max_retries=0
        )
        return client

    def _endpoint(self, client: Any) -> Any:
        return client.messages if self.is_anthropics else client.responses


def _same(answer: Any) -> Answer:
    found: Answer = _plain(answer.model_dump())
    usage = found["usage"]
    if "input_tokens_details" in usage:
        del usage["input_tokens_details"]
    else:  # Anthropic's do not count what came from a cache
        usage["input_tokens"] += usage.pop("cache_read_input_tokens", 0)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if name not in _VOLATILE and each is not None}
    return list(map(_plain, value)) if isinstance(value, list) else value


def api_request(number: int) -> ApiRequest:
    """A request of one of both APIs, to the model of `tests.support.reasoning`. Anthropic's cannot make it reason."""
    rng = random.Random(number)
    return (_message if number % 2 else _response)(number, rng)


def _message(number: int, rng: random.Random) -> ApiRequest:
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": rng.randrange(10, 30),
        "messages": [{"role": "user", "content": f"Question {number}?"}],
        "extra_body": {"temperature": 1.0, "top_k": 16, "top_p": 1.0},
    }
    match number // 2 % NUM_KINDS:
        case 0:
            body["stop_sequences"] = ["e", "nk"]
        case 1:
            body["output_config"] = {"format": {"type": "json_schema", "schema": _WORDS}}
        case 2 | 3:
            tool = {"name": "cat", "description": "Finds a cat.", "input_schema": _CAT, "strict": True}
            choice = {"type": "any", "disable_parallel_tool_use": rng.random() < 0.25}
            body |= {"tools": [tool], "tool_choice": choice, "max_tokens": 90}
    return ApiRequest(True, f"transparent-message-{number}", body)


def _response(number: int, rng: random.Random) -> ApiRequest:
    more: dict[str, Any] = {"top_k": 16, "chat_template_kwargs": {"opens": rng.random() < 0.75}}
    body: dict[str, Any] = {
        "model": MODEL,
        "input": f"Question {number}?",
        "max_output_tokens": rng.randrange(10, 30),
        "temperature": 1.0,
        "top_p": 1.0,
    }
    if more["chat_template_kwargs"]["opens"]:
        more["thinking_budget"] = rng.randrange(6)
    match number // 2 % NUM_KINDS:
        case 0:
            more["stop"] = ["e", "nk"]
        case 1:
            body["text"] = {"format": {"type": "json_schema", "name": "words", "schema": _WORDS, "strict": True}}
        case 2 | 3:
            tool = {
                "type": "function",
                "name": "cat",
                "description": "Finds a cat.",
                "parameters": _CAT,
                "strict": True,
            }
            body |= {"tools": [tool], "tool_choice": "required", "max_output_tokens": 90}
            body["parallel_tool_calls"] = rng.random() < 0.75
        case _:
            more["ignore_eos"] = True
    return ApiRequest(False, f"transparent-response-{number}", body | {"extra_body": more})

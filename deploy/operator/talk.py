"""Chat clients that stream replies over gRPC or HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from baton.api import Chat, GenerateRequest
from baton.chat import ChatMessage
from deploy.operator.client import Client
from deploy.operator.http_client import HttpClient

ANSWER_S = 600.0
"""Maximum wait for the next token over HTTP."""


class Speaker(Protocol):
    """Chat client. Its methods raise the router's own errors, or NoWorker if none answers."""

    def answer(self, messages: Sequence[ChatMessage]) -> Iterator[str]:
        """Yield the reply to the last message, in pieces of text as they arrive."""
        ...

    def close(self) -> None: ...


class GrpcSpeaker:
    """Chat client over gRPC.

    Args:
        client: gRPC client, which `close` closes.
        sampling: parameters of every reply, by their names in `SamplingParams`.
        model: model or adapter; empty: the router's default.
    """

    def __init__(self, client: Client, sampling: Mapping[str, Any], model: str = "") -> None:
        self._client = client
        self._model = model
        self._sampling = dict(sampling)

    def answer(self, messages: Sequence[ChatMessage]) -> Iterator[str]:
        request = GenerateRequest(prompt=Chat(messages=tuple(messages)), model=self._model, sampling=self._sampling)
        for chunk in self._client.generate(request):
            yield chunk.text

    def close(self) -> None:
        self._client.close()


class HttpSpeaker:
    """Chat client over HTTP, with OpenAI's API.

    Args:
        endpoint: client of a router's HTTP port.
        sampling: parameters of every reply, by their names in that API.
        model: model or adapter; empty: the router's default.
    """

    def __init__(self, endpoint: HttpClient, sampling: Mapping[str, Any], model: str = "") -> None:
        self._endpoint = endpoint
        self._sampling = dict(sampling)
        self._model = model

    def answer(self, messages: Sequence[ChatMessage]) -> Iterator[str]:
        spoken = [{"role": each.role, "content": each.content} for each in messages]
        body = {"model": self._model, "messages": spoken, "stream": True, **self._sampling}
        for event in self._endpoint.events("/v1/chat/completions", body):
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""

    def close(self) -> None:
        """Do nothing: each reply uses a separate connection, which is closed with it."""

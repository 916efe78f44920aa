"""`baton generate`: a request and its streamed response."""

from __future__ import annotations

import dataclasses
import json

from baton.api import Chat, GenerateRequest, PromptInput, Text
from baton.chat import ChatMessage
from deploy.operator.client import Client
from deploy.say import say


def request_of(text: str, *, model: str = "", chat: bool = False, **sampling: float | None) -> GenerateRequest:
    """Return the request for a prompt.

    Args:
        text: prompt.
        model: model or adapter; empty: the router's default.
        chat: send the prompt as a user message of a chat.
        sampling: parameters by their names in `SamplingParams`; None: as the model recommends.
    """
    prompt: PromptInput = Chat(messages=(ChatMessage(role="user", content=text),)) if chat else Text(text)
    given = {name: value for name, value in sampling.items() if value is not None}
    return GenerateRequest(prompt=prompt, model=model, sampling=given)


def print_answer(request: GenerateRequest, client: Client, as_json: bool) -> None:
    """Print the response as it arrives, or as one JSON document at its end."""
    chunks = []
    for chunk in client.generate(request):
        chunks.append(chunk)
        if not as_json:
            say(chunk.text, end="")
    last = chunks[-1]
    if not as_json:
        say("")
        return
    answer = {
        "request_id": last.request_id,
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "finish_reason": last.finish_reason,
        "usage": dataclasses.asdict(last.usage) if last.usage else None,
        "timing": dataclasses.asdict(last.timing) if last.timing else None,
    }
    say(json.dumps(answer, ensure_ascii=False))

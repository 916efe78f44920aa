"""`baton generate`: stream an answer to a prompt."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from typing import Annotated

import typer

from baton.api import Chat, GenerateRequest, PromptInput, Text
from baton.chat import ChatMessage
from deploy.cli.options import ClientOptions, options_from_fields
from deploy.operator.client import Client


@options_from_fields
def generate(
    text: Annotated[str, typer.Argument(help="The prompt.")],
    target: ClientOptions,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy. Without it, the model's default.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling: the same one gives the same answer.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the text as a user's message in a chat.")] = False,
) -> None:
    """Stream an answer to a prompt."""
    prompt: PromptInput = Chat(messages=(ChatMessage(role="user", content=text),)) if chat else Text(text)
    optional = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    sampling = {name: value for name, value in optional.items() if value is not None}
    with contextlib.closing(target.client()) as client:
        print_answer(GenerateRequest(prompt=prompt, sampling=sampling), client, target.as_json)


def print_answer(request: GenerateRequest, client: Client, as_json: bool) -> None:
    """Prints the answer as it comes, or as one JSON document at its end."""
    chunks = []
    for chunk in client.generate(request):
        chunks.append(chunk)
        if not as_json:
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    last = chunks[-1]
    if not as_json:
        sys.stdout.write("\n")
        return
    answer = {
        "request_id": last.request_id,
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "finish_reason": last.finish_reason,
        "usage": dataclasses.asdict(last.usage) if last.usage else None,
        "timing": dataclasses.asdict(last.timing) if last.timing else None,
    }
    print(json.dumps(answer, ensure_ascii=False))  # noqa: T201

"""`baton generate`: stream an answer to a prompt."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from deploy.cli.options import ClientOptions, options_from_fields


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
    from deploy.operator.answer import print_answer, request_of

    request = request_of(text, chat=chat, max_tokens=max_tokens, temperature=temperature, seed=seed)
    with contextlib.closing(target.client()) as client:
        print_answer(request, client, target.as_json)

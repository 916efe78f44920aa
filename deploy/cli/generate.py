"""`baton generate`: generate text for a prompt, and stream it."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from deploy.cli.options import ClientOptions, RequestedModel, options_from_fields


@options_from_fields
def generate(
    text: Annotated[str, typer.Argument(help="Prompt.")],
    target: ClientOptions,
    model: RequestedModel = "",
    max_tokens: Annotated[int, typer.Option(help="Maximum length of the output, in tokens.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy. Default: the model's own.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed for sampling: the same seed gives the same output.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user message of a chat.")] = False,
) -> None:
    """Generate text for a prompt, and stream it."""
    from deploy.operator.answer import print_answer, request_of

    request = request_of(text, model=model, chat=chat, max_tokens=max_tokens, temperature=temperature, seed=seed)
    with contextlib.closing(target.client()) as client:
        print_answer(request, client, target.as_json)

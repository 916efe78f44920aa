"""`baton chat`: a chat in the terminal."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from baton.addresses import DEFAULT_ADDRESS
from deploy.cli.options import Address, ApiKey, RequestedModel, options_from_fields
from deploy.operator.trust import TrustOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Sampling parameters of the replies; None: as the model recommends."""

    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum length of a reply, in tokens.", show_default="until the model stops")
    ] = None
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None
    seed: Annotated[int | None, typer.Option(help="Random seed for sampling.")] = None

    def given(self) -> dict[str, int | float]:
        """Return the parameters that are set, by their names, which are the same in every API."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@options_from_fields
def chat(
    trust: TrustOptions,
    options: AnswerOptions,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    *,
    model: RequestedModel = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
) -> None:
    """Chat with the model in the terminal. Each line is a message; replies are streamed.

    --address http://HOST:PORT uses HTTP, as OpenAI's clients do; HOST:PORT uses gRPC.

    /exit or Ctrl-D ends the chat, /reset starts a new one, Ctrl-C stops a reply.
    """
    from deploy.cli.conversation import converse
    from deploy.operator.client import Access

    converse(address, Access(api_key, trust.read()), options.given(), system=system, model=model)

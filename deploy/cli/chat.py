"""`baton chat`: a conversation in the terminal."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from baton.addresses import DEFAULT_ADDRESS
from deploy.cli.options import Address, ApiKey, options_from_fields
from deploy.operator.trust import TrustOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """How answers are drawn; None: as the model recommends."""

    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens.", show_default="to its end")] = None
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None

    def given(self) -> dict[str, int | float]:
        """Returns those that were given, by their names in every API."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@options_from_fields
def chat(
    trust: TrustOptions,
    options: AnswerOptions,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    system: Annotated[str, typer.Option(help="A system message to begin with.")] = "",
) -> None:
    """Talk with the model: each line is a message, answers are streamed.

    With --address http://HOST:PORT over HTTP, as OpenAI's clients do; with HOST:PORT over gRPC.

    /exit or Ctrl-D ends it, /reset begins anew, Ctrl-C stops an answer.
    """
    from deploy.cli.conversation import converse
    from deploy.operator.client import Access

    converse(address, Access(api_key, trust.read()), options.given(), system)

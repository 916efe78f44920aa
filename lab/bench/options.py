"""Options of `baton bench`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import typer

from baton.addresses import DEFAULT_ADDRESS
from baton.errors import ConfigError
from deploy.operator.trust import TrustOptions
from lab.traces.shape import TraceOptions

DEFAULT_VOCAB = 32_000
"""Vocabulary of Llama 1 and 2, Mistral and their descendants. SmolLM2 has 49,152 tokens, later families have more than
100,000. No call reports the number to a client; a model with a smaller vocabulary is detected before the replay
starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The trace to replay, the cluster and the objectives. The annotated fields are options of the command."""

    trace: TraceOptions = field(default_factory=TraceOptions)
    trust: TrustOptions = field(default_factory=TrustOptions)
    address: Annotated[str, typer.Option(help="The router, host:port.", envvar="BATON_ADDRESS")] = DEFAULT_ADDRESS
    api_key: Annotated[
        str,
        typer.Option(help="API key, if the cluster has tenants.", envvar="BATON_API_KEY", show_default=False),
    ] = ""
    max_output: Annotated[int, typer.Option(help="Maximum output length in tokens; 0: as in the trace.")] = 0
    concurrency: Annotated[
        int, typer.Option(help="Maximum number of requests in flight; 0: no limit, each is sent at its time.")
    ] = 0
    vocab: Annotated[
        int | None,
        typer.Option(help="Upper bound of token ids in prompts; at most the model's vocabulary.", show_default="32000"),
    ] = None
    ttft_ms: Annotated[float, typer.Option(help="Objective for the time to first token, in ms.")] = 5000.0
    itl_ms: Annotated[float, typer.Option(help="Objective for a request's mean inter-token latency, in ms.")] = 100.0

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "itl_ms"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be more than 0, got {getattr(self, name)}")
        for name in ("max_output", "concurrency"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 0, got {getattr(self, name)}")
        if self.vocab is not None and not 1 <= self.vocab <= 2**32:
            raise ConfigError(f"--vocab must be 1 to {2**32}, got {self.vocab}")

    @property
    def vocab_size(self) -> int:
        return DEFAULT_VOCAB if self.vocab is None else self.vocab

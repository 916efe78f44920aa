"""Which traces are exported: a client's wish to be sampled does not count, another process's decision does."""

from __future__ import annotations

import itertools
import random

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span

from baton.telemetry import exporting, tracing

SAMPLED, UNSAMPLED = "01", "00"


def span(ratio: float, flags: str, *, faces_clients: bool, trace_id: str = "0" * 31 + "1") -> tuple[Span, Span]:
    """The span of a call that brings a trace, and a child of it."""
    tracer = TracerProvider(sampler=exporting.sampler(ratio, faces_clients=faces_clients)).get_tracer("x")
    parent = tracing.from_metadata([("traceparent", f"00-{trace_id}-{'0' * 15}1-{flags}")]) if flags else None
    found = tracer.start_span("call", context=parent)
    return found, tracer.start_span("child", context=tracing.context_of(found))


@pytest.mark.parametrize(
    ("ratio", "flags", "faces_clients", "is_exported"),
    [
        (0.0, SAMPLED, True, False),
        (1.0, SAMPLED, True, True),
        (1.0, UNSAMPLED, True, False),
        (0.0, "", True, False),
        (1.0, "", True, True),
        (0.0, SAMPLED, False, True),
        (1.0, UNSAMPLED, False, False),
        (0.0, "", False, False),
    ],
)
def test_a_trace_is_exported_as_the_ratio_or_our_own_processes_say(
    ratio: float, flags: str, faces_clients: bool, is_exported: bool
) -> None:
    spans = span(ratio, flags, faces_clients=faces_clients)
    assert [each.is_recording() for each in spans] == [is_exported, is_exported]
    if flags:
        assert spans[0].get_span_context().trace_id == 1, "the client finds its own trace again"


def test_a_client_cannot_choose_an_id_that_is_always_in_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = itertools.cycle([0.05, 0.5, 0.95])
    monkeypatch.setattr(random, "random", lambda: next(draws))
    found = [span(0.1, SAMPLED, faces_clients=True)[0].is_recording() for _ in range(6)]
    assert found == [True, False, False] * 2

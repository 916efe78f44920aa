"""One trace per request, across processes; one span per phase, never one per token.

Spans are exported over OTLP if `telemetry.otlp_endpoint` is set; otherwise their cost is negligible.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind

from baton.config import TelemetryConfig

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from baton.tls import Tls

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
_tracer = trace.get_tracer("baton")


def configure(
    service_name: str, instance_id: str, config: TelemetryConfig, tls: Tls | None = None, *, faces_clients: bool = False
) -> TracerProvider | None:
    """Start to export this process's spans; `shutdown()` of the returned provider flushes them. None: no export.

    Args:
        tls: certificates for `telemetry.otlp_tls`; None: no client certificate, and the system's authorities.
        faces_clients: see `exporting.sampler`.
    """
    if not config.otlp_endpoint:
        return None
    from baton.telemetry import exporting  # most processes export nothing, and OpenTelemetry's SDK takes long to import

    provider = exporting.provider(service_name, instance_id, config, tls, faces_clients=faces_clients)
    trace.set_tracer_provider(provider)
    return provider


def start_span(
    name: str,
    parent: Context | None = None,
    attributes: Attributes | None = None,
    start_ns: int | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Span:
    """Return a span that the caller ends. It starts now, or at `start_ns` since the epoch."""
    return _tracer.start_span(name, context=parent, attributes=attributes, start_time=start_ns, kind=kind)


def span_between(name: str, parent: Context, start_ns: int, end_ns: int) -> None:
    """Record a span of a finished phase; nanoseconds since the epoch."""
    _tracer.start_span(name, context=parent, start_time=start_ns).end(end_time=end_ns)


def record_span(
    name: str, parent: Context, duration_s: float, attributes: Attributes | None = None, ended_s_ago: float = 0.0
) -> None:
    """Record a span of a finished phase that ended `ended_s_ago` seconds ago and took `duration_s` seconds."""
    end = time.time_ns() - int(ended_s_ago * 1e9)
    span = _tracer.start_span(name, context=parent, attributes=attributes, start_time=end - int(duration_s * 1e9))
    span.end(end_time=end)


def context_of(span: Span) -> Context:
    """Return the parent context for this span's children."""
    return trace.set_span_in_context(span)


def span_of(context: Context) -> SpanContext:
    """Return the span that is the parent in a context."""
    return trace.get_current_span(context).get_span_context()


def to_metadata(context: Context) -> tuple[tuple[str, str], ...]:
    """Return gRPC metadata that carries the trace to another process (W3C trace context)."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=context)
    return tuple(carrier.items())


def from_metadata(metadata: Iterable[Any] | None) -> Context:
    """Return the trace of a call; an empty context if the caller sent none."""
    return propagate.extract({key: value for key, value in metadata or () if isinstance(value, str)}, context=Context())

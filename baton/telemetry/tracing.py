"""One trace per request, across processes; one span per phase, never one per token.

Spans are exported over OTLP when `telemetry.otlp_endpoint` is set; otherwise they cost next to nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Span, SpanContext, SpanKind

from baton.config import TelemetryConfig

if TYPE_CHECKING:
    from baton.tls import Tls

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
_tracer = trace.get_tracer("baton")


class _DrawnShare(Sampler):
    """Samples a share of the traces, drawn here: clients choose the ids of theirs."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def should_sample(self, *given: Any, **named: Any) -> SamplingResult:
        chosen = ALWAYS_ON if random.random() < self._ratio else ALWAYS_OFF
        return chosen.should_sample(*given, **named)

    def get_description(self) -> str:
        return f"Share({self._ratio:g})"


def sampler(ratio: float, *, faces_clients: bool) -> Sampler:
    """What decides which traces are exported.

    Args:
        ratio: share of the traces that begin here.
        faces_clients: callers are clients, whose wish to be sampled counts for no more than having a trace at all; one
            that is not sampled stays so. Other callers have decided for us.
    """
    share = _DrawnShare(ratio)
    return ParentBased(share, remote_parent_sampled=share) if faces_clients else ParentBased(share)


def configure(
    service_name: str, instance_id: str, config: TelemetryConfig, tls: Tls | None = None, *, faces_clients: bool = False
) -> TracerProvider | None:
    """Starts exporting this process's spans; `shutdown()` of what it returns flushes them. None: nothing to export.

    Args:
        tls: what is shown and believed where `telemetry.otlp_tls` is on; None: nothing, and the system's authorities.
        faces_clients: see `sampler`.
    """
    if not config.otlp_endpoint:
        return None
    resource = Resource.create({"service.name": service_name, "service.instance.id": instance_id})
    provider = TracerProvider(resource=resource, sampler=sampler(config.sample_ratio, faces_clients=faces_clients))
    exporter: SpanExporter
    if config.otlp_tls and tls is not None:
        exporter = _TlsExporter(config.otlp_endpoint, tls)
    else:
        exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=not config.otlp_tls)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return provider


class _TlsExporter(SpanExporter):
    """Exports over a channel that is opened anew when the certificates have changed."""

    def __init__(self, endpoint: str, tls: Tls) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._shown = tls.now()
        self._exporter = self._opened()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if (now := self._tls.now()) is not self._shown:
            self._exporter.shutdown()
            self._shown, self._exporter = now, self._opened()
        return self._exporter.export(spans)

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def _opened(self) -> OTLPSpanExporter:
        return OTLPSpanExporter(endpoint=self._endpoint, insecure=False, credentials=self._tls.channel_credentials())


def start_span(
    name: str,
    parent: Context | None = None,
    attributes: Attributes | None = None,
    start_ns: int | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
) -> Span:
    """A span that the caller ends. It starts now, or at `start_ns` since the epoch."""
    return _tracer.start_span(name, context=parent, attributes=attributes, start_time=start_ns, kind=kind)


def span_between(name: str, parent: Context, start_ns: int, end_ns: int) -> None:
    """A span of a phase that is over; nanoseconds since the epoch."""
    _tracer.start_span(name, context=parent, start_time=start_ns).end(end_time=end_ns)


def record_span(
    name: str, parent: Context, duration_s: float, attributes: Attributes | None = None, ended_s_ago: float = 0.0
) -> None:
    """A span of a phase that is over: it ended `ended_s_ago` seconds ago and took `duration_s` seconds."""
    end = time.time_ns() - int(ended_s_ago * 1e9)
    span = _tracer.start_span(name, context=parent, attributes=attributes, start_time=end - int(duration_s * 1e9))
    span.end(end_time=end)


def context_of(span: Span) -> Context:
    """Parent context for this span's children."""
    return trace.set_span_in_context(span)


def span_of(context: Context) -> SpanContext:
    """The span that a context's spans are children of."""
    return trace.get_current_span(context).get_span_context()


def to_metadata(context: Context) -> tuple[tuple[str, str], ...]:
    """gRPC metadata that carries the trace to another process (W3C trace context)."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=context)
    return tuple(carrier.items())


def from_metadata(metadata: Iterable[Any] | None) -> Context:
    """The trace that a call belongs to; an empty context when the caller sent none."""
    return propagate.extract({key: value for key, value in metadata or () if isinstance(value, str)}, context=Context())

"""Export of spans: sampling, and the channel to the receiver. `tracing.configure` uses it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, SamplingResult

from baton.config import TelemetryConfig

if TYPE_CHECKING:
    from baton.tls import Tls


class _DrawnShare(Sampler):
    """Sampler that draws a share of the traces at random, since clients choose the ids of their traces."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def should_sample(self, *given: Any, **named: Any) -> SamplingResult:
        chosen = ALWAYS_ON if random.random() < self._ratio else ALWAYS_OFF
        return chosen.should_sample(*given, **named)

    def get_description(self) -> str:
        return f"Share({self._ratio:g})"


def sampler(ratio: float, *, faces_clients: bool) -> Sampler:
    """Return the sampler that decides which traces are exported.

    Args:
        ratio: share of the traces that start here.
        faces_clients: callers are clients. A client's sampled trace is sampled with the probability `ratio`, like a new
            one; a trace that is not sampled stays so. Otherwise the caller's decision applies.
    """
    share = _DrawnShare(ratio)
    return ParentBased(share, remote_parent_sampled=share) if faces_clients else ParentBased(share)


def provider(
    service_name: str, instance_id: str, config: TelemetryConfig, tls: Tls | None, *, faces_clients: bool
) -> TracerProvider:
    """Return the provider that exports spans to `telemetry.otlp_endpoint`; see `tracing.configure`."""
    resource = Resource.create({"service.name": service_name, "service.instance.id": instance_id})
    made = TracerProvider(resource=resource, sampler=sampler(config.sample_ratio, faces_clients=faces_clients))
    exporter: SpanExporter
    if config.otlp_tls and tls is not None:
        exporter = _TlsExporter(config.otlp_endpoint, tls)
    else:
        exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint, insecure=not config.otlp_tls)
    made.add_span_processor(BatchSpanProcessor(exporter))
    return made


class _TlsExporter(SpanExporter):
    """Exporter over a channel that is reopened when the certificates have changed."""

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

"""Spans that leave over TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from baton.config import ClusterConfig, TelemetryConfig
from baton.rpc import RpcServer
from baton.telemetry import exporting, tracing
from baton.tls import Tls, member_tls
from tests.support.certificates import Authority, cluster_settings


class _Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    num_spans = 0

    async def Export(  # noqa: N802 - the protocol's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.num_spans += sum(len(s.spans) for r in request.resource_spans for s in r.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


async def _serving(receiver: _Receiver, port: int, tls: Tls | None) -> tuple[RpcServer, int]:
    rpc = RpcServer(())
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, rpc.server)  # type: ignore[no-untyped-call]
    port = rpc.bind("127.0.0.1", port, tls)
    await rpc.start()
    return rpc, port


@pytest.mark.parametrize("over_tls", [True, False])
async def test_spans_leave_over_tls_where_they_should_also_with_new_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over_tls: bool
) -> None:
    monkeypatch.setattr(trace, "set_tracer_provider", lambda provider: None)
    tls = member_tls(ClusterConfig(**cluster_settings(Authority.make(tmp_path).sign("member"))))
    receiver = _Receiver()
    rpc, port = await _serving(receiver, 0, tls if over_tls else None)
    config = TelemetryConfig(otlp_endpoint=f"127.0.0.1:{port}", otlp_tls=over_tls)
    provider = tracing.configure("baton-test", "test", config, tls)
    assert provider is not None
    tracer = provider.get_tracer("test")
    for number in (1, 2):
        tracer.start_span("some").end()
        assert await asyncio.to_thread(provider.force_flush)
        assert receiver.num_spans == number
        Authority.make(tmp_path).sign("member")
        await rpc.stop(0)
        rpc, _ = await _serving(receiver, port, tls if over_tls else None)
    await asyncio.to_thread(provider.shutdown)
    await rpc.stop(0)


def test_without_certificates_the_systems_authorities_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, object]] = []

    class Exporter:
        def __init__(self, **options: object) -> None:
            made.append(options)

        def export(self, spans: list[ReadableSpan]) -> SpanExportResult:
            raise AssertionError("there are none")

        def shutdown(self) -> None:
            pass

    monkeypatch.setattr(exporting, "OTLPSpanExporter", Exporter)
    monkeypatch.setattr(trace, "set_tracer_provider", lambda provider: None)
    for over_tls in (True, False):
        config = TelemetryConfig(otlp_endpoint="127.0.0.1:1", otlp_tls=over_tls)
        provider = tracing.configure("baton-test", "test", config)
        assert provider is not None
        provider.shutdown()
    assert [options["insecure"] for options in made] == [False, True]

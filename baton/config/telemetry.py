"""Settings of traces, logs and metrics."""

from __future__ import annotations

from typing import Annotated

from baton.config.section import Float, HostPort, OneOf, Port, String, Switch, section


@section("telemetry")
class TelemetryConfig:
    """Traces, logs and metrics of every process."""

    otlp_endpoint: HostPort = ""
    """host:port of an OTLP gRPC receiver for traces; empty: spans are not exported."""
    otlp_tls: Switch = False
    """Whether that receiver is spoken to over TLS. `cluster.tls_ca` must have signed its certificate, and each process
    shows its own; without those settings the system's authorities are believed."""
    sample_ratio: Float = 1.0
    """Share of the requests whose traces are exported. A client that brings a trace of its own does not raise it; one
    that wants its trace unsampled gets that."""
    host: String = "127.0.0.1"
    """Address on which a router listens at `port`. Who reaches it needs no key to read the metrics."""
    port: Port = 0
    """Port of a router's `/metrics` and probes. Where tenants are configured it is the only one with `/metrics`, which
    name the tenants; without tenants the HTTP port has them, too. 0: none."""
    log_level: Annotated[str, OneOf("debug", "info", "warning", "error", "critical")] = "info"
    """debug, info, warning, error or critical."""
    log_format: Annotated[str, OneOf("text", "json")] = "text"
    """text, or json: one object per line, with the trace of the request that the line belongs to."""
    vllm_aliases: Switch = False
    """Also show metrics under vLLM's names where they exist, for dashboards and gateways that know those."""

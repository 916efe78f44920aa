"""Settings of traces, logs and metrics."""

from __future__ import annotations

from typing import Annotated

from baton.config.section import Float, HostPort, OneOf, Port, String, Switch, section


@section("telemetry")
class TelemetryConfig:
    """Traces, logs and metrics of every process."""

    otlp_endpoint: HostPort = ""
    """host:port of an OTLP gRPC receiver for traces; empty: traces are not exported."""
    otlp_tls: Switch = False
    """Use TLS for that receiver. `cluster.tls_ca` must have signed its certificate, and each process presents its own
    certificate; if those settings are empty, the system's authorities are trusted."""
    sample_ratio: Float = 1.0
    """Share of requests whose traces are exported. A client's own trace cannot raise it; a client that marks its trace
    as unsampled gets no trace."""
    host: String = "127.0.0.1"
    """Address on which a router listens at `port`. The metrics at this address need no key."""
    port: Port = 0
    """Port for a router's `/metrics` and probes. If tenants are configured, `/metrics` is available at this port only,
    because it names the tenants; otherwise the HTTP port serves it, too. 0: no such port."""
    log_level: Annotated[str, OneOf("debug", "info", "warning", "error", "critical")] = "info"
    """debug, info, warning, error or critical."""
    log_format: Annotated[str, OneOf("text", "json")] = "text"
    """text, or json: one object per line, with the trace id of the request that the line belongs to."""
    vllm_aliases: Switch = False
    """Also export each metric that vLLM has under vLLM's name, for dashboards and gateways that expect those names."""

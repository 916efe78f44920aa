"""Telemetry of every process: metrics, traces and log lines.

`instruments` collects all instruments: those that a router records (`request_metrics`), those read from the cluster's
status (`observed`, and `trouble` for impending failures), those of the process itself (`process`), and their aliases
for tools that expect vLLM (`vllm`). `prometheus` writes the exposition, `tracing` records one trace per request, which
`exporting` exports, `logs` writes the log lines, `prefixes` tracks recurring prefixes.
"""

__all__ = [
    "exporting",
    "instruments",
    "logs",
    "observed",
    "prefixes",
    "process",
    "prometheus",
    "request_metrics",
    "tracing",
    "trouble",
    "vllm",
]

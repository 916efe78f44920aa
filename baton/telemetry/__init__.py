"""What every process reports of itself: metrics, traces and log lines.

`instruments` collects all instruments: those that a router books (`recorded`), those read from the cluster's status
(`observed`, and `trouble` for what will end it), those of the process itself (`process`) and their names for tools that
expect vLLM (`vllm`). `prometheus` writes the exposition, `tracing` one trace per request, which leaves by `exporting`,
`logs` the log lines, `prefixes` which prefixes recur.
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

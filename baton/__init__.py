"""What every process shares: the vocabulary of requests, workers and blocks, and the ways in which processes speak.

The vocabulary is in plain modules (`api`, `messages`, `cluster`, `blocks`, `sampling`, `structure`, `scores`,
`hypotheses`, `chat`, `tools`, `quota`, `addresses`, `timelines`, `errors`), settings are in `config`, the engine is in
`engine`; `grammar` compiles structures for router and engine; protobuf stops at `wire`, `rpc` is gRPC, `trust` is who
the members of a cluster are, `tls` has the certificates, `telemetry` declares every metric, and `v1` is generated from
`proto/`. No other package of the product is imported here.
"""

import os

# grpc's core writes notes on every closed connection; they must be silenced before it is loaded, by whatever room.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__all__ = [
    "addresses",
    "api",
    "blocks",
    "chat",
    "cluster",
    "config",
    "costs",
    "engine",
    "errors",
    "fit",
    "garbage",
    "gpus",
    "grammar",
    "hypotheses",
    "kv_layout",
    "memory",
    "messages",
    "model_files",
    "nesting",
    "parent",
    "quota",
    "rpc",
    "sampling",
    "scores",
    "spelling",
    "structure",
    "tasks",
    "telemetry",
    "timelines",
    "tls",
    "tools",
    "trust",
    "v1",
    "wire",
]

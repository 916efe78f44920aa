"""What every process shares: the vocabulary of requests, workers and blocks, and the ways in which processes speak.

The vocabulary is in plain modules (`api`, `messages`, `cluster`, `blocks`, `sampling`, `structure`, `scores`,
`hypotheses`, `chat`, `call_arguments`, `tools`, `quota`, `addresses`, `timelines`, `errors`), settings are in `config`;
`grammar` compiles structures for router and engine, `json_schema` and `dead_ends` find what of a schema cannot be,
`template` renders chats, `sandbox` bounds what both do; protobuf stops at `wire`, `rpc` is gRPC, `trust` is who the
members of a cluster are, `tls` has the certificates, `plain_files`, `weights_files`, `tokenizer_file` and `own_files`
read what strangers may have written, `tokenizer_classes` is what transformers has in place of a tokenizer's file,
`visible` shows what strangers wrote, `telemetry` declares every metric, and `v1` is generated from `proto/`. No other
package of the product is imported here.
"""

import os

# grpc's core writes notes on every closed connection; they must be silenced before it is loaded, by whatever room.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__all__ = [
    "addresses",
    "api",
    "blocks",
    "call_arguments",
    "chat",
    "cluster",
    "config",
    "costs",
    "dead_ends",
    "errors",
    "fit",
    "garbage",
    "gpus",
    "grammar",
    "hypotheses",
    "json_schema",
    "kv_layout",
    "memory",
    "messages",
    "model_files",
    "nesting",
    "own_files",
    "own_folder",
    "parent",
    "plain_files",
    "quota",
    "rpc",
    "rust",
    "sampling",
    "sandbox",
    "scores",
    "spelling",
    "structure",
    "tasks",
    "telemetry",
    "template",
    "timelines",
    "tls",
    "tokenizer_classes",
    "tokenizer_file",
    "tools",
    "trust",
    "turns",
    "v1",
    "visible",
    "weights_files",
    "wire",
]

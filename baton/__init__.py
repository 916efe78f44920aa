"""Code that every process shares: the types for requests, workers and blocks, and inter-process communication.

The types are in plain modules (`api`, `messages`, `cluster`, `blocks`, `sampling`, `structure`, `scores`, `hypotheses`,
`registered_adapters`, `chat`, `call_arguments`, `tools`, `quota`, `addresses`, `timelines`, `errors`); settings are in
`config`. `grammar` compiles structures for router and engine, `json_schema` and `dead_ends` find the parts of a schema
that cannot be enforced, `template` renders chats, and `sandbox` limits the resources of both. Protobuf stops at `wire`;
`rpc` is gRPC; `trust` authenticates the members of a cluster; `tls` has the certificates. `plain_files`,
`weights_files`, `tokenizer_file` and `own_files` read untrusted files, `tokenizer_classes` lists transformers'
replacements for a tokenizer's file, and `visible` escapes untrusted text. `serving_files` are the files of a model that
a router needs. `telemetry` declares every metric, and `v1` is generated from `proto/`. This package imports no other
package of the product.
"""

import os

# grpc's core logs every closed connection. Silence it here, before any package loads it.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__all__ = [
    "adapters",
    "addresses",
    "api",
    "blocks",
    "cache_folder",
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
    "images",
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
    "registered_adapters",
    "rpc",
    "rust",
    "sampling",
    "sandbox",
    "scores",
    "serving_files",
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

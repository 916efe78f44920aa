"""Where protobuf meets domain values: one file a contract, and nothing of protobuf beyond.

The contracts are in `proto/`: `inference` for clients, `worker` for routers and workers, `kv` for two workers, `admin`
for operators. `known_fields` refuses or avoids fields of other releases, `convert` has what the contracts share.
"""

from baton.wire.admin import (
    drain_response,
    explain_response,
    explanations,
    pools_response,
    role_response,
    scale_response,
    status_as_json,
    status_response,
    step_costs,
    workers_response,
)
from baton.wire.convert import MAX_CONTROL_BYTES
from baton.wire.inference import (
    generate_chunk,
    generate_request,
    generate_request_from_pb,
    generate_response,
    list_models_response,
    tokenize_request_from_pb,
    tokenize_response,
)
from baton.wire.known_fields import KNOWN_FIELDS, check_known, fields_in, fields_unknown_to, named, unknown_field
from baton.wire.kv import (
    pull_from_pb,
    pull_to_pb,
    session_request,
    session_request_from_pb,
    session_response,
    session_response_from_pb,
)
from baton.wire.worker import (
    MAX_COMMANDS,
    cancel_command,
    commands,
    events,
    fields_of,
    max_start_bytes,
    sequence_from_pb,
    serve_request,
    serve_response,
    start_command,
    ticket_from_pb,
    ticket_to_pb,
    write_sequence,
)

__all__ = [
    "KNOWN_FIELDS",
    "MAX_COMMANDS",
    "MAX_CONTROL_BYTES",
    "cancel_command",
    "check_known",
    "commands",
    "drain_response",
    "events",
    "explain_response",
    "explanations",
    "fields_in",
    "fields_of",
    "fields_unknown_to",
    "generate_chunk",
    "generate_request",
    "generate_request_from_pb",
    "generate_response",
    "list_models_response",
    "max_start_bytes",
    "named",
    "pools_response",
    "pull_from_pb",
    "pull_to_pb",
    "role_response",
    "scale_response",
    "sequence_from_pb",
    "serve_request",
    "serve_response",
    "session_request",
    "session_request_from_pb",
    "session_response",
    "session_response_from_pb",
    "start_command",
    "status_as_json",
    "status_response",
    "step_costs",
    "ticket_from_pb",
    "ticket_to_pb",
    "tokenize_request_from_pb",
    "tokenize_response",
    "unknown_field",
    "workers_response",
    "write_sequence",
]

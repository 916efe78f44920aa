"""gRPC as every process uses it: servers, channels and typed errors across the wire.

`server` has the settings of servers and channels (keepalive, health, reflection), `errors` maps the error tree to
statuses and back, `outbox` is the queue before the stream between a router and a worker.
"""

import os

# grpc's core writes notes on every closed connection; they must be silenced before it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from baton.rpc.errors import from_rpc_error
from baton.rpc.server import RpcServer, channel

__all__ = ["RpcServer", "channel", "from_rpc_error"]

"""gRPC plumbing that every process shares."""

import os

# grpc's core writes notes on every closed connection; they must be silenced before it is loaded.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from baton.rpc.errors import from_rpc_error
from baton.rpc.server import RpcServer, channel

__all__ = ["RpcServer", "channel", "from_rpc_error"]

"""gRPC settings of all processes: servers, channels and typed errors across the wire.

`server` has the settings of servers and channels (keepalive, health, reflection). `arrivals` limits incoming messages
of a server, `members` restricts members' servers to members, `errors` maps the error tree to statuses and back.
`model_files` sends the files of a model that routers need.
"""

from baton.rpc.errors import MalformedCount, from_rpc_error
from baton.rpc.members import members_only
from baton.rpc.server import RpcServer, channel

__all__ = ["MalformedCount", "RpcServer", "channel", "from_rpc_error", "members_only"]

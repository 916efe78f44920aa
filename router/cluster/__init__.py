"""The router's place in the cluster: its picture of the other processes, and whether it should be sent requests.

`registry` follows leases, loads and the index in Redis and announces this router; `readiness` answers /readyz and
gRPC's health service; `history` keeps what all routers counted in the last hour; `surroundings` watches Redis' memory
and the certificates' ends; `load` measures this process, `alerts` are conditions of all of this, and `watch` remembers
since when each lasts.
"""

__all__ = ["alerts", "dependencies", "history", "history_store", "load", "readiness", "registry", "watch"]

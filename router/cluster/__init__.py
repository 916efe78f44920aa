"""The router in the cluster: its view of the other processes, and whether it should receive requests.

`registry` follows leases, loads and the index in Redis and announces this router. `readiness` answers /readyz and
gRPC's health service. `history` keeps the counts of all routers for an hour. `dependencies` watches the memory of Redis
and the expiry of certificates. `load` measures this process. `alerts` evaluates conditions over all of this, and
`watch` remembers when each of them started.
"""

__all__ = ["alerts", "dependencies", "history", "history_store", "load", "readiness", "registry", "watch"]

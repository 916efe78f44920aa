"""The router in the cluster: its view of the other processes, and whether it should receive requests.

`registry` follows leases, loads, the index, the memory of Redis and the expiry of certificates, announces this router,
and answers /readyz and gRPC's health service. `history` keeps the counts of all routers for an hour. `watch` measures
this process, evaluates the conditions of alerts over all of this, and remembers when each of them started. `orders`
carries out operators' orders, or forwards them to the controller of a model.
"""

__all__ = ["history", "orders", "registry", "watch"]

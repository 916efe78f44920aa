"""KV state that workers and routers share: which worker owns which prefix, which processes are alive, and KV transfer.

`index`, `leases` and `adapters` keep their state in Redis and need no torch, so routers import them. `transfer` copies
KV between the caches of two workers, and only workers import it.
"""

__all__ = ["adapters", "index", "leases", "transfer"]

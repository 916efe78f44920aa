"""What workers and routers share about KV: who owns which prefix, who is alive, and how KV moves between workers.

`index` and `leases` keep their state in Redis and need no torch, so routers import them; `transfer` moves KV between
the caches of two workers, and only workers import it.
"""

__all__ = ["index", "leases", "transfer", "worker_context"]

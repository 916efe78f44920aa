"""The process of a worker: an engine, its KV endpoint, a lease in Redis and the RPC handlers of both roles.

process   starts and ends it: `python -m deploy.worker`
member    makes the engine and the KV endpoint, holds the lease and publishes what the cache has
control   the controller's and operators' orders: drain, change the role
"""

"""Registry of the cluster: live processes and their epochs, desired pool sizes, and records of requests in flight.

Each worker holds a lease (`keeper`, `protocol`); routers and controllers announce themselves, and controllers their
models (`endpoint`). Routers also record the requests in flight, so that another router can resume them (`journal`).
Redis stores all of it (`redis`, `codec`).
"""

from kvstore.leases.endpoint import RedisEndpoint
from kvstore.leases.journal import Noted, RecordEnd, RecordEntry, RecordKey, RecordPart, RecordStore, field_of
from kvstore.leases.keeper import LeaseKeeper
from kvstore.leases.loads import ReportedLoads
from kvstore.leases.memory import MemoryEndpoint, MemoryLeases, MemoryRecords
from kvstore.leases.protocol import MAX_MODELS, MODEL_LEASE_S, EndpointStore, LeaseStore
from kvstore.leases.redis import RedisLeases
from kvstore.leases.redis_records import RedisRecords

__all__ = [
    "MAX_MODELS",
    "MODEL_LEASE_S",
    "EndpointStore",
    "LeaseKeeper",
    "LeaseStore",
    "MemoryEndpoint",
    "MemoryLeases",
    "MemoryRecords",
    "Noted",
    "RecordEnd",
    "RecordEntry",
    "RecordKey",
    "RecordPart",
    "RecordStore",
    "RedisEndpoint",
    "RedisLeases",
    "RedisRecords",
    "ReportedLoads",
    "field_of",
]

"""Registry of the cluster: live processes and their epochs, desired pool sizes, and records of requests in flight.

Each worker holds a lease (`keeper`, `protocol`); routers and the controller announce themselves. Routers also record
the requests in flight, so that another router can resume them (`journal`). Redis stores all of it (`redis`, `codec`).
"""

from kvstore.leases.journal import Noted, RecordEnd, RecordEntry, RecordKey, RecordPart, RecordStore, field_of
from kvstore.leases.keeper import LeaseKeeper
from kvstore.leases.loads import ReportedLoads
from kvstore.leases.memory import MemoryLeases, MemoryRecords
from kvstore.leases.protocol import LeaseStore
from kvstore.leases.redis import RedisLeases
from kvstore.leases.redis_records import RedisRecords

__all__ = [
    "LeaseKeeper",
    "LeaseStore",
    "MemoryLeases",
    "MemoryRecords",
    "Noted",
    "RecordEnd",
    "RecordEntry",
    "RecordKey",
    "RecordPart",
    "RecordStore",
    "RedisLeases",
    "RedisRecords",
    "ReportedLoads",
    "field_of",
]

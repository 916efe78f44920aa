"""Who is alive, under which epoch, and how many there should be; and what routers note of the requests in flight."""

from kvstore.leases.journal import Ended, Entry, Noted, Part, RecordKey, RecordStore, field_of
from kvstore.leases.keeper import LeaseKeeper
from kvstore.leases.memory import MemoryLeases, MemoryRecords
from kvstore.leases.protocol import LeaseStore
from kvstore.leases.redis import RedisLeases, RedisRecords

__all__ = [
    "Ended",
    "Entry",
    "LeaseKeeper",
    "LeaseStore",
    "MemoryLeases",
    "MemoryRecords",
    "Noted",
    "Part",
    "RecordKey",
    "RecordStore",
    "RedisLeases",
    "RedisRecords",
    "field_of",
]

"""Who is alive, under which epoch, and how many there should be."""

from kvstore.leases.keeper import LeaseKeeper
from kvstore.leases.memory import MemoryLeases
from kvstore.leases.protocol import LeaseStore
from kvstore.leases.redis import RedisLeases

__all__ = ["LeaseKeeper", "LeaseStore", "MemoryLeases", "RedisLeases"]

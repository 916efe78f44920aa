"""Index of prefixes: which worker has which KV blocks in its cache. Starts at `protocol`; needs no torch.

Workers publish the changes of their caches (`publisher`); each router follows them (`follower`) into its local copy
(`mirror`). Redis stores the index (`redis`, `keys`, `connection`); tests keep it in memory (`memory`).
"""

from kvstore.index.connection import RedisConnection
from kvstore.index.events import ORIGIN, BlockEvent, Cursor, IndexAnswer, IndexOutcome, IndexState, Op, Position, Tier
from kvstore.index.follower import MirrorFollower
from kvstore.index.garbage import GarbageBook
from kvstore.index.memory import MemoryIndex, MemoryStore
from kvstore.index.mirror import Applied, Mirror, Owners
from kvstore.index.protocol import PrefixIndex
from kvstore.index.publisher import IndexPublisher
from kvstore.index.redis import RedisIndex, StreamBounds
from kvstore.index.sealed import Seal

__all__ = [
    "ORIGIN",
    "Applied",
    "BlockEvent",
    "Cursor",
    "GarbageBook",
    "IndexAnswer",
    "IndexOutcome",
    "IndexPublisher",
    "IndexState",
    "MemoryIndex",
    "MemoryStore",
    "Mirror",
    "MirrorFollower",
    "Op",
    "Owners",
    "Position",
    "PrefixIndex",
    "RedisConnection",
    "RedisIndex",
    "Seal",
    "StreamBounds",
    "Tier",
]

"""Who owns which prefix. `protocol.py` tells the whole story; nothing here needs torch."""

from kvstore.index.connection import Connection, without_password
from kvstore.index.events import ORIGIN, Answer, BlockEvent, Cursor, IndexState, Op, Outcome, Position, Tier
from kvstore.index.follower import MirrorFollower
from kvstore.index.garbage import GarbageBook
from kvstore.index.memory import MemoryIndex, MemoryStore
from kvstore.index.mirror import Applied, Mirror
from kvstore.index.protocol import PrefixIndex
from kvstore.index.publisher import IndexPublisher
from kvstore.index.redis import RedisIndex

__all__ = [
    "ORIGIN",
    "Answer",
    "Applied",
    "BlockEvent",
    "Connection",
    "Cursor",
    "GarbageBook",
    "IndexPublisher",
    "IndexState",
    "MemoryIndex",
    "MemoryStore",
    "Mirror",
    "MirrorFollower",
    "Op",
    "Outcome",
    "Position",
    "PrefixIndex",
    "RedisIndex",
    "Tier",
    "without_password",
]

"""Registry of LoRA adapters: which names are served with which weights. Starts at `protocol`; needs no torch.

Routers write it when an operator adds or removes an adapter, and each router follows it into its own copy, from which
it serves. Redis stores it (`redis`, `codec`); tests keep it in memory (`memory`).
"""

from kvstore.adapters.memory import MemoryAdapters
from kvstore.adapters.protocol import AdapterStore
from kvstore.adapters.redis import RedisAdapters

__all__ = ["AdapterStore", "MemoryAdapters", "RedisAdapters"]

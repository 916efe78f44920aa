"""Registry of LoRA adapters: which names are served with which weights. Starts at `protocol`; needs no torch.

A router writes the registry when an operator adds or removes an adapter. Each router keeps a copy up to date and serves
from it. Redis stores the registry (`redis`, `codec`); tests keep it in memory (`memory`).
"""

from kvstore.adapters.memory import MemoryAdapters
from kvstore.adapters.protocol import AdapterStore
from kvstore.adapters.redis import RedisAdapters

__all__ = ["AdapterStore", "MemoryAdapters", "RedisAdapters"]

"""What an engine needs of a model: execute one batch over a KV cache."""

from __future__ import annotations

from typing import Protocol

from baton.engine.kv_cache import KVCache
from baton.engine.scheduler import Batch


class Runner(Protocol):
    """A model bound to a KV cache. Two exist: `TransformersRunner` and `ArithmeticRunner`."""

    cache: KVCache
    max_model_len: int
    """Longest sequence the model and the cache can hold, in tokens."""
    eos_token_ids: frozenset[int]

    def execute(self, batch: Batch) -> list[int]:
        """Computes a batch: writes its KV into the cache and samples.

        Called from one thread at a time, never the event loop's.

        Returns:
            One token id for every part with `sample`, in batch order.
        """
        ...

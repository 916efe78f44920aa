"""What an engine needs of a model: execute one batch over a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from baton.engine.core.scheduler import Batch
from baton.engine.model.kv_cache import KVCache

Fence = torch.cuda.Event
"""Recorded on the stream that computes: a reader makes its own stream wait for it. On a CPU there is none."""
LayerDone = Callable[[int, Fence | None], None]
"""Told a model layer's index when K and V of that layer, for all tokens of the batch, are in all ranks' caches."""


def ignore_layer(layer: int, fence: Fence | None) -> None:
    """The `LayerDone` of a caller who only wants the whole step."""


class Runner(Protocol):
    """A model bound to a KV cache. Two exist: `TransformersRunner` and `ArithmeticRunner`."""

    cache: KVCache
    """Rank 0's, which the engine's own process computes with; the others' are of the same shape."""
    max_model_len: int
    """Longest sequence the model and the cache can hold, in tokens."""
    vocab_size: int
    """Rows of the embedding: a token id is less."""
    eos_token_ids: frozenset[int]

    @property
    def caches(self) -> Sequence[KVCache]:
        """All ranks', each with its part of the heads; block ids mean the same in all of them."""
        ...

    def execute(self, batch: Batch, layer_done: LayerDone = ignore_layer) -> list[int]:
        """Computes a batch: writes its KV into the caches and samples.

        Called from one thread at a time, never the event loop's. `layer_done` is called in that thread, once a layer,
        in rising order. On return all KV and states are in the caches, also for readers that wait for no fence.

        Returns:
            One token id for every part with `sample`, in batch order.
        """
        ...

    def close(self) -> None:
        """Ends the processes that it has started. No step runs, and none comes."""
        ...

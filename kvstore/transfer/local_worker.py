"""Identity, caches and address that this worker presents in its KV transfers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.transfer.protocol.plan import layout_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from baton.config import TestingConfig
    from baton.kv_layout import KvLayout
    from baton.tls import Tls
    from baton.trust import KeyFile
    from kvstore.transfer.copy.blocks import RankCache


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWorker:
    """One worker process: its identity, its caches and its address."""

    worker_id: str
    incarnation: str
    """Id of this start of the process; a ticket names the incarnation that issued it."""
    caches: Sequence[RankCache]
    """One cache per rank; block ids mean the same on all of them."""
    wire_compat: str
    """Kind of KV; only workers of the same kind connect."""
    host: str
    """Address on which peers reach this worker's transports."""
    testing: TestingConfig
    """Faults of its transfers, if the project's own tests inject any."""
    tls: Tls | None = None
    """Certificates that this worker presents to other members; None: all connections are plain text."""
    keys: KeyFile | None = None
    """Keys that prove this worker's identity to peers; None: the cluster has no secret."""
    num_kv_heads: Sequence[int] = ()
    """KV heads of the whole model, one number per layer group; required if there are more ranks than heads."""

    @property
    def devices(self) -> list[torch.device]:
        """Devices of the caches, one per rank."""
        return [cache.device for cache in self.caches]

    @property
    def max_tokens(self) -> int:
        """Length in tokens of the longest sequence that the blocks of every group can hold."""
        cache = self.caches[0]
        return min(n * g.block_size for n, g in zip(cache.table_sizes, cache.spec.groups, strict=False))

    def layout(self) -> KvLayout:
        """Return the layout of the KV in the caches."""
        return layout_of(self.caches[0].spec, len(self.caches), self.num_kv_heads)

"""The part of a worker that the RPC handlers of both roles use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import WorkerDraining

if TYPE_CHECKING:
    from engine.core.serving import ServingEngine
    from kvstore.transfer.endpoint import KvEndpoint


@dataclass(slots=True)
class WorkerContext:
    """One worker, as the handlers of its role see it. The worker's member updates `is_draining`."""

    worker_id: str
    engine: ServingEngine
    kv: KvEndpoint
    is_draining: bool = False
    """True while the worker leaves its role; it takes no new work then."""

    def require_staying(self) -> None:
        """Raise WorkerDraining while the worker leaves its role."""
        if self.is_draining:
            raise WorkerDraining(f"{self.worker_id} takes no new work")

"""What the RPC handlers of both roles are given of their worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import WorkerDraining

if TYPE_CHECKING:
    from engine.core.serving import ServingEngine
    from kvstore.transfer.endpoint import KvEndpoint


@dataclass(slots=True)
class WorkerContext:
    """One worker, as the handlers of its role see it. Its member changes `is_draining`."""

    worker_id: str
    engine: ServingEngine
    kv: KvEndpoint
    is_draining: bool = False
    """Whether the worker leaves its role, and takes no new work."""

    def require_staying(self) -> None:
        """Raises WorkerDraining while the worker leaves its role."""
        if self.is_draining:
            raise WorkerDraining(f"{self.worker_id} takes no new work")

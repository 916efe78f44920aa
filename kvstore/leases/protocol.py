"""Registry of live processes, their roles, and the desired pool sizes.

A lease belongs to one incarnation of a worker id, named by its epoch. The highest epoch ever issued wins: it fences
older ones. If the store lost its data, the incarnation gets its lease back. If the lease expired, it does not: peers
have declared the incarnation dead, so the worker registers under a new epoch, and its old events are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.cluster import ControllerInfo, ModelAnnouncement, RouterInfo, Worker, WorkerInfo, WorkerLoad


class LeaseStore(Protocol):
    """Store of the registry.

    Every method raises `StoreUnavailable` when the store cannot be reached; its effect is then unknown.
    """

    async def acquire(self, worker_id: str, after: int | None = None) -> int:
        """Issue the epoch of a new incarnation, max(now in ms, last + 1), and fence every earlier one.

        The worker is listed after its first renewal.

        Args:
            after: the caller's own epoch, if its lease has expired.

        Raises:
            Fenced: an epoch newer than `after` was issued.
        """

    async def renew(self, info: WorkerInfo, load: WorkerLoad) -> bool:
        """Keep the lease of `info.epoch` and the worker's blocks in the index alive, and publish both arguments.

        Returns:
            False if the epoch has ended: the lease has expired, or the clock was set back, so that new stamps would be
            below earlier ones. Nothing was changed, and the caller must call `acquire`.

        Raises:
            Fenced: a newer epoch was issued.
        """

    async def release(self, worker_id: str, epoch: int) -> None:
        """End the lease and remove the blocks of this epoch. A newer incarnation is not affected."""

    async def list_workers(self) -> list[Worker]:
        """Return the live workers, sorted by id."""

    async def list_leases(self) -> dict[str, Worker | None]:
        """Return the live workers by id; None for a lease that cannot be read, for example one of another release."""

    async def announce_controller(self, info: ControllerInfo) -> None:
        """Register the controller for the duration of a lease."""

    async def get_controller(self) -> ControllerInfo | None:
        """Return the controller; None if none is alive."""

    async def set_desired(self, sizes: Mapping[str, int]) -> None:
        """Store a copy of the desired pool sizes. Their owner writes them again when `boot` has changed."""

    async def get_desired(self) -> dict[str, int]:
        """Return the desired pool sizes; empty if there are none."""

    async def boot(self) -> str:
        """Return a token that changes whenever the store starts without its state."""

    async def close(self) -> None:
        """Close the store."""


class EndpointStore(Protocol):
    """Store of what the models of one endpoint share: the routers, and the models themselves.

    Every method raises `StoreUnavailable` when the store cannot be reached; its effect is then unknown.
    """

    async def announce_router(self, info: RouterInfo) -> None:
        """List the router for the duration of a lease."""

    async def list_routers(self) -> list[RouterInfo]:
        """Return the live routers, sorted by id."""

    async def announce_model(self, model: ModelAnnouncement) -> None:
        """List the model for `MODEL_LEASE_S`."""

    async def list_models(self) -> list[ModelAnnouncement]:
        """Return the announced models, sorted by content id; at most `MAX_MODELS`."""

    async def boot(self) -> str:
        """Return a token that changes whenever the store starts without its state."""

    async def close(self) -> None:
        """Close the store."""


MODEL_LEASE_S = 60.0
"""Time for which an announcement lists a model. It is longer than the restart of a controller."""
MAX_MODELS = 1024
"""Maximum number of models that a reader accepts."""

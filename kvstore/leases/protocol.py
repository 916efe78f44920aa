"""The registry: who is alive, in which role, and the desired pool sizes.

A lease belongs to one incarnation of a worker id, named by its epoch. The highest epoch ever issued wins: it fences
older ones. If the store lost its data, the incarnation gets its lease back. If the lease expired, it does not: peers
have declared it dead, so the worker registers under a new epoch, and its old events are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.cluster import ControllerInfo, RouterInfo, Worker, WorkerInfo, WorkerLoad


class LeaseStore(Protocol):
    """The store of the registry.

    Every method raises `StoreUnavailable` when the store cannot be reached; whether it had an effect is unknown then.
    """

    async def acquire(self, worker_id: str, after: int | None = None) -> int:
        """Issues the epoch of a new incarnation, max(now in ms, last + 1), and fences every earlier one.

        The worker is listed once it has renewed.

        Args:
            after: the caller's own epoch, whose lease has expired.

        Raises:
            Fenced: an epoch newer than `after` was issued.
        """

    async def renew(self, info: WorkerInfo, load: WorkerLoad) -> bool:
        """Keeps the lease of `info.epoch`, and the worker's blocks in the index, alive; publishes both arguments.

        Returns:
            False when the epoch is over: the lease has expired, or the clock was set back, and stamps of the present
            would be below its earlier ones. Nothing changed, and only `acquire` helps.

        Raises:
            Fenced: a newer epoch was issued.
        """

    async def release(self, worker_id: str, epoch: int) -> None:
        """Ends the lease and removes the blocks of this epoch. No effect on a newer incarnation."""

    async def list_workers(self) -> list[Worker]:
        """Returns the live workers, sorted by id."""

    async def list_leases(self) -> dict[str, Worker | None]:
        """Returns the live workers by id; None for a lease that cannot be read, perhaps of another release."""

    async def announce_router(self, info: RouterInfo) -> None:
        """Lists the router for the length of a lease."""

    async def list_routers(self) -> list[RouterInfo]:
        """Returns the live routers, sorted by id."""

    async def announce_controller(self, info: ControllerInfo) -> None:
        """Names the controller for the length of a lease."""

    async def get_controller(self) -> ControllerInfo | None:
        """Returns the controller; None if none is alive."""

    async def set_desired(self, sizes: Mapping[str, int]) -> None:
        """Stores a copy of the desired pool sizes. Their owner writes it again when `boot` has changed."""

    async def get_desired(self) -> dict[str, int]:
        """Returns the desired pool sizes; empty if there are none."""

    async def boot(self) -> str:
        """Returns a token that changes whenever the store starts without its state."""

    async def close(self) -> None:
        """Closes the store."""

"""The registry: who is alive, as what, and how many there should be.

A lease belongs to one incarnation of a worker id, named by its epoch. The highest epoch ever given out wins: it fences
older ones off. It has its lease back after the store lost its state. After a lease that merely expired it has not: the
others have written that incarnation off, so the worker goes on under a new epoch, and what the old one said counts no
more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.cluster import ControllerInfo, RouterInfo, Worker, WorkerInfo, WorkerLoad


class LeaseStore(Protocol):
    """Every method raises `StoreUnavailable` when the store cannot be reached; what it did until then is unknown."""

    async def acquire(self, worker_id: str, after: int | None = None) -> int:
        """The epoch of a new incarnation: max(now in ms, last + 1). Fences every earlier one off.

        The worker is listed once it has renewed.

        Args:
            after: the caller's own epoch, whose lease has expired.

        Raises:
            Fenced: an epoch newer than `after` was given out.
        """

    async def renew(self, info: WorkerInfo, load: WorkerLoad) -> bool:
        """Keeps the lease of `info.epoch`, and the worker's blocks in the index, alive; publishes both arguments.

        Returns:
            False when the lease has expired: nothing changed, and only `acquire` helps.

        Raises:
            Fenced: a newer epoch was given out.
        """

    async def release(self, worker_id: str, epoch: int) -> None:
        """Ends the lease and forgets the blocks of this epoch. A newer incarnation is left alone."""

    async def list_workers(self) -> list[Worker]:
        """The live workers, by id."""

    async def list_leases(self) -> dict[str, Worker | None]:
        """The live workers, by id. None: one whose lease cannot be read; its owner may be of another release."""

    async def announce_router(self, info: RouterInfo) -> None:
        """Lists the router for the length of a lease."""

    async def list_routers(self) -> list[RouterInfo]:
        """The live routers, by id."""

    async def announce_controller(self, info: ControllerInfo) -> None:
        """Names the controller for the length of a lease."""

    async def get_controller(self) -> ControllerInfo | None:
        """None: no controller is alive."""

    async def set_desired(self, sizes: Mapping[str, int]) -> None:
        """A copy of the desired pool sizes. Their owner writes it again when `boot` has changed."""

    async def get_desired(self) -> dict[str, int]:
        """Empty when nobody has written any."""

    async def boot(self) -> str:
        """A token that is drawn anew whenever the store starts without its state."""

    async def close(self) -> None: ...

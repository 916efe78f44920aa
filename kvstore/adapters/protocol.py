"""Interface of the registry of adapters, with one router's copy of it.

The registry is one value. A router that changes it replaces the whole value, but only if no other router has replaced
it since it was read. So all routers see the same changes in the same order, and no concurrent change is lost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from baton.registered_adapters import Adapters, RegisteredAdapter

MAX_TRIES = 10
"""Maximum number of attempts at a change. An attempt fails if another router changes the registry meanwhile."""


class AdapterStore(Protocol):
    """Store of the registry. `put`, `remove` and `follow` raise `StoreUnavailable` if the store cannot be reached."""

    @property
    def adapters(self) -> Adapters:
        """This router's copy, as of the latest successful call. Each change creates a new mapping."""

    async def follow(self) -> None:
        """Bring the copy up to date. If the store has lost the registry, write the copy back."""

    async def put(self, adapter: RegisteredAdapter) -> bool:
        """Register an adapter, or replace the one with the same name.

        Returns:
            Whether an adapter had this name.

        Raises:
            Conflict: there are too many adapters, the registry would be too large or changes too often, or a newer
                release wrote it.
        """

    async def remove(self, name: str) -> bool:
        """Remove an adapter.

        Returns:
            Whether an adapter had this name.

        Raises:
            Conflict: see `put`.
        """

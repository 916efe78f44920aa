"""Registry of adapters, with one router's copy of it.

The registry is one value: each change replaces it as a whole, only if nobody else has replaced it since it was read. So
all routers see the same changes in the same order, and no adapter is lost when two operators add one at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from baton.registered_adapters import Adapters, RegisteredAdapter

MAX_TRIES = 10
"""Attempts at a change, each after another router has changed the registry."""


class AdapterStore(Protocol):
    """Store of the registry. `put`, `remove` and `follow` raise `StoreUnavailable` if the store cannot be reached."""

    @property
    def adapters(self) -> Adapters:
        """The copy, as of the latest successful call. Each change makes a new mapping."""

    async def follow(self) -> None:
        """Bring the copy up to date. If the store has lost the registry, write the copy back."""

    async def put(self, adapter: RegisteredAdapter) -> bool:
        """Register an adapter, in place of one with the same name.

        Returns:
            Whether there was one with this name.

        Raises:
            Conflict: there are too many adapters, or the registry changes too often, or a newer release wrote it.
        """

    async def remove(self, name: str) -> bool:
        """Remove an adapter.

        Returns:
            Whether there was one with this name.

        Raises:
            Conflict: see `put`.
        """

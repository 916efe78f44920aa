"""Registry of adapters in memory. Several routers share one `MemoryStore`."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from baton.registered_adapters import NO_ADAPTERS, Adapters, RegisteredAdapter
from kvstore.adapters.codec import with_changed

if TYPE_CHECKING:
    from kvstore.index import MemoryStore


class MemoryAdapters:
    """An `AdapterStore` in a `MemoryStore`."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._adapters = NO_ADAPTERS

    @property
    def adapters(self) -> Adapters:
        return self._adapters

    async def follow(self) -> None:
        if self._store.adapters is None and self._adapters:
            self._store.adapters = self._adapters
        self._adapters = self._store.adapters if self._store.adapters is not None else NO_ADAPTERS

    async def put(self, adapter: RegisteredAdapter) -> bool:
        return await self._change(adapter.name, adapter)

    async def remove(self, name: str) -> bool:
        return await self._change(name, None)

    async def _change(self, name: str, adapter: RegisteredAdapter | None) -> bool:
        await self.follow()
        is_known = name in self._adapters
        self._store.adapters = self._adapters = MappingProxyType(with_changed(self._adapters, name, adapter))
        return is_known

"""Registry of adapters in Redis: one string without an expiry, which only routers write (`codec`).

A router accepts a stored value if a router has signed it and it is not older than the router's copy. If the value is
not signed, older or absent, the router writes its copy back. After the last adapter is removed the value is an empty
list, so an absent value means that Redis has lost its state.
"""

from __future__ import annotations

import asyncio
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from baton.errors import Conflict
from baton.registered_adapters import NO_ADAPTERS, Adapters, RegisteredAdapter
from kvstore.adapters.codec import HEAD_BYTES, MAX_BYTES, authentic, decode, encode, with_changed
from kvstore.adapters.protocol import MAX_TRIES
from kvstore.index.connection import RedisConnection, Script
from kvstore.index.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.trust import KeyFile

P = ParamSpec("P")
T = TypeVar("T")
LOOK = Script("kvstore.adapters", "look.lua")
SWAP = Script("kvstore.adapters", "swap.lua")
FEW = 500
"""Registries with fewer adapters are encoded and decoded on the event loop, in 2 ms; 10,000 adapters take 0.1 s."""
ENTRY_BYTES = 160
"""Approximate size of an adapter's entry, in bytes."""
WHOLE_S = 30.0
"""Time after which the whole value is read even if its head is unchanged: the rest may have been altered."""


async def _aside(num_adapters: int, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Run `work` at once, or in a thread if it would block the event loop for several milliseconds."""
    return work(*args, **named) if num_adapters < FEW else await asyncio.to_thread(work, *args, **named)


class RedisAdapters:
    """`AdapterStore` in Redis. The caller owns and closes `connection`.

    Args:
        keys: the router's keys; None: nothing is signed, and every undamaged value is accepted.
        clock: wall time in seconds.
        monotonic_s: monotonic seconds.
    """

    def __init__(
        self,
        connection: RedisConnection,
        namespace: str,
        *,
        keys: KeyFile | None = None,
        clock: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()
        """Held by one call at a time. Otherwise a poll could read the value before a change and reject it as older."""
        self._key = Keys(namespace).adapters
        self._member = keys
        self._clock = clock
        self._monotonic_s = monotonic_s
        self._adapters = NO_ADAPTERS
        self._value = b""
        """The copy in its encoded form; empty: there is no copy yet."""
        self._seen = b""
        """Head of the stored value at the last read, or the reason why it cannot be read; empty: there was no value."""
        self._known = b""
        """Head of the accepted value, which is not read again while its head is unchanged; empty: none was accepted."""
        self._whole_until_s = 0.0
        self._is_newer = False
        """True if a router has signed the stored value, but this release cannot decode it."""

    @property
    def adapters(self) -> Adapters:
        return self._adapters

    async def follow(self) -> None:
        async with self._turn:
            await self._follow()

    async def _follow(self) -> None:
        now_s = self._monotonic_s()
        known = self._known if now_s < self._whole_until_s else b""
        seen, value = await self._connection.ask(LOOK, [self._key], known, MAX_BYTES, HEAD_BYTES)
        if seen and seen == known:
            return
        self._seen, self._known, self._is_newer = seen, b"", False
        if value is None and seen:
            self._connection.note(self._key, seen.decode(errors="replace"))
        elif value is not None and await self._adopts(value):
            self._known, self._whole_until_s = seen, now_s + WHOLE_S
            return
        if self._value and await self._swap(self._value):
            self._known = self._seen = self._value[:HEAD_BYTES]

    async def put(self, adapter: RegisteredAdapter) -> bool:
        return await self._change(adapter.name, adapter)

    async def remove(self, name: str) -> bool:
        return await self._change(name, None)

    async def _change(self, name: str, adapter: RegisteredAdapter | None) -> bool:
        async with self._turn:
            return await self._changed(name, adapter)

    async def _changed(self, name: str, adapter: RegisteredAdapter | None) -> bool:
        for _ in range(MAX_TRIES):
            await self._follow()
            if self._is_newer:
                raise Conflict("the registry of adapters is of a newer release; ask a router of that release")
            is_known = name in self._adapters
            if adapter is None and not is_known:
                return False
            changed = with_changed(self._adapters, name, adapter)
            stamp = max(int(self._clock() * 1000), int.from_bytes(self._value[:8]) + 1)
            value = await _aside(len(changed), encode, self._key, stamp, changed, self._member)
            if await self._swap(value):
                self._keep(value, changed)
                return is_known
        raise Conflict("the registry of adapters changes too often; try again")

    async def _adopts(self, value: bytes) -> bool:
        """Return whether a stored value is accepted: it is signed, and not older than the copy.

        If a router of a newer release wrote it, the copy stays unchanged.
        """
        if value == self._value:
            return True
        try:
            _, body = authentic(self._key, value, self._member)
            if value[:HEAD_BYTES] < self._value[:HEAD_BYTES]:
                raise ValueError("it is older than what was read there before")
        except ValueError as error:
            self._connection.note(self._key, error)
            return False
        try:
            self._keep(value, await _aside(len(value) // ENTRY_BYTES, decode, body))
        except ValueError as error:
            self._connection.note(self._key, error)
            self._is_newer = True
        return True

    def _keep(self, value: bytes, adapters: dict[str, RegisteredAdapter]) -> None:
        self._value = value
        self._known = self._seen = value[:HEAD_BYTES]
        self._adapters = MappingProxyType(adapters)

    async def _swap(self, value: bytes) -> bool:
        """Write a value if the stored one has not changed since it was last read. Return whether it was written."""
        (is_written,) = await self._connection.run(SWAP, [self._key], self._seen, value, HEAD_BYTES, MAX_BYTES)
        return bool(is_written)

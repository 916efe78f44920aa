"""The rendezvous of the two sides of a transport: keys and values that travel over the connection's control stream.

`set` becomes a message to the peer, and `get` waits for the peer's. There is no TCPStore, no port and no world.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store

from baton.errors import TransferError, TransferTimeout

OnSet = Callable[[str, bytes], None]
"""Sends a key and its value to the peer."""

_MAX_KEYS, _MAX_KEY_BYTES, _MAX_VALUE_BYTES = 1024, 512, 1024
"""Limits on what a peer may set, whatever the transport: more than any transport sets."""


class RendezvousStore(Store):
    """The rendezvous of one connection. Its owner keeps it alive as long as the transport: torch holds its C++ half.

    Args:
        on_set: called with each key and value that this side sets, on any thread.
        timeout_s: longest wait for one of the peer's keys.
    """

    def __init__(self, on_set: OnSet, timeout_s: float = 300.0) -> None:
        super().__init__()
        self._on_set = on_set
        self._longest_wait = timedelta(seconds=timeout_s)
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_well_formed: Callable[[str, bytes], bool] = _is_small
        self._failure = ""

    def expect(self, is_well_formed: Callable[[str, bytes], bool]) -> None:
        """Restricts what the peer may set, or may have set already.

        Anything else fails the rendezvous: every wait, now or later, raises TransferError, and the value reaches no
        library.
        """
        with self._changed:
            self._is_well_formed = is_well_formed
            for key, value in self._values.items():
                self._fail_unless_well_formed(key, value)

    def deliver(self, key: str, value: bytes) -> None:
        """Takes in a key that the peer set."""
        with self._changed:
            self._fail_unless_well_formed(key, value)
            if not self._failure:
                self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        """Fails every wait, now or later, with TransferError."""
        self._fail("the session ended while the transport was being opened")

    # Called by NCCL, from C++ and from threads of its own, and by the transports.

    def clone(self) -> RendezvousStore:
        return self

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._values[key] = data
            self._changed.notify_all()
        self._on_set(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key], self._longest_wait)
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=300)) -> None:
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._failure or all(key in self._values for key in keys), timeout.total_seconds()
            )
            if self._failure:
                raise TransferError(self._failure)
            if not arrived:
                raise TransferTimeout(f"the peer did not join the transport within {timeout.total_seconds():g} s")

    def _fail_unless_well_formed(self, key: str, value: bytes) -> None:
        is_known = key in self._values or len(self._values) < _MAX_KEYS
        if not (is_known and _is_small(key, value) and self._is_well_formed(key, value)):
            self._fail(
                f"the peer sent {len(value)} bytes as {key[:40]!r}, which no such transport sends while it opens, or "
                "they name another host than the peer's"
            )

    def _fail(self, why: str) -> None:
        """The first reason stands."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()


def _is_small(key: str, value: bytes) -> bool:
    return len(key) <= _MAX_KEY_BYTES and len(value) <= _MAX_VALUE_BYTES

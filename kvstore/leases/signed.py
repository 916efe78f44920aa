"""What members sign in the registry, and what is believed of what others have signed.

    lease        HASH, by a worker: `signature` of the lease's key, `epoch`, `stamp`, `info` and `load`
    claim        by a worker that has acquired its lease: the epoch and its signature
    router       stamp (8 bytes) | signature | JSON, by a router
    controller   the same, by the controller
    desired      field `signed`: the same, by the controller

Every signature covers the bytes as they lie there, and the name of their key with the content id in it: fields of a
later release are covered, and no value can stand for another one.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING

from baton.trust import Principal
from baton.trust.keys import SIGNATURE_BYTES
from kvstore.index.signed import Sight, SightBook, SignedValue, Stamps, packed
from kvstore.index.values import MAX_EPOCH, MAX_SEQ, natural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from baton.cluster import Worker
    from baton.trust import KeyFile

_HEAD = struct.Struct(f"<Q{SIGNATURE_BYTES}s")
HEAD_BYTES = _HEAD.size
"""Bytes that precede what was announced."""


class SignedRegistry:
    """Signs what this process writes to the registry, and checks what it reads there.

    Args:
        lease_s: time for which what was read counts, unless it is renewed.
        clock: wall time in seconds.
    """

    def __init__(
        self,
        keys: KeyFile,
        lease_s: float,
        clock: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stamps = Stamps(clock, monotonic_s)
        self._keys = keys
        self._sights = SightBook(keys, lease_s, clock, monotonic_s)
        self._holders: dict[str, str] = {}
        """Addresses -> workers that hold them, as of the latest look."""

    def lease(self, key: str, epoch: int, info: str, load: str) -> tuple[int, bytes]:
        """Returns the stamp and the signature of a renewal."""
        stamp = self.stamps.draw()
        return stamp, self._keys.keys.sign("value", packed(key, epoch, stamp, info, load))

    def announcement(self, key: str, body: str) -> bytes:
        """Returns a value with stamp and signature."""
        return self._stamped(key, body, self.stamps.draw())

    def lasting(self, key: str, body: str) -> bytes:
        """Returns a value that counts until the next one, whenever it was written: its stamp is above that of what was
        read there before, though an earlier process may have written it by a clock that was ahead.
        """
        return self._stamped(key, body, max(self.stamps.draw(), self._sights.stamp(key) + 1))

    def _stamped(self, key: str, body: str, stamp: int) -> bytes:
        return _HEAD.pack(stamp, self._keys.keys.sign("value", packed(key, stamp, body))) + body.encode()

    def seen_lease(self, key: str, lease: Sequence[bytes | None]) -> Sight:
        """Returns the sight of a lease.

        Args:
            lease: the fields epoch, info, load, stamp and signature, as they were found.

        Raises:
            ValueError: it is not signed by a worker, or is not the latest.
        """
        return self._sights.see(key, Principal.WORKER, _signed_lease(key, lease))

    def seen(self, key: str, author: Principal, found: bytes, *, must_be_timely: bool = True) -> tuple[Sight, bytes]:
        """Returns the sight of an announcement, and its body.

        Raises:
            ValueError: it is not signed by the author, or is not the latest.
        """
        if not isinstance(found, bytes) or len(found) < _HEAD.size:
            raise ValueError(f"it is not signed by a {author} of this cluster")
        stamp, signature = _HEAD.unpack_from(found)
        body = found[_HEAD.size :]
        value = SignedValue(0, stamp, packed(key, stamp, body), signature)
        return self._sights.see(key, author, value, must_be_timely=must_be_timely), body

    def last(self, key: str) -> Sight | None:
        """Returns what was believed of a key last, if it still counts."""
        return self._sights.last(key)

    def is_alive(self, sight: Sight) -> bool:
        """Whether the value was read first within the length of a lease."""
        return self._sights.is_alive(sight)

    def borrowed(self, workers: Mapping[str, Worker | None]) -> dict[str, str]:
        """Returns the workers that name the address of another live worker -> that worker's id.

        An address is the worker's who was seen with it first; at one look, of the elder epoch.
        """
        holders, self._holders = self._holders, {}
        known = {address: holder for address, holder in holders.items() if _address(workers, holder) == address}
        found = sorted((worker.info.epoch, worker.info.id) for worker in workers.values() if worker)
        for _, worker_id in found:
            address = _address(workers, worker_id)
            assert address is not None
            self._holders.setdefault(address, known.get(address, worker_id))
        return {
            worker_id: holder
            for _, worker_id in found
            if (holder := self._holders[_address(workers, worker_id) or ""]) != worker_id
        }


def _address(workers: Mapping[str, Worker | None], worker_id: str) -> str | None:
    worker = workers.get(worker_id)
    return worker.info.address if worker else None


def _signed_lease(key: str, lease: Sequence[bytes | None]) -> SignedValue:
    """Raises ValueError: the numbers of the lease are none."""
    epoch, info, load, stamp, signature = lease
    numbers = natural(epoch, MAX_EPOCH), natural(stamp or b"0", MAX_SEQ)
    return SignedValue(*numbers, packed(key, *numbers, info or b"", load or b""), signature or b"")

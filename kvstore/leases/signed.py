"""Signed values of the registry: what members sign, and the checks before a reader accepts a value.

    lease        HASH, by a worker: `signature` of the lease's key, `epoch`, `stamp`, `info` and `load`
    claim        by a worker that has acquired its lease: the epoch and its signature
    router       stamp (8 bytes) | signature | JSON, by a router
    controller   the same, by the controller
    desired      field `signed`: the same, by the controller

Every signature covers the stored bytes and the name of their key, which contains the content id. So fields of a later
release are covered, and no value can be used under another key.
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
"""Number of bytes that precede the announced JSON."""


class SignedRegistry:
    """Signer of the values that this process writes to the registry, and verifier of the values that it reads.

    Args:
        lease_s: time for which a value counts, unless it is renewed.
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
        """Addresses -> workers that hold them, as of the latest observation."""

    def lease(self, key: str, epoch: int, info: str, load: str) -> tuple[int, bytes]:
        """Return the stamp and the signature of a renewal."""
        stamp = self.stamps.draw()
        return stamp, self._keys.keys.sign("value", packed(key, epoch, stamp, info, load))

    def announcement(self, key: str, body: str) -> bytes:
        """Return a value with stamp and signature."""
        return self._stamped(key, body, self.stamps.draw())

    def lasting(self, key: str, body: str) -> bytes:
        """Return a value that counts until the next one is written, regardless of its age.

        Its stamp is above the stamp of the value that was read there before, even if an earlier process wrote that
        value with a clock that was ahead.
        """
        return self._stamped(key, body, max(self.stamps.draw(), self._sights.stamp(key) + 1))

    def _stamped(self, key: str, body: str, stamp: int) -> bytes:
        return _HEAD.pack(stamp, self._keys.keys.sign("value", packed(key, stamp, body))) + body.encode()

    def seen_lease(self, key: str, lease: Sequence[bytes | None]) -> Sight:
        """Return the observation of a lease.

        Args:
            lease: the fields epoch, info, load, stamp and signature, as found.

        Raises:
            ValueError: no worker has signed it, or it is not the latest.
        """
        return self._sights.see(key, Principal.WORKER, _signed_lease(key, lease))

    def seen(self, key: str, author: Principal, found: bytes, *, must_be_timely: bool = True) -> tuple[Sight, bytes]:
        """Return the observation of an announcement, and its body.

        Raises:
            ValueError: the author has not signed it, or it is not the latest.
        """
        if not isinstance(found, bytes) or len(found) < _HEAD.size:
            raise ValueError(f"it is not signed by a {author} of this cluster")
        stamp, signature = _HEAD.unpack_from(found)
        body = found[_HEAD.size :]
        value = SignedValue(0, stamp, packed(key, stamp, body), signature)
        return self._sights.see(key, author, value, must_be_timely=must_be_timely), body

    def last(self, key: str) -> Sight | None:
        """Return the last accepted value of a key, if it still counts."""
        return self._sights.last(key)

    def is_alive(self, sight: Sight) -> bool:
        """Return whether the value was first read within the duration of a lease."""
        return self._sights.is_alive(sight)

    def borrowed(self, workers: Mapping[str, Worker | None]) -> dict[str, str]:
        """Return the workers that name the address of another live worker -> that worker's id.

        An address belongs to the worker that was first observed with it; within one observation, to the older epoch.
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
    """Return a lease as a signed value; raises ValueError if its numbers cannot be read."""
    epoch, info, load, stamp, signature = lease
    numbers = natural(epoch, MAX_EPOCH), natural(stamp or b"0", MAX_SEQ)
    return SignedValue(*numbers, packed(key, *numbers, info or b"", load or b""), signature or b"")

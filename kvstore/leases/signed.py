"""Signed values of the registry: what members sign, and the checks before a reader accepts a value.

    lease        HASH, by a worker: `anchored`, its signature of the lease's key, `epoch`, `since`, `info`, `load` and
                 the anchor of a chain; `renewal`: a link of that chain (`chain.py`). While the signed values do not
                 change, the worker renews the lease by later links, and readers verify no signature.
                 `signature` of the same, with `stamp` in place of `since` and the anchor, is new in each renewal: for
                 readers of a release that knows no chains. Leases of such a release have nothing else
    claim        by a worker that has acquired its lease: the epoch and its signature
    router       stamp (8 bytes) | signature | JSON, by a router
    controller   the same, by the controller
    model        the same, by the model's controller
    desired      field `signed`: the same, by the controller

Every signature covers the stored bytes and the name of their key, which contains the content id, or the endpoint's name
for routers and models. So fields of a later release are covered, and no value can be used under another key.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baton.trust import Principal
from baton.trust.keys import SIGNATURE_BYTES
from kvstore.index.signed import Sight, SightBook, SignedValue, Stamps, packed
from kvstore.index.values import MAX_EPOCH, MAX_SEQ, natural
from kvstore.leases.chain import NUM_SLOTS, SLOT_MS, Chain, Renewal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from baton.cluster import Worker
    from baton.trust import KeyFile, KeyRing

_HEAD = struct.Struct(f"<Q{SIGNATURE_BYTES}s")
HEAD_BYTES = _HEAD.size
"""Number of bytes that precede the announced JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseProof:
    """The fields of a lease that prove who has written it and when."""

    stamp: int
    """Time of the renewal, in ms."""
    signature: bytes
    since: int
    """Time of the signature with the anchor, in ms."""
    anchored: bytes
    renewal: bytes


@dataclass(slots=True)
class _Written:
    """A lease that this process has signed."""

    parts: tuple[int, str, str]
    """Epoch, description and load."""
    proof: LeaseProof
    chain: Chain
    ring: KeyRing
    """The keys of the signature."""


@dataclass(slots=True)
class _Read:
    """A lease of which this process has verified the signature."""

    version: str
    """EPOCH/SINCE."""
    since: int
    renewal: Renewal
    """The latest link that was verified."""


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
        self._written: dict[str, _Written] = {}
        self._leases: dict[str, _Read] = {}

    def lease(self, key: str, epoch: int, info: str, load: str) -> LeaseProof:
        """Return the proof of a lease that is signed now."""
        stamp, chain, ring = self.stamps.draw(), Chain(), self._keys.keys
        signature = ring.sign("value", packed(key, epoch, stamp, info, load))
        anchored = ring.sign("value", packed(key, epoch, stamp, info, load, chain.anchor))
        renewal = chain.reveal(0).pack()
        proof = LeaseProof(stamp=stamp, signature=signature, since=stamp, anchored=anchored, renewal=renewal)
        self._written[key] = _Written((epoch, info, load), proof, chain, ring)
        return proof

    def renewed(self, key: str, epoch: int, info: str, load: str) -> LeaseProof:
        """Return the proof of a renewal, with a new chain if something has changed or the chain has no new link."""
        last = self._written.get(key)
        if last is None or last.parts != (epoch, info, load) or last.ring is not self._keys.keys:
            return self.lease(key, epoch, info, load)
        stamp, proof = self.stamps.draw(), last.proof
        slot = (stamp - proof.since) // SLOT_MS
        if not Renewal.unpack(proof.renewal).slot < slot < NUM_SLOTS:
            return self.lease(key, epoch, info, load)
        signature = last.ring.sign("value", packed(key, epoch, stamp, info, load))
        renewal = last.chain.reveal(slot).pack()
        last.proof = replace(proof, stamp=stamp, signature=signature, renewal=renewal)
        return last.proof

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

    def version(self, key: str) -> str:
        """Return EPOCH/SINCE of the lease that was accepted last; empty if it must be read again as a whole."""
        known = self._leases.get(key)
        return "" if known is None else known.version

    def seen_lease(self, key: str, lease: Sequence[bytes | None]) -> Sight:
        """Return the observation of a lease.

        Args:
            lease: the fields epoch, since, renewal, info, load, anchored, stamp and signature, as found; or, if its
                epoch and `since` are those of `version`, its renewal alone.

        Raises:
            ValueError: no worker has signed or renewed it, or it is not the latest.
        """
        known = self._leases.pop(key, None)
        read: _Read | None
        if len(lease) == 1:
            if known is None:
                raise ValueError("it renews nothing that is known")
            read = self._renewal(known, lease[0])
            sight = self._sights.renew(key, Principal.WORKER, _renewed_at(read))
        else:
            read, value = _signed_lease(key, lease)
            sight = self._sights.see(key, Principal.WORKER, value)
        if read is not None:
            self._leases[key] = read
        return sight

    def forget_all_but(self, keys: Collection[str]) -> None:
        """Forget the leases of workers that have left."""
        if len(self._leases) > len(keys):
            self._leases = {key: read for key, read in self._leases.items() if key in keys}

    @staticmethod
    def _renewal(known: _Read, found: bytes | None) -> _Read:
        """Return the lease with a later link; raises ValueError if the link is not of its chain."""
        renewal, last = Renewal.unpack(found), known.renewal
        if renewal.slot <= last.slot:
            return known
        if renewal.back_to(last.slot) != last.link:
            raise ValueError("its renewal is not of the chain that its worker has signed")
        return _Read(known.version, known.since, renewal)

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


def _renewed_at(read: _Read) -> int:
    """Return the time of the latest renewal, in ms."""
    return read.since + read.renewal.slot * SLOT_MS


def _signed_lease(key: str, lease: Sequence[bytes | None]) -> tuple[_Read | None, SignedValue]:
    """Return a lease as a signed value, and its chain if it has one; raises ValueError if it cannot be read."""
    found_epoch, found_since, renewal, info, load, anchored, found_stamp, signature = lease
    epoch, values = natural(found_epoch, MAX_EPOCH), (info or b"", load or b"")
    if found_since is None and renewal is None and anchored is None:  # of a release that knows no chains
        stamp = natural(found_stamp or b"0", MAX_SEQ)
        return None, SignedValue(epoch, stamp, packed(key, epoch, stamp, *values), signature or b"")
    since = natural(found_since, MAX_SEQ)
    read = _Read(f"{epoch}/{since}", since, Renewal.unpack(renewal))
    message = packed(key, epoch, since, *values, read.renewal.back_to(0))
    return read, SignedValue(epoch, _renewed_at(read), message, anchored or b"")

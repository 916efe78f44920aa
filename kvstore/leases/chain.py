"""Hash chains with which a worker renews a lease that it has signed once (Lamport, 1981).

    link_n = hash(link_n+1);  link_0, the anchor, is part of the signed lease

The worker draws the last link at random and reveals link n in slot n: `n * SLOT_MS` after the stamp of its signature.
Who knows link n can compute the links before it, and none after it. So a link proves that the worker renewed the lease
in that slot or later, readers verify it with a few hashes, and, unlike with a shared key, no reader can renew it.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import NamedTuple

SLOT_MS = 500
"""Time between two links."""
NUM_SLOTS = 128
"""Links of one chain; after 64 s the lease is signed again."""
LINK_BYTES = 32
_RENEWAL = struct.Struct(f"<I{LINK_BYTES}s")
RENEWAL_BYTES = _RENEWAL.size


class Renewal(NamedTuple):
    """A revealed link."""

    slot: int
    link: bytes

    @classmethod
    def unpack(cls, found: bytes | None) -> Renewal:
        """Decode the field `renewal` of a lease; raises ValueError."""
        if not isinstance(found, bytes) or len(found) != RENEWAL_BYTES:
            raise ValueError("it is not signed by a worker of this cluster: it has no link of a renewal")
        renewal = cls(*_RENEWAL.unpack(found))
        if renewal.slot >= NUM_SLOTS:
            raise ValueError(f"its renewal is of slot {renewal.slot}, and a chain has {NUM_SLOTS}")
        return renewal

    def pack(self) -> bytes:
        """Return the field `renewal` of a lease."""
        return _RENEWAL.pack(self.slot, self.link)

    def back_to(self, slot: int) -> bytes:
        """Return the link of an earlier slot that leads to this one."""
        link = self.link
        for _ in range(self.slot - slot):
            link = _before(link)
        return link


class Chain:
    """A worker's links of one signature."""

    def __init__(self) -> None:
        links = [os.urandom(LINK_BYTES)]
        for _ in range(NUM_SLOTS - 1):
            links.append(_before(links[-1]))
        self._links = links[::-1]

    @property
    def anchor(self) -> bytes:
        """The link of slot 0, which the worker signs."""
        return self._links[0]

    def reveal(self, slot: int) -> Renewal:
        """Return the renewal of a slot below `NUM_SLOTS`. The caller must not reveal a slot of the future."""
        return Renewal(slot, self._links[slot])


def _before(link: bytes) -> bytes:
    return hashlib.blake2b(link, digest_size=LINK_BYTES, person=b"baton renewal").digest()

"""Signatures of a worker's events and of its set, so that no other process can claim blocks for it.

    link_n  = hash of message_n
    message = key of the stream, worker, epoch, seq, hash of (op, keys, link of the previous event), number of entries
    in
              the set after it, their sum
    proof   = link of the previous event (32) | number (8) | sum (32) | signature of the message    in the stream
    load    = link of the previous event (32) | the worker's load. Its hash takes the place of that link in the two
              lines above, so that readers which know no loads verify the event as any other
    seal    = seq (8) | hash of the change (32) | number (8) | sum (32) | signature of the message  next to the set

An event names the previous one by its link, so the signature of the last of several consecutive events that were read
at once proves them all. The same event cannot be applied twice, since readers count seqs, nor as another worker's.

A set is too large to be hashed with each event. Its sum is that of its entries' hashes of 4096 bits, modulo 2^4096,
which can be updated with each change. Finding other entries with the same sum takes more than 2^100 steps, also by
generalized birthdays (Wagner 2002).
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baton.tasks import paced
from baton.trust import Principal
from baton.trust.keys import SIGNATURE_BYTES
from kvstore.index.events import BlockEvent, Op
from kvstore.index.signed import packed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from baton.trust import KeyFile

HASH_BYTES = 32
NO_LINK = bytes(HASH_BYTES)
_SUM_BYTES = 512
_SUM_MODULUS = 1 << (8 * _SUM_BYTES)
_UNKNOWN = -1
"""Number of entries if the worker does not know the contents of its set."""
_PROOF = struct.Struct(f"<{HASH_BYTES}sq{HASH_BYTES}s{SIGNATURE_BYTES}s")
_SEAL = struct.Struct(f"<Q{HASH_BYTES}sq{HASH_BYTES}s{SIGNATURE_BYTES}s")
SEAL_BYTES = _SEAL.size
SLICE = 500
"""Entries that are summed before other tasks run."""


@dataclass(frozen=True, slots=True)
class EventProof:
    """Signed data that is stored for an event."""

    event: bytes
    """The part that is stored in the stream."""
    load: bytes
    """The load with its link, stored in the stream as well; empty: the event reports none."""
    seal: bytes
    """The part that is stored next to the set."""


@dataclass(frozen=True, slots=True)
class SealedSet:
    """Signed state of a worker's set."""

    seq: int
    num_entries: int | None
    """None: the worker does not know its set."""
    digest: bytes
    """Hash of the sum of its entries."""


class EventAuthor:
    """Signer of the events of one epoch of one worker, which also tracks the set.

    Args:
        stream: the key of the stream.
    """

    def __init__(self, keys: KeyFile, stream: str, worker_id: str, epoch: int) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self._keys = keys
        self._stream = stream
        self._link = NO_LINK
        self.highest = 0
        """Highest seq that was signed."""
        self._entries: set[bytes] | None = set()
        """None: an event may or may not have been applied, and the set is unknown until a snapshot is complete."""
        self._sum = 0
        self._parts: set[bytes] = set()
        self._parts_sum = 0

    def sign(self, event: BlockEvent) -> EventProof:
        """Return the proof of the next event, and count it as applied."""
        self._change(event)
        self.highest = max(self.highest, event.seq)
        count, digest = _UNKNOWN, NO_LINK
        if self._entries is not None:
            count, digest = len(self._entries), _sum_digest(self._sum)
        load = linked_load(event.load, self._link)
        before = _hash(load) if load else self._link
        change = _change_of(event, before)
        message = _message(self._stream, _position(event), change, count, digest)
        signature = self._keys.keys.sign("event", message)
        proof = _PROOF.pack(before, count, digest, signature)
        self._link = _hash(message)
        return EventProof(proof, load, _SEAL.pack(event.seq, change, count, digest, signature))

    @property
    def num_entries(self) -> int | None:
        """Number of entries in the set; None if it is unknown."""
        return None if self._entries is None else len(self._entries)

    def lose(self) -> None:
        """Note that the latest event was not, or perhaps not, applied."""
        self._entries = None

    def _change(self, event: BlockEvent) -> None:
        match event.op:
            case Op.SNAPSHOT_BEGIN:
                self._parts, self._parts_sum = set(), 0
            case Op.SNAPSHOT_PART:
                new = set(event.entries) - self._parts
                self._parts |= new
                self._parts_sum += sum(map(_summand, new))
            case Op.SNAPSHOT_END:
                self._entries, self._sum = self._parts, self._parts_sum
                self._parts = set()
            case _ if self._entries is None:
                pass
            case Op.STORED:
                new = set(event.entries) - self._entries
                self._entries |= new
                self._sum += sum(map(_summand, new))
            case Op.REMOVED:
                gone = self._entries.intersection(event.entries)
                self._entries -= gone
                self._sum -= sum(map(_summand, gone))
            case Op.CLEARED:
                self._entries, self._sum = set(), 0


class EventReader:
    """Verifier of events and sets against the workers' signatures.

    Args:
        stream: the key of the stream.
    """

    def __init__(self, keys: KeyFile, stream: str) -> None:
        self._keys = keys
        self._stream = stream
        self._latest: dict[str, tuple[int, int]] = {}
        """Epoch and seq of the latest proved event of each worker."""

    async def proved(self, events: Sequence[tuple[BlockEvent, bytes, bytes]]) -> list[BlockEvent | None]:
        """Return the authentic events, with None in place of the others; a run of them costs one verification.

        Args:
            events: each with its proof, and its load with the link, as found.
        """
        links: dict[tuple[str, int], bytes] = {}
        found: list[BlockEvent | None] = []
        async for event, proof, load in paced(reversed(events)):
            who = (event.worker_id, event.epoch)
            link = self._link_of(event, proof, links.get(who))
            if link is None:
                found.append(None)
                continue
            is_loaded = bool(load) and _hash(load) == link
            links[who] = load[:HASH_BYTES] if is_loaded else link
            self._note(event.worker_id, event.epoch, event.seq)
            found.append(event if is_loaded or not event.load else replace(event, load=b""))
        return found[::-1]

    def position(self, worker_id: str) -> tuple[int, int]:
        """Return the epoch and seq of a worker's latest proved event."""
        return self._latest.get(worker_id, (0, 0))

    def sealed(self, worker_id: str, epoch: int, seal: bytes, *, known: tuple[int, int]) -> SealedSet:
        """Return the signed state of a worker's set.

        Args:
            known: the worker's position when the read started; events may have been proved during it.

        Raises:
            ValueError: the worker has not signed the seal, or has signed a later one.
        """
        if len(seal) != _SEAL.size:
            raise ValueError("nothing is signed of it")
        seq: int
        seq, change, count, digest, signature = _SEAL.unpack(seal)
        message = _message(self._stream, (worker_id, epoch, seq), change, count, digest)
        if not self._keys.verify("event", Principal.WORKER, message, signature):
            raise ValueError("it is not signed by a worker of this cluster")
        if (epoch, seq) < known:
            raise ValueError("it is older than what was read before")
        self._note(worker_id, epoch, seq)
        return SealedSet(seq, None if count == _UNKNOWN else count, digest)

    async def check_entries(self, sealed: SealedSet, entries: Collection[bytes]) -> None:
        """Raise ValueError if the entries are not those that the worker has signed."""
        if sealed.num_entries != len(entries) or sealed.digest != _sum_digest(await _sum_of(entries)):
            raise ValueError("its entries are others than its worker has signed")

    def latest(self, worker_id: str, epoch: int) -> int:
        """Return the seq of the latest proved event of a worker's epoch; 0 if there is none."""
        known = self._latest.get(worker_id)
        return known[1] if known is not None and known[0] == epoch else 0

    def _link_of(self, event: BlockEvent, proof: bytes, expected: bytes | None) -> bytes | None:
        """Return the link to the previous event, or the hash of the load, if this one is authentic.

        Args:
            expected: the link of this event, as a later one names it.
        """
        if len(proof) != _PROOF.size:
            return None
        before, count, digest, signature = _PROOF.unpack(proof)
        change = _change_of(event, before)
        message = _message(self._stream, _position(event), change, count, digest)
        if expected is not None and _hash(message) == expected:
            return bytes(before)
        is_signed = self._keys.verify("event", Principal.WORKER, message, signature)
        return bytes(before) if is_signed else None

    def _note(self, worker_id: str, epoch: int, seq: int) -> None:
        self._latest[worker_id] = max(self._latest.get(worker_id, (0, 0)), (epoch, seq))


def linked_load(load: bytes, link: bytes = NO_LINK) -> bytes:
    """Return a load as it is stored in the stream; empty if there is none."""
    return link + load if load else b""


def _change_of(event: BlockEvent, link: bytes) -> bytes:
    entries = b"".join(event.entries)
    return _hash(packed(event.op, event.num_keys or len(event.keys), event.tier, entries, link))


def _position(event: BlockEvent) -> tuple[str, int, int]:
    return event.worker_id, event.epoch, event.seq


def _message(stream: str, position: tuple[str, int, int], change: bytes, count: int, digest: bytes) -> bytes:
    return packed(stream, *position, change, count, digest)


def _hash(message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=HASH_BYTES).digest()


def _summand(entry: bytes) -> int:
    return int.from_bytes(hashlib.shake_128(entry).digest(_SUM_BYTES), "little")


def _sum_digest(total: int) -> bytes:
    return _hash((total % _SUM_MODULUS).to_bytes(_SUM_BYTES, "little"))


async def _sum_of(entries: Iterable[bytes]) -> int:
    total = 0
    for number, entry in enumerate(entries, 1):
        total += _summand(entry)
        if not number % SLICE:
            await asyncio.sleep(0)
    return total

"""A router's local copy of the index.

One dict maps an entry (a block key and its tier, see `Tier`) to an int with one bit for every worker that owns it, so a
lookup is one AND per block. An operation on a whole worker costs O(1): its death masks a bit; a clear, a snapshot or a
new epoch gives it a fresh bit and leaves the old one to `sweep`.

    owners   {key: 0b0110, ...}      keys 1 and 2 of some worker
    alive    0b0010                  bits that lookups see
    retired  0b1000                  bits of the past, not yet swept from `owners`

A common block, such as one of a shared system prompt, may have thousands of owners. So a lookup that finds many owners
names none of them: it returns the masks (`Owners`), from which the caller asks for the workers that it examines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice
from typing import TYPE_CHECKING

from kvstore.index.events import Op, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.index.events import BlockEvent


SLICE = 1024
"""Keys of a set that are processed before other tasks run."""
FEW_OWNERS = 128
"""Number of workers beyond which a lookup names none."""


class Applied(Enum):
    """Outcome of an event in the mirror."""

    DONE = auto()
    STALE = auto()
    """The event was applied before, or its epoch has ended."""
    GAP = auto()
    """An earlier event was missed; nothing changed. Only `replacing` lets this worker continue."""


@dataclass(slots=True, kw_only=True)
class _Owner:
    worker_id: str
    epoch: int
    bit: int
    seq: int = 0
    parts: int = 0
    """Bit of an unfinished snapshot; 0 if there is none."""
    num_keys: dict[int, int] = field(default_factory=dict)
    """Number of keys of `bit` and of `parts`."""
    leased: bool = True


class Owners(Mapping[str, int]):
    """Result of a lookup with many owners: worker -> number of leading keys that it owns.

    A worker costs time only when it is asked for. Valid until the mirror changes.

    Args:
        levels: numbers of keys, ascending, with the mask of the workers that own so many or more.
        workers: worker of each bit.
        bits: bit of each live worker.
    """

    def __init__(
        self, levels: Sequence[tuple[int, int]], workers: Mapping[int, str], bits: Callable[[str], int]
    ) -> None:
        self._levels = levels
        self._workers = workers
        self._bit_of = bits

    def __getitem__(self, worker_id: str) -> int:
        if number := self.number(worker_id):
            return number
        raise KeyError(worker_id)

    def number(self, worker_id: str) -> int:
        """Return how many leading keys a worker owns, by binary search: the masks are nested."""
        levels, bit = self._levels, self._bit_of(worker_id)
        num_levels = bisect_left(levels, True, key=lambda level: not level[1] & bit)
        return levels[num_levels - 1][0] if num_levels else 0

    def __iter__(self) -> Iterator[str]:
        return (self._workers[bit] for bit in _bits(self._levels[0][1]))

    def __len__(self) -> int:
        return self._levels[0][1].bit_count()

    def longest(self, most: int, seed: int) -> dict[str, int]:
        """Return up to `most` workers that own the most keys, with the numbers of their keys.

        Of the first workers of which there are too many, it returns a sample. The sample depends on `seed` only, and
        hardly changes when owners come or go.
        """
        found: dict[str, int] = {}
        longer = 0
        for number, mask in reversed(self._levels):
            bits, room = mask & ~longer, most - len(found)
            longer = mask
            for bit in _bits(bits) if bits.bit_count() <= room else _sample(bits, room, seed):
                found[self._workers[bit]] = number
            if len(found) >= most or bits.bit_count() > room:
                break
        return found


class Mirror:
    """Copy of the index. Pure: no clock, no I/O. Not thread-safe.

    Args:
        few_owners: a lookup returns a dict if at most so many workers own the first key.
    """

    def __init__(self, few_owners: int = FEW_OWNERS) -> None:
        self._few_owners = few_owners
        self._owners: dict[str, _Owner] = {}
        self._masks: dict[bytes, int] = {}
        self._num_alone: dict[int, int] = {}
        """Number of keys that have one bit only, by that bit."""
        self._worker_of: dict[int, str] = {}
        self._alive = 0
        self._used = 0
        self._retired = 0
        self._sweeping = 0
        self._unswept: Iterator[bytes] = iter(())

    def lookup(self, keys: Sequence[bytes], *, resumes_anywhere: bool = True) -> Mapping[str, int]:
        """Return, for every live worker that owns the first key, how many of the keys it owns without a gap.

        A bare block key looks up blocks on the device. The result is valid until the mirror changes. It is `Owners` if
        many workers are found, and a dict otherwise.

        Args:
            resumes_anywhere: False: workers own only the keys after which they can continue a sequence. A worker's
                number is then counted up to the last key that it owns, even if it lacks earlier ones.
        """
        levels = self._levels(keys) if resumes_anywhere else self._last_levels(keys)
        most = self._few_owners
        if len(self._owners) > most and levels and levels[0][1].bit_count() > most:
            return Owners(levels, self._worker_of, self._alive_bit)
        found: dict[str, int] = {}
        longer = 0
        for number, mask in reversed(levels):
            for bit in _bits(mask & ~longer):
                found[self._worker_of[bit]] = number
            longer = mask
        return found

    def apply(self, event: BlockEvent) -> Applied:
        """Apply an event. Idempotent; a newer epoch starts with no blocks, an older one is fenced."""
        owner = self._owners.get(event.worker_id)
        if owner is None or event.epoch > owner.epoch:
            owner = self._adopt(event.worker_id, event.epoch)
        if event.epoch < owner.epoch or event.seq <= owner.seq:
            return Applied.STALE
        if event.op is not Op.SNAPSHOT_BEGIN and event.seq != owner.seq + 1:
            return Applied.GAP
        if event.op is Op.SNAPSHOT_END and owner.num_keys.get(owner.parts) != event.num_keys:
            return Applied.GAP
        owner.seq = event.seq
        self._change(owner, event)
        return Applied.DONE

    def replacing(self, worker_id: str, epoch: int, seq: int, keys: Iterable[bytes]) -> Iterator[None]:
        """Set the blocks of a worker to `keys`, as of event `seq`. An epoch that has ended is ignored.

        Yields after each `SLICE` of the keys, because there may be a million. The keys count once the iteration has
        finished. No event of the worker may be applied in the meantime.
        """
        owner = self._owners.get(worker_id)
        if owner is None or epoch > owner.epoch:
            owner = self._adopt(worker_id, epoch)
        if epoch != owner.epoch:
            return
        self._drop_parts(owner)
        owner.parts = self._new_bit(owner)
        rest = iter(keys)
        while part := list(islice(rest, SLICE)):
            self._add(owner, owner.parts, part)
            yield
        self._kv_transfer(owner, owner.parts)
        owner.parts, owner.seq = 0, seq

    def disbelieve(self, worker_id: str, as_of: Position | None, keys: Iterable[bytes]) -> None:
        """Remove `keys` of a worker that was asked for them, as of its event `as_of`, and did not have them.

        The keys are removed only if no event of the worker was applied since `as_of`. Then every event that is newer
        than the worker's report has yet to arrive, including the one that stores a key again after the worker has
        computed it. Otherwise the order of the event and the report is unknown, and the events alone decide: they are
        complete in the end, and a report only stands in for late ones.
        """
        owner = self._owners.get(worker_id)
        if owner and self.position(worker_id) == as_of:
            self._remove(owner, keys)

    def set_leased(self, epochs: Mapping[str, int]) -> None:
        """Set which workers hold a lease, under which epochs. Lookups skip all others, but they are not forgotten."""
        for worker_id, epoch in epochs.items():
            owner = self._owners.get(worker_id)
            if owner is None or epoch > owner.epoch:
                self._adopt(worker_id, epoch)
        for worker_id, owner in self._owners.items():
            owner.leased = epochs.get(worker_id) == owner.epoch
            self._show(owner)

    def forget(self, worker_id: str) -> None:
        """Remove a worker that has left permanently."""
        if owner := self._owners.pop(worker_id, None):
            self._drop_parts(owner)
            self._retire(owner.bit)

    def position(self, worker_id: str) -> Position | None:
        """Return a worker's last applied event; None for an unknown worker."""
        owner = self._owners.get(worker_id)
        return Position(owner.epoch, owner.seq) if owner else None

    def workers(self) -> dict[str, int]:
        """Return the number of blocks that each known worker owns, including dead workers."""
        return {owner.worker_id: owner.num_keys[owner.bit] for owner in self._owners.values()}

    def unique_blocks(self) -> dict[str, int]:
        """Return the number of blocks that each live worker owns alone among the known workers.

        A worker that has died counts until `forget` and `sweep` have removed it, and blocks that a worker no longer has
        count until `sweep` has removed them.
        """
        return {owner.worker_id: self._num_alone.get(owner.bit, 0) for owner in self._owners.values() if owner.leased}

    def __len__(self) -> int:
        """Number of keys, including keys of retired bits only."""
        return len(self._masks)

    def sweep(self, max_keys: int = 4096) -> bool:
        """Clear retired bits from up to `max_keys` keys, and return whether there is more to do."""
        if not self._sweeping:
            if not self._retired:
                return False
            self._sweeping, self._retired = self._retired, 0
            self._unswept = iter(list(self._masks))
        keep = ~self._sweeping
        num_seen = 0
        for key in islice(self._unswept, max_keys):
            num_seen += 1
            before = self._masks.get(key, 0)
            if before & self._sweeping:
                mask = before & keep
                if not before & (before - 1):
                    self._num_alone[before] -= 1
                if not mask:
                    del self._masks[key]
                    continue
                self._masks[key] = mask
                if not mask & (mask - 1):
                    self._num_alone[mask] += 1
        if num_seen < max_keys:
            for bit in _bits(self._sweeping):
                del self._num_alone[bit]
            self._used &= keep
            self._sweeping = 0
        return bool(self._sweeping or self._retired)

    def check(self) -> None:
        """Assert that the bits are consistent and the counts are right. Walks the whole index."""
        bits = [bit for owner in self._owners.values() for bit in owner.num_keys]
        live = sum(bits)
        assert len(set(bits)) == len(bits) == live.bit_count(), "two workers share a bit"
        assert live | self._retired | self._sweeping == self._used, "a bit is lost"
        assert not live & (self._retired | self._sweeping), "a bit is in use and retired"
        counts, alone = dict.fromkeys(bits, 0), dict.fromkeys(_bits(self._used), 0)
        for mask in self._masks.values():
            assert mask, "a key without an owner"
            assert not mask & ~self._used, "a key with an owner that does not exist"
            if mask.bit_count() == 1:
                alone[mask] += 1
            for bit in _bits(mask & live):
                counts[bit] += 1
        for owner in self._owners.values():
            assert set(owner.num_keys) == {owner.bit, *([owner.parts] if owner.parts else [])}, "a bit without a role"
            assert all(counts[bit] == count for bit, count in owner.num_keys.items()), f"{owner.worker_id}: miscounted"
            assert bool(self._alive & owner.bit) == owner.leased, "the alive mask is wrong"
        assert alone == self._num_alone, "the keys with one owner are miscounted"
        assert self._worker_of == {owner.bit: owner.worker_id for owner in self._owners.values()}, "bits misnamed"
        assert not self._alive & ~sum(self._worker_of), "a bit is alive without a worker"

    def _levels(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return numbers of keys, ascending, with the live workers that own so many or more without a gap."""
        levels: list[tuple[int, int]] = []
        held = self._alive
        number = 0
        for key in keys:
            owners = self._masks.get(key, 0) & held
            if owners != held:
                if number:
                    levels.append((number, held))
                held = owners
                if not held:
                    return levels
            number += 1
        if number and held:
            levels.append((number, held))
        return levels

    def _last_levels(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Return the same by the last key that each worker owns."""
        levels: list[tuple[int, int]] = []
        missing, found = self._alive, 0
        for number in range(len(keys), 0, -1):
            owners = self._masks.get(keys[number - 1], 0) & missing
            if owners:
                found |= owners
                levels.append((number, found))
                missing &= ~owners
                if not missing:
                    break
        return levels[::-1]

    def _alive_bit(self, worker_id: str) -> int:
        owner = self._owners.get(worker_id)
        return owner.bit & self._alive if owner else 0

    def _change(self, owner: _Owner, event: BlockEvent) -> None:
        match event.op:
            case Op.STORED:
                self._add(owner, owner.bit, event.entries)
            case Op.REMOVED:
                self._remove(owner, event.entries)
            case Op.CLEARED:
                self._kv_transfer(owner, self._new_bit(owner))
            case Op.SNAPSHOT_BEGIN:
                self._drop_parts(owner)
                owner.parts = self._new_bit(owner)
            case Op.SNAPSHOT_PART:
                if owner.parts:  # otherwise the mirror joined in the middle, and SNAPSHOT_END will be a gap
                    self._add(owner, owner.parts, event.entries)
            case Op.SNAPSHOT_END:
                self._kv_transfer(owner, owner.parts)
                owner.parts = 0

    def _adopt(self, worker_id: str, epoch: int) -> _Owner:
        self.forget(worker_id)
        owner = _Owner(worker_id=worker_id, epoch=epoch, bit=0)
        owner.bit = self._new_bit(owner)
        self._worker_of[owner.bit] = worker_id
        self._owners[worker_id] = owner
        self._show(owner)
        return owner

    def _new_bit(self, owner: _Owner) -> int:
        bit = ~self._used & (self._used + 1)  # the lowest that is free
        self._used |= bit
        owner.num_keys[bit] = self._num_alone[bit] = 0
        return bit

    def _kv_transfer(self, owner: _Owner, bit: int) -> None:
        """Make `bit` the bit of the worker's blocks."""
        self._retire(owner.bit)
        del owner.num_keys[owner.bit]
        owner.bit = bit
        self._worker_of[bit] = owner.worker_id
        self._show(owner)

    def _drop_parts(self, owner: _Owner) -> None:
        if owner.parts:
            self._retire(owner.parts)
            del owner.num_keys[owner.parts]
            owner.parts = 0

    def _retire(self, bit: int) -> None:
        self._alive &= ~bit
        self._worker_of.pop(bit, None)
        self._retired |= bit

    def _show(self, owner: _Owner) -> None:
        self._alive = self._alive | owner.bit if owner.leased else self._alive & ~owner.bit

    def _add(self, owner: _Owner, bit: int, keys: Iterable[bytes]) -> None:
        masks, num_alone = self._masks, self._num_alone
        num_new = num_first = 0
        for key in keys:
            mask = masks.get(key, 0)
            if not mask:
                masks[key] = bit
                num_first += 1
            elif not mask & bit:
                masks[key] = mask | bit
                num_new += 1
                if not mask & (mask - 1):
                    num_alone[mask] -= 1
        owner.num_keys[bit] += num_new + num_first
        num_alone[bit] += num_first

    def _remove(self, owner: _Owner, keys: Iterable[bytes]) -> None:
        masks, num_alone, bit = self._masks, self._num_alone, owner.bit
        num_removed = num_last = 0
        for key in keys:
            mask = masks.get(key, 0)
            if mask & bit:
                num_removed += 1
                if mask := mask ^ bit:
                    masks[key] = mask
                    if not mask & (mask - 1):
                        num_alone[mask] += 1
                else:
                    del masks[key]
                    num_last += 1
        owner.num_keys[bit] -= num_removed
        num_alone[bit] -= num_last


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _sample(mask: int, most: int, seed: int) -> Iterator[int]:
    """Yield up to `most` bits of a mask, near places that a linear congruential generator (Knuth's) draws."""
    num_places, drawn = mask.bit_length(), 0
    for _ in range(most):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        place = seed * num_places >> 64
        above = mask >> place
        bit = (above & -above) << place
        if not drawn & bit:
            drawn |= bit
            yield bit

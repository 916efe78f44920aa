"""Slots of a worker's LoRA adapters: which adapter each one holds, how many sequences pin it, and which is replaced.

    slot   | 1: pinned by 3 sequences | 2: unpinned, used longest ago | 3: is being loaded |       0: no adapter

A sequence pins its adapter's slot until it ends, because each of its steps reads the slot. A new adapter takes a free
slot, or the least recently used one that is not pinned. If all are pinned, one slot takes no new sequences (`leaving`),
so that sequences of resident adapters cannot block a waiting adapter forever.

This module is pure: it has no tensors and no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from baton.errors import Unsupported
from baton.messages import SequenceSpec
from engine.core.sequence import Purpose


@dataclass(slots=True)
class _Slot:
    number: int
    num_pins: int = 0
    is_loaded: bool = False


class AdapterSlots:
    """Slots 1 to `num_slots`.

    Attributes:
        leaving: digest of the adapter whose slot takes no new sequences; None: all slots take some.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.leaving: str | None = None
        self._slots: dict[str, _Slot] = {}
        """Slots by digest, the least recently used one first."""
        self._digests: dict[int, str] = {}
        """Number of a slot -> digest of the adapter that has it."""
        self._free = list(range(num_slots, 0, -1))

    @property
    def resident(self) -> tuple[str, ...]:
        """Digests of the loaded adapters, the least recently used one first."""
        return tuple(digest for digest, slot in self._slots.items() if slot.is_loaded)

    @property
    def is_pinned(self) -> bool:
        """True if a slot is pinned."""
        return any(slot.num_pins for slot in self._slots.values())

    def is_loaded(self, digest: str) -> bool:
        """Return whether an adapter is loaded into a slot."""
        return digest in self._slots and self._slots[digest].is_loaded

    def pin(self, digest: str) -> int | None:
        """Pin the slot of a loaded adapter and return its number; None: it is not loaded, or its slot is leaving."""
        if digest == self.leaving or not self.is_loaded(digest):
            return None
        number = self._slots[digest].number
        self.pin_again(number)
        return number

    def pin_again(self, number: int) -> None:
        """Pin a slot for another sequence, forked from one that has pinned it."""
        digest = self._digests[number]
        slot = self._slots[digest] = self._slots.pop(digest)
        slot.num_pins += 1

    def unpin(self, number: int) -> None:
        """Drop one pin of a slot."""
        slot = self._slots[self._digests[number]]
        assert slot.num_pins > 0, f"slot {number} is unpinned more often than pinned"
        slot.num_pins -= 1

    def reserve(self, digest: str) -> int | None:
        """Take a slot for an adapter that will be loaded, and return the slot's number.

        Return None if all slots are pinned or being loaded. The loaded slot with the fewest sequences is then leaving.
        """
        assert digest not in self._slots, f"adapter {digest} has a slot already"
        loaded = [each for each, slot in self._slots.items() if slot.is_loaded]
        if not self._free:
            victim = next((each for each in loaded if not self._slots[each].num_pins), None)
            if victim is None:
                if self.leaving is None and loaded:
                    self.leaving = min(loaded, key=lambda each: self._slots[each].num_pins)
                return None
            self._remove(victim)
        self.leaving = None
        number = self._free.pop()
        self._slots[digest] = _Slot(number)
        self._digests[number] = digest
        return number

    def stay(self) -> None:
        """Let the leaving slot take new sequences again, because no adapter waits for it."""
        self.leaving = None

    def loaded(self, digest: str) -> None:
        """Record that an adapter is in its slot."""
        self._slots[digest].is_loaded = True

    def failed(self, digest: str) -> None:
        """Free the slot of an adapter that could not be loaded."""
        assert not self.is_loaded(digest), f"adapter {digest} is loaded"
        self._remove(digest)

    def check(self, held: Iterable[int]) -> None:
        """Assert that the number of pins of each slot is the number of sequences that have the slot.

        Args:
            held: slot of each sequence that has one.
        """
        pins = {slot.number: slot.num_pins for slot in self._slots.values() if slot.num_pins}
        assert pins == Counter(held), f"slots are pinned {pins}, and sequences hold {Counter(held)}"
        assert len(self._free) + len(self._slots) == self.num_slots, "a slot is lost"

    def _remove(self, digest: str) -> None:
        number = self._slots.pop(digest).number
        del self._digests[number]
        self._free.append(number)


def needs_adapter(spec: SequenceSpec, purpose: Purpose) -> bool:
    """Return whether this worker computes a sequence with an adapter. A prefix that it only receives needs none."""
    return spec.adapter is not None and not (purpose is Purpose.RECEIVE and not spec.max_tokens)


def refuse_without_slots(num_slots: int) -> None:
    """Raise Unsupported if a worker holds no adapters."""
    if not num_slots:
        raise Unsupported("this worker holds no adapters; set engine.max_adapters to how many it may hold at a time")

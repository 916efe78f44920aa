"""Values in Redis that name their author: signed by a member of the cluster, and never older than what was read before.

A reader remembers the latest value that it has believed of each key. A value counts if the right member has signed its
bytes, its rank is above the remembered one, and its stamp is near the present, or as far from the first one as that is
ago; and for as long as the next one follows within a lease. So an altered, borrowed or repeated value brings nothing.
Bytes that have not changed are not verified again.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from baton.trust import Principal
from baton.trust.keys import SIGNATURE_BYTES
from baton.trust.proofs import MAX_SKEW_S
from kvstore.index.values import MAX_EPOCH

if TYPE_CHECKING:
    from collections.abc import Callable

    from baton.trust import KeyFile, KeyRing

REMEMBERED_S = 4 * MAX_SKEW_S
"""How long a reader remembers a value that counts no more. After that an older one is refused for its stamp."""


def packed(*parts: bytes | str | int) -> bytes:
    """Returns parts as one message: each with its length before it, so that no two lists of parts give the same."""
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(part).to_bytes(4, "little") + part for part in encoded)


_EPOCH = struct.Struct(f"<Q{SIGNATURE_BYTES}s")
EPOCH_PROOF_BYTES = _EPOCH.size


def signed_epoch(keys: KeyRing, name: str, epoch: int) -> bytes:
    """Returns what a worker writes under that name to prove that the epoch is a worker's."""
    return _EPOCH.pack(epoch, keys.sign("epoch", packed(name, epoch)))


def proved_epoch(keys: KeyRing, name: str, found: object) -> int:
    """Returns the epoch that a worker has signed; 0 if what was found under the name is no such value."""
    if not isinstance(found, bytes) or len(found) != _EPOCH.size:
        return 0
    epoch, signature = _EPOCH.unpack(found)
    is_signed = epoch <= MAX_EPOCH and keys.verify("epoch", Principal.WORKER, packed(name, epoch), signature)
    return int(epoch) if is_signed else 0


class SignedValue(NamedTuple):
    """A value as it was found, with what is to prove it."""

    epoch: int
    """Epoch of the worker that it is of; 0 for the values of others."""
    stamp: int
    """Time of writing in ms since 1970, by the author's clock; it rises with each writing."""
    message: bytes
    """All that is signed, the epoch and the stamp included."""
    signature: bytes


@dataclass(slots=True, kw_only=True)
class Sight:
    """The latest value that was believed of a key."""

    found: SignedValue
    heard_s: float
    """When it was read first, in monotonic seconds."""
    first_stamp: int
    """The first stamp of its epoch that was read, and when: what later stamps are measured by, too."""
    first_s: float
    value: Any = None
    """The decoded value; the caller sets it when `SightBook.see` returns a new sight."""
    is_new: bool = True


class SightBook:
    """The sights of one reader. For one thread.

    Args:
        lease_s: time for which a value counts after it was read first.
        wall_s: wall time in seconds.
        monotonic_s: monotonic seconds.
    """

    def __init__(
        self,
        keys: KeyFile,
        lease_s: float,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._lease_s = lease_s
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._sights: dict[str, Sight] = {}

    def see(self, key: str, author: Principal, found: SignedValue, *, must_be_timely: bool = True) -> Sight:
        """Returns the sight of a value.

        Args:
            must_be_timely: whether a value that was written long ago is none.

        Raises:
            ValueError: the value is not the author's, or was replaced by its author before.
        """
        now_s = self._monotonic_s()
        last = self._sights.get(key)
        if last is not None and must_be_timely and now_s - last.heard_s > REMEMBERED_S:
            last = None
        if last is not None and last.found == found:
            last.is_new = False
            return last
        if not self._keys.verify("value", author, found.message, found.signature):
            raise ValueError(f"it is not signed by a {author} of this cluster")
        if last is not None and found[:2] <= last.found[:2]:
            if not (must_be_timely and self._may_fall(last, found, now_s)):
                raise ValueError("it is older than what was read there before")
            last = None
        same_epoch = last if last is not None and last.found.epoch == found.epoch else None
        is_steady = same_epoch is not None and _is_steady(same_epoch, found.stamp, now_s)
        if must_be_timely and not is_steady:
            self._check_time(found.stamp)
        self._sights[key] = sight = Sight(
            found=found,
            heard_s=now_s,
            first_stamp=same_epoch.first_stamp if same_epoch and is_steady else found.stamp,
            first_s=same_epoch.first_s if same_epoch and is_steady else now_s,
        )
        return sight

    def stamp(self, key: str) -> int:
        """Returns the latest stamp that was believed of a key; 0 if there is none."""
        sight = self._sights.get(key)
        return sight.found.stamp if sight is not None else 0

    def last(self, key: str) -> Sight | None:
        """Returns what was believed of a key last, if it still counts."""
        sight = self._sights.get(key)
        return sight if sight is not None and self.is_alive(sight) else None

    def is_alive(self, sight: Sight) -> bool:
        """Whether the value was read first within the length of a lease."""
        return self._monotonic_s() - sight.heard_s <= self._lease_s

    def _check_time(self, stamp: int) -> None:
        """Raises ValueError: the stamp is far from now."""
        ahead_s = stamp / 1e3 - self._wall_s()
        if abs(ahead_s) > MAX_SKEW_S:
            raise ValueError(
                f"it was written {ahead_s:+.0f} s from now; the clocks of a cluster's machines may differ by "
                f"{MAX_SKEW_S:g} s"
            )

    def _may_fall(self, last: Sight, found: SignedValue, now_s: float) -> bool:
        """Whether a lower stamp counts: the author has no epoch that could rise instead, nothing of it has been
        believed for one lease, and its former stamps lie in the future by this machine's clock.

        So clocks were ahead, and were set back. What was recorded while they were ahead is not of the present.
        """
        has_epoch = found.epoch or last.found.epoch
        former_s = last.found.stamp / 1e3 + now_s - last.heard_s
        return not has_epoch and not self.is_alive(last) and former_s - self._wall_s() > MAX_SKEW_S


def _is_steady(before: Sight, stamp: int, now_s: float) -> bool:
    """Whether a stamp has risen by the time that has passed since the first one: the author's clock has run evenly,
    though this machine's may have been set.
    """
    return abs((stamp - before.first_stamp) / 1e3 - (now_s - before.first_s)) <= MAX_SKEW_S


class Stamps:
    """Draws the stamps of what this process writes.

    Attributes:
        follows_clock: whether stamps are the wall clock's. Else they go on evenly from the last one, and readers that
            know it believe them whatever the clock says.

    Args:
        wall_s: wall time in seconds.
        monotonic_s: monotonic seconds.
    """

    def __init__(
        self, wall_s: Callable[[], float] = time.time, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.follows_clock = True
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._last = 0
        self._last_s = 0.0
        """When the last stamp was drawn."""

    def draw(self) -> int:
        """Returns a time in milliseconds, or the last stamp and one if that is more."""
        now_s = self._wall_s() if self.follows_clock else self.counted_s
        self._last, self._last_s = max(int(now_s * 1000), self._last + 1), self._monotonic_s()
        return self._last

    @property
    def counted_s(self) -> float:
        """The last stamp and the time that has passed since, in seconds."""
        return self._last / 1e3 + self._monotonic_s() - self._last_s

    @property
    def drift_s(self) -> float:
        """Seconds by which the wall clock was set since: it is ahead of `counted_s`. 0 before the first stamp."""
        return self._wall_s() - self.counted_s if self._last else 0.0

    def restart(self) -> None:
        """Has the next stamp be the wall clock's, though it may be below the last one."""
        self.follows_clock, self._last = True, 0

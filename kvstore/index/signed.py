"""Values in Redis that name their author: signed by a member of the cluster, and never older than values read before.

A reader remembers the latest accepted value of each key. A value counts if the right member has signed its bytes, its
rank is above the remembered one, and its stamp is near the present or has advanced since the first stamp by the elapsed
time. It counts as long as the next one follows within a lease. So an altered, copied or replayed value has no effect.
Bytes that have not changed are not verified again, and a lease is renewed without a new signature
(`kvstore/leases/chain.py`).
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
"""Time for which a reader remembers a value that no longer counts; later, an older one fails by its stamp."""


def packed(*parts: bytes | str | int) -> bytes:
    """Return parts as one message: each preceded by its length, so that no two lists of parts give the same message."""
    encoded = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(part).to_bytes(4, "little") + part for part in encoded)


_EPOCH = struct.Struct(f"<Q{SIGNATURE_BYTES}s")
EPOCH_PROOF_BYTES = _EPOCH.size


def signed_epoch(keys: KeyRing, name: str, epoch: int) -> bytes:
    """Return the value that a worker writes under that name to prove that the epoch was issued to a worker."""
    return _EPOCH.pack(epoch, keys.sign("epoch", packed(name, epoch)))


def proved_epoch(keys: KeyRing, name: str, found: object) -> int:
    """Return the epoch that a worker has signed; 0 if the value found under the name is not valid."""
    if not isinstance(found, bytes) or len(found) != _EPOCH.size:
        return 0
    epoch, signature = _EPOCH.unpack(found)
    is_signed = epoch <= MAX_EPOCH and keys.verify("epoch", Principal.WORKER, packed(name, epoch), signature)
    return int(epoch) if is_signed else 0


class SignedValue(NamedTuple):
    """Value as found, with its proof."""

    epoch: int
    """Epoch of the worker that wrote it; 0 for values of other members."""
    stamp: int
    """Time of writing, or of the latest renewal, in ms since 1970 by the author's clock; it rises with each write."""
    message: bytes
    """All signed bytes, including the epoch and the time of writing."""
    signature: bytes


@dataclass(slots=True, kw_only=True)
class Sight:
    """Observation of a key: its latest accepted value."""

    found: SignedValue
    heard_s: float
    """Time of the first read, in monotonic seconds."""
    first_stamp: int
    """First stamp of its epoch that was read, and the time of that read: a reference for later stamps."""
    first_s: float
    value: Any = None
    """Decoded value; the caller sets it when `SightBook.see` returns a new observation."""
    is_new: bool = True


class SightBook:
    """Observations of one reader. Not thread-safe.

    Args:
        lease_s: time for which a value counts after it was first read.
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
        """Return the observation of a value.

        Args:
            must_be_timely: whether a value that was written long ago is rejected.

        Raises:
            ValueError: the author has not signed the value, or has replaced it already.
        """
        now_s = self._monotonic_s()
        last = self._remembered(key, now_s) if must_be_timely else self._sights.get(key)
        if last is not None and last.found == found:
            last.is_new = False
            return last
        if not self._keys.verify("value", author, found.message, found.signature):
            raise ValueError(f"it is not signed by a {author} of this cluster")
        return self._accept(key, last, found, now_s, must_be_timely=must_be_timely)

    def renew(self, key: str, author: Principal, stamp: int) -> Sight:
        """Return the observation of a later stamp of the value that was accepted last.

        The caller has checked that the author has renewed the value at that stamp.

        Raises:
            ValueError: nothing was accepted recently, the key that has signed it is no longer valid, or the stamp is
                not the latest or not of the present.
        """
        now_s = self._monotonic_s()
        last = self._remembered(key, now_s)
        if last is None or not self._keys.keys.knows(author, last.found.signature):
            raise ValueError("it renews nothing that is known")
        if stamp == last.found.stamp:
            last.is_new = False
            return last
        sight = self._accept(key, last, last.found._replace(stamp=stamp), now_s)
        sight.value, sight.is_new = last.value, False
        return sight

    def _remembered(self, key: str, now_s: float) -> Sight | None:
        last = self._sights.get(key)
        return None if last is None or now_s - last.heard_s > REMEMBERED_S else last

    def _accept(
        self, key: str, last: Sight | None, found: SignedValue, now_s: float, *, must_be_timely: bool = True
    ) -> Sight:
        """Return the observation of an authentic value, unless its rank or its time is wrong (ValueError)."""
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
        """Return the latest accepted stamp of a key; 0 if there is none."""
        sight = self._sights.get(key)
        return sight.found.stamp if sight is not None else 0

    def last(self, key: str) -> Sight | None:
        """Return the last accepted value of a key, if it still counts."""
        sight = self._sights.get(key)
        return sight if sight is not None and self.is_alive(sight) else None

    def is_alive(self, sight: Sight) -> bool:
        """Return whether the value was first read within the duration of a lease."""
        return self._monotonic_s() - sight.heard_s <= self._lease_s

    def _check_time(self, stamp: int) -> None:
        """Raise ValueError if the stamp is far from now."""
        ahead_s = stamp / 1e3 - self._wall_s()
        if abs(ahead_s) > MAX_SKEW_S:
            raise ValueError(
                f"it was written {ahead_s:+.0f} s from now; the clocks of a cluster's machines may differ by "
                f"{MAX_SKEW_S:g} s"
            )

    def _may_fall(self, last: Sight, found: SignedValue, now_s: float) -> bool:
        """Return whether a lower stamp counts.

        It does if the author has no epoch that could rise instead, no value of it has been accepted for one lease, and
        its former stamps lie in the future by this machine's clock: the author's clock was ahead and was set back.
        Values recorded while it was ahead do not describe the present.
        """
        has_epoch = found.epoch or last.found.epoch
        former_s = last.found.stamp / 1e3 + now_s - last.heard_s
        return not has_epoch and not self.is_alive(last) and former_s - self._wall_s() > MAX_SKEW_S


def _is_steady(before: Sight, stamp: int, now_s: float) -> bool:
    """Return whether a stamp has advanced by the time that has passed since the first one.

    If so, the author's clock has run evenly, though this machine's may have been set.
    """
    return abs((stamp - before.first_stamp) / 1e3 - (now_s - before.first_s)) <= MAX_SKEW_S


class Stamps:
    """Source of the stamps of the values that this process writes.

    Attributes:
        follows_clock: whether stamps follow the wall clock. Otherwise they advance evenly from the last one, and
            readers that know that one accept them whatever the clock says.

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
        """Time at which the last stamp was drawn."""

    def draw(self) -> int:
        """Return a time in milliseconds, or the last stamp plus one if that is more."""
        now_s = self._wall_s() if self.follows_clock else self.counted_s
        self._last, self._last_s = max(int(now_s * 1000), self._last + 1), self._monotonic_s()
        return self._last

    @property
    def counted_s(self) -> float:
        """Last stamp plus the time that has passed since, in seconds."""
        return self._last / 1e3 + self._monotonic_s() - self._last_s

    @property
    def drift_s(self) -> float:
        """Seconds by which the wall clock was set since: it is ahead of `counted_s`. 0 before the first stamp."""
        return self._wall_s() - self.counted_s if self._last else 0.0

    def restart(self) -> None:
        """Take the next stamp from the wall clock, even if it is below the last one."""
        self.follows_clock, self._last = True, 0

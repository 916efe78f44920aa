"""Admits requests whose first token is predicted to come in time.

The prediction comes from placement, for the worker that it would choose. A request that the queue would make late is
refused at once, with the seconds until it would be on time. The exception is a queue with prompts of a tenant that uses
more than its share (weighted max-min fairness, in seconds of computing): these prompts are preempted, newest first,
until the new request is on time. A request never waits for one of a lower priority, which the workers compute later.

If a prompt alone takes longer than its objective, even on an idle worker, refusing others cannot help. It is computed
when nothing else waits, and refused only if its wait would exceed TTFT_DEADLINE_FACTOR objectives.

The gate has no clock and no queue: prompts wait on the workers, which compute them in the order of `Turn` and deadline.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from baton.errors import Overloaded
from router.admission.tenants import Tenant
from router.placement import Placement, Prediction, Turn

TTFT_DEADLINE_FACTOR = 2.0
CAUTION = 0.8
"""Share of an objective's spare time that a predicted wait may use. Predictions err, and a queue that is a fifth
shorter keeps the workers just as busy."""


@dataclass(slots=True, eq=False, kw_only=True)
class QueueEntry:
    """A choice that asks to be admitted."""

    tenant: Tenant
    priority: int
    ttft_s: float
    """Remaining time of its TTFT objective, in seconds."""
    worker_id: str = ""
    """The worker that would compute its prompt."""
    compute_s: float = 0.0
    turn: Turn = (0, False)
    """See `router.placement.Turn`."""

    def is_placed(self, placement: Placement) -> None:
        """Record the choice's placement."""
        self.worker_id = placement.computes
        self.compute_s = placement.prediction.pull_s + placement.prediction.compute_s
        self.turn = -self.priority, self.compute_s > self.ttft_s


class Gate:
    """Admission of one router's choices. An entry counts until `left`.

    Args:
        caution: see CAUTION.
    """

    def __init__(self, caution: float = CAUTION) -> None:
        self._caution = caution
        self._queues: dict[str, dict[QueueEntry, None]] = {}
        self._shares: defaultdict[str, float] = defaultdict(float)
        """Seconds of computing that each tenant has queued, by its weight."""
        self._num_entries: Counter[str] = Counter()

    def admit(self, entry: QueueEntry, prediction: Prediction) -> list[QueueEntry]:
        """Admit an entry that is placed.

        Returns:
            The entries that it preempts; they are removed already.

        Raises:
            Overloaded: its first token would come too late.
        """
        late_s = self._late_s(entry, prediction)
        # Preempting prompts does not free room to decode: only sequences that end do.
        may_shed = late_s > 0 and prediction.wait_s >= prediction.room_s
        victims = self._outranked(entry, late_s) if may_shed else []
        if late_s > 0 and not victims:
            raise Overloaded(
                f"the first token would come {late_s:.1f} s later than the objective of {entry.ttft_s:.1f} s allows; "
                "try again later",
                retry_after_s=max(0.1, late_s),
            )
        for victim in victims:
            self.left(victim)
        self._queues.setdefault(entry.worker_id, {})[entry] = None
        self._shares[entry.tenant.id] += entry.compute_s / entry.tenant.weight
        self._num_entries[entry.tenant.id] += 1
        return victims

    def left(self, entry: QueueEntry) -> None:
        """Remove an entry whose prompt is computed or that is cancelled; idempotent."""
        queue = self._queues.get(entry.worker_id, {})
        if entry in queue:
            del queue[entry]
            self._shares[entry.tenant.id] -= entry.compute_s / entry.tenant.weight
            self._num_entries[entry.tenant.id] -= 1
            if not self._num_entries[entry.tenant.id]:
                del self._shares[entry.tenant.id], self._num_entries[entry.tenant.id]

    def _late_s(self, entry: QueueEntry, prediction: Prediction) -> float:
        """Return the seconds by which the entry would be late; 0 or less: it is on time."""
        if math.isinf(entry.ttft_s):
            return 0.0
        wait_s = max(prediction.wait_s, prediction.room_s)
        spare_s = entry.ttft_s - entry.compute_s
        return wait_s - (self._caution * spare_s if spare_s >= 0 else TTFT_DEADLINE_FACTOR * entry.ttft_s)

    def _outranked(self, entry: QueueEntry, late_s: float) -> list[QueueEntry]:
        """Return the entries to preempt so that `entry` is on time; none if that is not possible."""
        victims: list[QueueEntry] = []
        shares = self._shares.copy()
        mine = shares[entry.tenant.id] + entry.compute_s / entry.tenant.weight
        for other in reversed(self._queues.get(entry.worker_id, {})):
            less_s = other.compute_s / other.tenant.weight
            over = other.tenant.id != entry.tenant.id and shares[other.tenant.id] - less_s >= mine
            if over and other.turn[0] == entry.turn[0] and other.turn <= entry.turn:
                victims.append(other)
                shares[other.tenant.id] -= less_s
                late_s -= other.compute_s
                if late_s <= 0:
                    return victims
        return []

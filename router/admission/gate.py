"""Admits requests whose first token is predicted to come in time.

The prediction is placement's, for the worker that it would choose. A request that the queue would make late is refused
at once, with the seconds until it would not be; unless the prompts before it are of a tenant that has more than its
share of the queues (weighted max-min fairness, on seconds of computing). These are shed, newest first, as many as it
takes. No request waits for one of a lower priority: the workers compute those later.

A prompt that takes longer than its objective even on an idle worker cannot be helped by refusing others. It is computed
when nothing else waits (its turn comes last), and refused only if that would take TTFT_DEADLINE_FACTOR objectives.

No clock, no queue of its own: prompts wait on the workers, which compute them in order of turn and deadline.
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
"""Share of the time that an objective leaves for waiting which a prediction may use up: predictions err, and a queue
that is a fifth shorter keeps the workers just as busy."""


@dataclass(slots=True, eq=False, kw_only=True)
class QueueEntry:
    """A choice that asks to be admitted."""

    tenant: Tenant
    priority: int
    ttft_s: float
    """What is left of its TTFT objective."""
    worker_id: str = ""
    """The worker that would compute its prompt."""
    compute_s: float = 0.0
    turn: Turn = (0, False)
    """See `router.placement.Turn`."""

    def is_placed(self, placement: Placement) -> None:
        """Record where it would go."""
        self.worker_id = placement.computes
        self.compute_s = placement.prediction.pull_s + placement.prediction.compute_s
        self.turn = -self.priority, self.compute_s > self.ttft_s


class Gate:
    """One router's. Entries stay in its books until `left`.

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
        """Lets an entry in that is placed.

        Returns:
            Entries that must go for it; they have left already.

        Raises:
            Overloaded: its first token would come too late.
        """
        late_s = self._late_s(entry, prediction)
        # Room to decode comes from sequences that end, not from prompts that go.
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
        """Remove an entry: its prompt is computed, or it has gone; idempotent."""
        queue = self._queues.get(entry.worker_id, {})
        if entry in queue:
            del queue[entry]
            self._shares[entry.tenant.id] -= entry.compute_s / entry.tenant.weight
            self._num_entries[entry.tenant.id] -= 1
            if not self._num_entries[entry.tenant.id]:
                del self._shares[entry.tenant.id], self._num_entries[entry.tenant.id]

    def _late_s(self, entry: QueueEntry, prediction: Prediction) -> float:
        """Seconds by which waiting makes it late; 0 or less: it does not."""
        if math.isinf(entry.ttft_s):
            return 0.0
        wait_s = max(prediction.wait_s, prediction.room_s)
        spare_s = entry.ttft_s - entry.compute_s
        return wait_s - (self._caution * spare_s if spare_s >= 0 else TTFT_DEADLINE_FACTOR * entry.ttft_s)

    def _outranked(self, entry: QueueEntry, late_s: float) -> list[QueueEntry]:
        """The entries whose going makes `entry` come in time; none if that cannot be."""
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

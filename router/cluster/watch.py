"""Alerts of a router, and when their conditions started. `router.cluster.alerts` decides which conditions hold."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from baton.cluster import ClusterStatus
from router.cluster.alerts import RULES, WINDOWS_S, Condition, Outcomes, RouterView, conditions
from router.cluster.history import LATE_SLOTS, NUM_SLOTS, SLOT_S, ClusterHistory
from router.cluster.load import LoadMeter

PERIOD_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A condition that holds, and its duration."""

    name: str
    severity: str
    about: str
    summary: str
    since_s: float
    """Unix time at which this router first saw it."""
    for_s: float
    """Seconds for which it must last before the alert fires."""
    is_firing: bool
    """True if it has lasted that long."""


class AlertBook:
    """Record of when conditions started. `run` must run to keep it current.

    Args:
        look: returns the current conditions, as `conditions` does.
        clock: wall time in seconds.
    """

    def __init__(self, look: Callable[[], Iterable[Condition]], clock: Callable[[], float] = time.time) -> None:
        self._look = look
        self._clock = clock
        self._since_s: dict[tuple[str, str], float] = {}

    async def run(self) -> None:
        """Evaluate the conditions every `PERIOD_S` until cancelled."""
        while True:
            self.alerts()
            await asyncio.sleep(PERIOD_S)

    def alerts(self) -> list[Alert]:
        """Evaluate the conditions and return the alerts: firing ones first, and critical ones first among equals."""
        found, now_s = list(self._look()), self._clock()
        self._since_s = {(name, about): self._since_s.get((name, about), now_s) for name, about, _ in found}
        raised = [self._alert(condition, now_s) for condition in found]
        return sorted(raised, key=lambda each: (not each.is_firing, each.severity != "critical"))

    def _alert(self, condition: Condition, now_s: float) -> Alert:
        name, about, summary = condition
        rule, since_s = RULES[name], self._since_s[name, about]
        return Alert(
            name=name,
            severity=rule.severity,
            about=about,
            summary=summary,
            since_s=since_s,
            for_s=rule.for_s,
            is_firing=now_s - since_s >= rule.for_s,
        )


class AlertWatch:
    """Evaluator of a router's alert conditions. A call returns the current conditions.

    Args:
        status: returns the cluster's status as the router sees it.
        load: the router's own load.
        clock: wall time in seconds.
    """

    def __init__(
        self,
        router_id: str,
        status: Callable[[], ClusterStatus],
        load: LoadMeter,
        history: ClusterHistory,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._router_id, self._status, self._load, self._clock = router_id, status, load, clock
        self._outcomes = RecentOutcomes(history, clock)

    def __call__(self) -> list[Condition]:
        return conditions(
            RouterView(
                router_id=self._router_id,
                now_s=self._clock(),
                status=self._status(),
                load=self._load.now(),
                outcomes=self._outcomes.of(WINDOWS_S),
            )
        )


class RecentOutcomes:
    """Requests of the last hour by outcome and class, read from the history.

    Only the latest slots are read again, because adding up all of them each time would cost the router milliseconds.
    """

    def __init__(self, history: ClusterHistory, clock: Callable[[], float] = time.time) -> None:
        self._history = history
        self._clock = clock
        self._slots: dict[int, Outcomes] = {}

    def of(self, windows_s: Iterable[float]) -> dict[float, Outcomes]:
        """Return the outcomes of each window, by its length in seconds. The current slot counts in full."""
        newest = max(self._slots, default=0)
        for number, slot in self._history.slots(newest - LATE_SLOTS).items():
            self._slots[number] = _outcomes(slot.counts)
        now = int(self._clock() // SLOT_S)
        self._slots = {number: each for number, each in self._slots.items() if number > now - NUM_SLOTS}
        return {window_s: self._since(now - window_s / SLOT_S) for window_s in windows_s}

    def _since(self, slot: float) -> Outcomes:
        total: Counter[tuple[str, str]] = Counter()
        for number, each in self._slots.items():
            if number > slot:
                total.update(each)
        return total


def _outcomes(counts: Mapping[str, float]) -> dict[tuple[str, str], float]:
    found = {}
    for name, number in counts.items():
        kind, _, rest = name.partition("/")
        if kind == "requests":
            outcome, _, of_class = rest.partition("/")
            found[outcome, of_class] = number
    return found

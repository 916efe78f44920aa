"""How long choices wait for their first token: the gate admits them, and a deadline or a better claim ends the wait."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator

from baton.errors import Overloaded
from baton.telemetry.instruments import Instruments
from router.admission import PATIENCE, Gate, QueueEntry
from router.dispatch.choice import Attempt
from router.dispatch.decisions import PlacementDecision


class Patience:
    """Choices of this router that wait for their first token."""

    def __init__(self, instruments: Instruments) -> None:
        self.gate = Gate()
        self._instruments = instruments
        self._timeouts: dict[QueueEntry, asyncio.Timeout] = {}

    def admit(self, entry: QueueEntry, decision: PlacementDecision) -> None:
        """Lets a choice in, and ends the wait of the choices that have to make way for it.

        Raises:
            Overloaded: its first token would come too late.
        """
        try:
            victims = self.gate.admit(entry, decision.prediction)
        except Overloaded as refusal:
            decision.outcome = f"refused: {refusal}"
            raise
        for victim in victims:
            self._instruments.shed.add(1, {"tenant": victim.tenant.id})
            timeout = self._timeouts.get(victim)
            if timeout is not None and not timeout.expired():
                timeout.reschedule(0.0)

    def leave(self, entry: QueueEntry) -> None:
        """The prompt is computed, or its choice has gone; idempotent."""
        self.gate.left(entry)

    @contextlib.asynccontextmanager
    async def wait_for_first_token(self, attempt: Attempt) -> AsyncGenerator[None]:
        """Bounds the wait for an attempt's first token while the block is entered.

        Raises:
            Overloaded: the token did not come within PATIENCE times its objective, or the choice has to make way.
        """
        entry, choice = attempt.entry, attempt.choice
        alone_s = attempt.job.compute_s if attempt.job.turn[1] else 0.0
        patience_s = PATIENCE * (choice.claim.objective.ttft_s + alone_s)
        left_s = choice.claim.arrived_s + patience_s - time.monotonic()
        is_bound = not choice.emitted and patience_s < math.inf
        try:
            async with asyncio.timeout(left_s if is_bound else None) as timeout:
                self._timeouts[entry] = timeout
                yield
        except TimeoutError:
            reason = f"no first token within {patience_s:.1f} s"
            if timeout.when() == 0.0:
                reason = "the request had to make way for tenants with less in the queue"
            if choice.decision is not None:
                choice.decision.outcome = f"refused: {reason}"
            raise Overloaded(f"{reason}; try again later", retry_after_s=max(0.1, attempt.job.compute_s)) from None
        finally:
            self._timeouts.pop(entry, None)
            self.leave(entry)

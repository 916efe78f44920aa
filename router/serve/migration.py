"""Prepares the migration of a choice whose decode worker leaves its role.

While the old worker continues to decode, the next worker pulls the KV that exists so far. Then the choice is placed
again in disaggregated mode, with the leaving worker as its prefill worker. That worker caches all but the last few
tokens, and transfers the KV that the next worker has not pulled yet as for any prompt.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import replace

from baton.cluster import Worker
from baton.errors import WorkerDraining
from baton.messages import Decoding, PrefixSource, SequenceSpec
from baton.telemetry.instruments import Instruments
from router.placement import Job, Mode, Placement
from router.serve.choice import Assignment, Attempt
from router.serve.selector import WorkerSelector
from router.serve.worker_client import WorkerCallError, WorkerClient, WorkerStream

logger = logging.getLogger(__name__)
MOVE_RETRY_S = 1.0
"""Mean time between two searches for a worker with room."""


class Migration:
    """Prepares the migrations of one router's choices."""

    def __init__(self, *, client: WorkerClient, selector: WorkerSelector, instruments: Instruments) -> None:
        self._client = client
        self._selector = selector
        self._pools = selector.pools
        self._instruments = instruments

    async def prepare(self, attempt: Attempt, stream: WorkerStream[Decoding]) -> Assignment | None:
        """Find a worker with room, without a timeout, and make it pull the KV that exists so far.

        Args:
            stream: the call that decodes until the choice has migrated.

        Returns:
            The next assignment; None: the leaving worker has decided to stay.
        """
        choice, leaving = attempt.choice, stream.worker
        self._pools.leaves(leaving)
        failed: set[str] = set()
        while True:
            prompt_ids = attempt.spec.token_ids[: attempt.spec.num_prompt_tokens]
            spec = replace(attempt.spec, token_ids=prompt_ids + choice.known_ids, hypotheses=choice.hypotheses)
            found = self._selector.destination(choice, spec, failed)
            if found is None:
                failed.clear()
                # All choices of the leaving worker look for room at the same time: the jitter spreads them.
                await asyncio.sleep(MOVE_RETRY_S * random.uniform(0.5, 1.5))
                if self._pools.stays(leaving):
                    return None
                continue
            placement, prompt = found
            worker = self._pools.get(placement.decode_worker)
            job = Job(
                turn=attempt.entry.turn,
                compute_s=0.0,
                num_prompt_tokens=prompt.num_tokens,
                num_expected_tokens=prompt.num_expected_tokens,
            )
            source = self._selector.source(prompt, leaving, worker, len(spec.token_ids))
            if not await self._pull(attempt, spec, job, worker, source):
                failed.add(worker.info.id)
                continue
            placement = Placement(mode=Mode.DISAGGREGATED, decode_worker=worker.info.id, prefill_worker=leaving.info.id)
            return Assignment(
                placement=placement, decode=worker, prefill=leaving, source=None, hint=None, moves_from=stream
            )

    async def _pull(self, attempt: Attempt, spec: SequenceSpec, job: Job, worker: Worker, source: PrefixSource) -> bool:
        """Make a worker pull the sequence's KV from the leaving one, and return whether it succeeded."""
        try:
            with self._pools.decoding(worker, job):
                async with self._client.fetch(worker, spec, source, trace=attempt.choice.trace) as fetching:
                    fetched = await fetching.read()
        except WorkerCallError as failure:
            logger.warning("%s cannot migrate to %s: %s", spec.sequence_id, worker.info.label, failure.error)
            if isinstance(failure.error, WorkerDraining):
                self._pools.leaves(worker)
            return False
        self._instruments.migrations.add(1, {"pulled": str(fetched.num_tokens > 0).lower()})
        return True

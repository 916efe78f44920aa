"""Load between two states of a cluster. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.cluster import ClusterStatus, Role, RouterInfo, Worker, WorkerState
from baton.costs import typical
from deploy.scaling.values import Measured, PoolMeasured

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_BUSY_S = 1.0
"""Minimum measured time of prompts; below it, their cost comes from the workers' cost models."""


def of_model(router: RouterInfo, content_id: str) -> RouterInfo:
    """Return a router with the counts of one model only. The counts of an older release, which has one model, stay."""
    if not router.models:
        return router
    own = router.of_model(content_id)
    return replace(
        router,
        met=own.met,
        missed=own.missed,
        rejected=own.rejected,
        ready_workers=own.ready_workers,
        models=(own,),
    )


def measure(before: ClusterStatus, after: ClusterStatus, window_s: float) -> Measured:
    """Measure the window from `before` to `after`, `window_s` later.

    Counters start at 0 with their process. If a counter has decreased, or the worker has a new epoch, the process was
    restarted, and the whole counter counts. The counters of new routers count completely. Routers that are gone no
    longer count, so some of their requests are missing, but none counts twice. The routers must have the counts of this
    model (`of_model`).
    """
    known = {(worker.info.id, worker.info.epoch): worker for worker in before.workers}
    spent = [_Spent(worker, known.get((worker.info.id, worker.info.epoch)), window_s) for worker in after.workers]
    eldest = {router.id: router for router in before.routers}
    met = missed = rejected = 0
    for router in after.routers:
        past = _past(router, eldest.get(router.id))
        met += router.met - past[0]
        missed += router.missed - past[1]
        rejected += router.rejected - past[2]
    return Measured(
        prefill=_pool(Role.PREFILL, after, spent, window_s),
        decode=_pool(Role.DECODE, after, spent, window_s),
        met=met,
        missed=missed,
        rejected=rejected,
    )


class _Spent:
    """Work of one worker in the window."""

    def __init__(self, worker: Worker, before: Worker | None, window_s: float) -> None:
        load = worker.load
        began_anew = before is None or load.busy_s < before.load.busy_s
        past = worker.load if before is None else before.load
        self.worker = worker
        self.num_sequences = (load.running + load.waiting + past.running + past.waiting) / 2
        busy_s = load.busy_s if began_anew else load.busy_s - past.busy_s
        self.num_tokens = load.computed_tokens if began_anew else load.computed_tokens - past.computed_tokens
        self.busy_s = min(busy_s, window_s)
        self.num_context_tokens = load.blocks.in_use * worker.info.block_size
        if worker.info.role is Role.DECODE:
            self._leave_out_decoding((load.running + past.running) / 2)

    def _leave_out_decoding(self, num_decoding: float) -> None:
        """Remove the cost of decoding from the steps.

        n steps with x additional tokens each take busy = n * (decoding + x * s_per_token), and compute
        n * (num_decoding + x) tokens. Both totals are known, and determine n and x.
        """
        costs = self.worker.load.costs
        context = self.num_context_tokens * (num_decoding / self.num_sequences if self.num_sequences else 0.0)
        decoding_s = costs.decode_step_s(round(num_decoding), round(context))
        if num_decoding and decoding_s > 0:
            decoded = self.busy_s * num_decoding / decoding_s
            hidden = max(0.5, 1 - costs.s_per_token * num_decoding / decoding_s)
            self.num_tokens = round(min(self.num_tokens, max(0.0, (self.num_tokens - decoded) / hidden)))
        self.busy_s = min(self.busy_s, self.num_tokens * costs.s_per_token)


def _pool(role: Role, status: ClusterStatus, spent: Sequence[_Spent], window_s: float) -> PoolMeasured:
    """Measure one pool. Draining workers count: their work was done in this pool, and others take over their load."""
    mine = [one for one in spent if one.worker.info.role is role]
    ready = [one.worker for one in mine if one.worker.load.state is WorkerState.READY]
    busy_s, num_tokens = sum(one.busy_s for one in mine), sum(one.num_tokens for one in mine)
    costs = typical([worker.load.costs for worker in ready])
    # A decoding sequence always has one token that is not computed.
    queued = sum(max(0, one.worker.load.queued_tokens - one.worker.load.running) for one in mine)
    is_known = busy_s >= LEAST_BUSY_S and num_tokens
    s_per_token = busy_s / num_tokens if is_known else costs.s_per_token
    num_sequences = sum(one.num_sequences for one in mine)
    num_held = sum(one.worker.load.running + one.worker.load.waiting for one in mine)
    pool = status.pools.get(role.value)
    num_blocks = sum(worker.load.blocks.total for worker in ready)
    return PoolMeasured(
        desired=pool.desired if pool else len(ready),
        ready=len(ready),
        draining=sum(one.worker.load.state is WorkerState.DRAINING for one in mine),
        prompt_load=busy_s / window_s,
        queued_tokens=queued,
        tokens_per_s=1 / s_per_token if s_per_token > 0 else math.inf,
        num_sequences=num_sequences,
        num_context_tokens=sum(one.num_context_tokens for one in mine) / num_held if num_held else 0.0,
        kv_use=sum(one.worker.load.blocks.in_use for one in mine) / num_blocks if num_blocks else 0.0,
        costs=costs,
    )


def _past(router: RouterInfo, before: RouterInfo | None) -> tuple[int, int, int]:
    """Return a router's counts at the start of the window: zeros if it has counted anew since then.

    It does so after a restart, and for a model that it has loaded again.
    """
    if before is None or router.pid != before.pid:
        return 0, 0, 0
    past, now = ((each.met, each.missed, each.rejected) for each in (before, router))
    return past if all(then <= later for then, later in zip(past, now, strict=True)) else (0, 0, 0)

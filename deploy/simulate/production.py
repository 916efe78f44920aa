"""The router's own placement, as a placer of the arena."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.cluster import Role
from deploy.simulate.policy import Decision
from deploy.simulate.worker import key_of
from router.placement import Candidate, Prompt, Weights, place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.config import RouterConfig
    from deploy.simulate.policy import WorkerView
    from deploy.simulate.trace import TraceRequest


class Production:
    """`router.placement.place`, with the settings of a router."""

    name = "baton"

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._weights = Weights.of(config)

    def place(
        self, request: TraceRequest, prefill: Sequence[WorkerView], decode: Sequence[WorkerView], now_s: float
    ) -> Decision:
        config = self._config
        prompt = Prompt(request.num_prompt_tokens, tuple(map(key_of, request.block_ids)))
        candidates = [_candidate(v, Role.PREFILL) for v in prefill] + [_candidate(v, Role.DECODE) for v in decode]
        placement = place(
            prompt,
            candidates,
            config.mode,
            weights=self._weights,
            aggregate_below_tokens=config.aggregate_below_tokens,
            pull_above_tokens=config.pull_above_tokens,
        )
        assert placement is not None, "every pool has a worker"
        decodes = int(placement.decode_worker)
        computes = int(placement.prefill_worker or placement.decode_worker)
        source = int(placement.source) if placement.source else None
        return Decision(computes, decodes, source, placement.source_tokens)


def _candidate(view: WorkerView, role: Role) -> Candidate:
    active_tokens = view.booked_tokens if role is Role.DECODE else 0
    return Candidate(str(view.index), role, view.queued_tokens, active_tokens, view.num_cached_tokens)

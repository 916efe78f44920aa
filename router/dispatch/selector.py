"""Finds the workers of an attempt: placement over the pools as they are now, waiting for workers where none are."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial

from baton import wire
from baton.blocks import block_keys
from baton.cluster import Role
from baton.config import RouterConfig
from baton.errors import NoWorker, Overloaded, Unsupported
from baton.messages import PrefixSource, SequenceSpec
from router.admission import Claim
from router.dispatch.choice import Assignment
from router.dispatch.retry import Avoidance
from router.placement import Mode, Placement, PriceFit, Prompt, place
from router.placement.pool_view import PoolView
from router.placement.stale_hints import HintTracker


class WorkerSelector:
    """Placement for one router, with its settings and what moving KV costs it."""

    def __init__(self, *, pools: PoolView, hints: HintTracker, config: RouterConfig) -> None:
        self.pools = pools
        self.hints = hints
        self.prices = PriceFit()
        self._config = config

    def prompt(self, spec: SequenceSpec) -> Prompt:
        """What placement needs to know of a sequence."""
        keys = tuple(block_keys(spec.cache_seed, spec.token_ids, self.pools.block_size))
        num_emitted = len(spec.token_ids) - spec.num_prompt_tokens
        return Prompt(len(spec.token_ids), keys, max(1, spec.num_expected_tokens - num_emitted))

    async def place(self, spec: SequenceSpec, claim: Claim, prompt: Prompt, avoid: Avoidance) -> Assignment:
        """Waits, within bounds, until workers for a sequence are there.

        Raises:
            Overloaded, Unsupported: every worker that could serve it has refused it.
            NoWorker: none became ready in time.
        """
        deadline = time.monotonic() + self._config.worker_wait_s
        decide = self._decider(claim, avoid.no_sources)
        mode = Mode.AGGREGATED if avoid.hand_over and self._config.mode == "auto" else self._config.mode
        while True:
            unfit = self.pools.unfit(spec)
            excluded = avoid.refused | unfit.keys() | self.pools.too_short(spec)
            candidates = self.pools.candidates(prompt, (-claim.priority, False), excluded)
            undoubted = [c for c in candidates if c.worker_id not in avoid.doubted]
            placement = decide(prompt, undoubted, mode) or decide(prompt, candidates, mode)
            if placement is not None:
                believed = next(c.num_cached_tokens for c in candidates if c.worker_id == placement.computes)
                return self._assigned(spec, prompt, placement, believed)
            if avoid.refused:
                raise avoid.unsupported or Overloaded("every worker's queue is full; try again later")
            self._give_up(spec, unfit, is_late=time.monotonic() >= deadline)
            await self.pools.wait_for_change(deadline - time.monotonic())

    def destination(
        self, spec: SequenceSpec, claim: Claim, excluded: Collection[str]
    ) -> tuple[Placement, Prompt] | None:
        """The decode worker to which a choice moves; None: none has room for it now."""
        excluded = {*excluded, *self.pools.unfit(spec), *self.pools.too_short(spec)}
        with_room = self.pools.with_room(len(spec.token_ids), excluded)
        if not with_room:
            return None
        prompt = self.prompt(spec)
        candidates = self.pools.candidates(prompt, (-claim.priority, False))
        fitting = [c for c in candidates if c.worker_id in with_room]
        placement = self._decider(claim)(prompt, fitting, Mode.AGGREGATED)
        if placement is None or placement.prediction.room_s > 0:
            return None
        return placement, prompt

    def _decider(self, claim: Claim, no_sources: Collection[str] = ()) -> Callable[..., Placement | None]:
        return partial(
            place,
            objective=claim.objective,
            weights=claim.weights,
            prices=self.prices.prices,
            pull_above_tokens=self._config.pull_above_tokens,
            not_from=no_sources,
        )

    def _assigned(self, spec: SequenceSpec, prompt: Prompt, placement: Placement, num_believed: int) -> Assignment:
        pools, source = self.pools, None
        hint = self.hints.note(spec, prompt, pools.get(placement.computes), num_believed)
        if placement.source:
            address = pools.get(placement.source).info.address
            source = PrefixSource(placement.source, address, placement.source_tokens)
        return Assignment(
            placement=placement,
            decode=pools.get(placement.decode_worker),
            prefill=pools.get(placement.prefill_worker) if placement.prefill_worker else None,
            source=source,
            hint=hint,
        )

    def _give_up(self, spec: SequenceSpec, unfit: dict[str, set[str]], *, is_late: bool) -> None:
        """Raises NoWorker or Unsupported where waiting longer is of no use."""
        decodes = [worker.info.id for worker in self.pools.workers if worker.info.role is Role.DECODE]
        # A choice that has begun was placed on a worker that knew all of it and may be back.
        is_hopeless = spec.attempt == 0 and bool(decodes) and unfit.keys() >= set(decodes)
        if unfit and (is_late or is_hopeless):
            unknown = wire.named(set().union(*unfit.values()))
            raise Unsupported(f"no worker is ready that knows {unknown}; those that run are of an older release")
        if is_late:
            raise NoWorker(
                f"no worker became ready within {self._config.worker_wait_s:g} s; `baton status` shows the pools"
            )

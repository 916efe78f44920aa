"""Selects the workers of an attempt: placement over the current pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from baton import wire
from baton.blocks import HASH_BLOCK, num_pullable
from baton.cluster import Role, Worker
from baton.config import RouterConfig
from baton.errors import NoWorker, Overloaded, Unsupported
from baton.messages import Adapter, PrefixSource, SequenceSpec
from baton.trust import PERMIT_S, KeyFile, Party, Permit, keys_digest
from router.placement import (
    Candidate,
    Mode,
    Placement,
    Prediction,
    PriceFit,
    Prompt,
    place,
)
from router.placement.pool_view import HintTracker, PoolView
from router.serve.choice import Assignment, Choice


class WorkerSelector:
    """Selects workers for one router, with its settings and its estimate of the cost of KV transfers.

    Args:
        keys: the router's keys, which sign permits; None: the cluster has no secret, and a pull needs no permit.
    """

    def __init__(
        self, *, pools: PoolView, hints: HintTracker, config: RouterConfig, keys: KeyFile | None = None
    ) -> None:
        self.pools = pools
        self.hints = hints
        self.prices = PriceFit()
        self._config = config
        self._keys = keys

    def prompt(self, spec: SequenceSpec) -> Prompt:
        """Return what placement needs to know about a sequence."""
        hash_block_keys = tuple(spec.block_keys(spec.token_ids))
        keys: tuple[bytes, ...] = ()
        if spec.sampling.prompt_logprobs is None:  # scores of the prompt need all of it computed, so no cache is used
            num_hash_blocks = self.pools.block_size // HASH_BLOCK
            keys = hash_block_keys[num_hash_blocks - 1 :: num_hash_blocks]
        num_emitted = len(spec.token_ids) - spec.num_prompt_tokens
        return Prompt(len(spec.token_ids), keys, max(1, spec.num_expected_tokens - num_emitted), hash_block_keys)

    def place(self, choice: Choice, spec: SequenceSpec, prompt: Prompt, *, is_late: bool) -> Assignment | None:
        """Return the workers of a choice; None: none is ready for it yet.

        Args:
            spec: the choice's sequence in this attempt.
            is_late: `router.worker_wait_s` has passed, so it is not tried again.

        Raises:
            Overloaded, Unsupported: every worker that could serve it has refused it.
            NoWorker: no worker became ready in time, or none with the sampler that has drawn its tokens; or that
                sampler is unknown and the workers have several.
        """
        claim, avoid = choice.claim, choice.machine.avoid
        mode = Mode.AGGREGATED if avoid.kv_transfer and self._config.mode == "auto" else self._config.mode
        self._check_sampler(choice)
        unfit = self.pools.unfit(spec)
        excluded = avoid.refused | unfit.keys() | self.pools.unable(spec)
        if spec.adapter is not None:
            excluded |= self.pools.without_adapters
        decide = self._decider(choice, spec, avoid.no_sources)
        candidates = self.pools.candidates(
            prompt,
            (-claim.priority, False),
            excluded,
            wanted=self._wanted(choice, spec, prompt),
            num_doubted=len(avoid.doubted),
        )
        trusted = _most_trusted_first(candidates, avoid.doubted)
        placement = next((found for each in trusted if (found := decide(prompt, each, mode)) is not None), None)
        if placement is not None:
            believed = next(c.num_cached_tokens for c in candidates if c.worker_id == placement.computes)
            return self._assigned(spec, prompt, placement, believed)
        if avoid.refused:
            raise avoid.refusal or Overloaded("every worker's queue is full; try again later")
        self._give_up(choice, spec, unfit, is_late=is_late)
        return None

    def beside(self, choice: Choice, spec: SequenceSpec, prompt: Prompt, leader: Choice) -> Assignment | None:
        """Return an assignment to the decode worker that has the prompt's KV from another choice of the request.

        Returns:
            None if there is no such worker, it has died, leaves its role, or cannot serve the sequence.
        """
        excluded = choice.machine.avoid.refused | self.pools.unfit(spec).keys() | self.pools.unable(spec)
        if spec.adapter is not None:
            excluded |= self.pools.without_adapters
        wanted = (leader.kv_is_on,) if leader.kv_is_on else ()
        candidates = self.pools.candidates(prompt, (-choice.claim.priority, False), excluded, wanted=wanted)
        num_there = (prompt.num_tokens - 1) // self.pools.block_size * self.pools.block_size
        there = [
            replace(candidate, num_cached_tokens=num_there)
            for candidate in candidates
            if candidate.worker_id == leader.kv_is_on
        ]
        placement = self._decider(choice, spec)(prompt, there, Mode.AGGREGATED) if there else None
        return None if placement is None else self._assigned(spec, prompt, placement, num_there)

    def destination(
        self, choice: Choice, spec: SequenceSpec, excluded: Collection[str]
    ) -> tuple[Placement, Prompt] | None:
        """Return the decode worker to which a choice migrates; None: no suitable worker has room for it now."""
        excluded = {*excluded, *self.pools.unfit(spec), *self.pools.unable(spec)}
        if spec.adapter is not None:
            excluded |= self.pools.without_adapters
        with_room = self.pools.with_room(len(spec.token_ids), excluded)
        if not with_room:
            return None
        prompt = self.prompt(spec)
        turn = -choice.claim.priority, False
        wanted = chain(with_room, self._wanted(choice, spec, prompt))
        candidates = self.pools.candidates(prompt, turn, excluded, wanted=wanted)
        fitting = [
            c for c in candidates if c.takes_work and c.role is Role.DECODE and c.room_tokens >= prompt.num_tokens
        ]
        placement = self._decider(choice, spec)(prompt, fitting, Mode.AGGREGATED)
        if placement is None or placement.prediction.room_s > 0:
            return None
        return placement, prompt

    def source(self, prompt: Prompt, source: Worker, puller: Worker, num_tokens: int) -> PrefixSource:
        """Describe to a worker the source from which it pulls a prefix, with a permit if the cluster has a secret.

        A puller of an older release, which does not know permits, gets none. A source that requires a permit then
        refuses the pull, and the prompt is computed.

        Args:
            prompt: the sequence as sent to the puller.
            num_tokens: number of leading tokens that the source is believed to hold.
        """
        permit = b""
        if self._keys is not None and wire.PERMIT_FIELD not in wire.fields_unknown_to(puller.info.known_fields):
            keys = prompt.hash_block_keys[: num_pullable(prompt.num_tokens, num_tokens) // HASH_BLOCK]
            permit = Permit(
                puller=Party(puller.info.id, puller.info.incarnation),
                address=puller.info.address,
                source=Party(source.info.id, source.info.incarnation),
                keys=keys_digest(keys),
                num_tokens=len(keys) * HASH_BLOCK,
                until_s=time.time() + PERMIT_S,
            ).signed(self._keys.keys)
        info = source.info
        return PrefixSource(
            worker_id=info.id, address=info.address, num_tokens=num_tokens, incarnation=info.incarnation, permit=permit
        )

    def _decider(
        self, choice: Choice, spec: SequenceSpec, no_sources: Collection[str] = ()
    ) -> Callable[[Prompt, Sequence[Candidate], str], Placement | None]:
        claim, adapter = choice.claim, spec.adapter
        decide: Callable[[Prompt, Sequence[Candidate], str], Placement | None] = partial(
            place,
            objective=claim.objective,
            weights=claim.weights,
            prices=self.prices.prices,
            pull_above_tokens=self._config.pull_above_tokens,
            not_from=no_sources,
            images=choice.images.costs(spec) if choice.images else None,
            rotates=not self.pools.is_large,
        )
        if adapter is not None:
            decide = partial(self._decide_with_adapter, decide, adapter)
        if not choice.is_drawn:
            return decide

        def decide_alike(prompt: Prompt, candidates: Sequence[Candidate], mode: str) -> Placement | None:
            """Choose among workers with the same sampler; of several samplers, take the one that completes soonest."""
            groups = self.pools.alike(candidates, choice.only_sampler)
            found = [placement for group in groups if (placement := decide(prompt, group, mode)) is not None]
            return min(found, key=lambda each: _answered_s(prompt, each.prediction), default=None)

        return decide_alike

    def _wanted(self, choice: Choice, spec: SequenceSpec, prompt: Prompt) -> Iterable[str]:
        """Return workers that hold the request's images or its adapter."""
        if choice.images is None and spec.adapter is None:
            return ()
        images = choice.images.costs(spec).saved_s if choice.images else ()
        return chain(images, self.pools.with_adapter(spec.adapter, prompt))

    def _decide_with_adapter(
        self,
        decide: Callable[..., Placement | None],
        adapter: Adapter,
        prompt: Prompt,
        among: Sequence[Candidate],
        mode: str,
    ) -> Placement | None:
        loads_s = self.pools.loads_s(adapter, [candidate.worker_id for candidate in among])
        return decide(prompt, among, mode, loads_s=loads_s)

    def _assigned(self, spec: SequenceSpec, prompt: Prompt, placement: Placement, num_believed: int) -> Assignment:
        pools, source = self.pools, None
        if spec.adapter is not None:
            for worker_id in filter(None, (placement.prefill_worker, placement.decode_worker)):
                pools.loads(pools.get(worker_id), spec.adapter)
        hint = self.hints.note(spec, prompt, pools.get(placement.computes), num_believed)
        if placement.source:
            puller = pools.get(placement.computes)
            source = self.source(prompt, pools.get(placement.source), puller, placement.source_tokens)
        return Assignment(
            placement=placement,
            decode=pools.get(placement.decode_worker),
            prefill=pools.get(placement.prefill_worker) if placement.prefill_worker else None,
            source=source,
            hint=hint,
        )

    def _give_up(self, choice: Choice, spec: SequenceSpec, unfit: dict[str, set[str]], *, is_late: bool) -> None:
        """Raise NoWorker or Unsupported if a longer wait cannot help."""
        if spec.adapter is not None:
            self._require_adapters(spec, is_late=is_late)
        decodes = [worker.info.id for worker in self.pools.workers if worker.info.role is Role.DECODE]
        # A choice with an earlier attempt was placed on a worker that supports all of it and may come back.
        is_hopeless = spec.attempt == 0 and bool(decodes) and unfit.keys() >= set(decodes)
        if unfit and (is_late or is_hopeless):
            unknown = wire.named(set().union(*unfit.values()))
            raise Unsupported(f"no worker is ready that knows {unknown}; the running workers are of an older release")
        if is_late:
            needed = f"no worker{self._sampler_in_words(choice)} became ready"
            raise NoWorker(f"{needed} within {self._config.worker_wait_s:g} s; `baton status` shows the pools")

    def _require_adapters(self, spec: SequenceSpec, *, is_late: bool) -> None:
        """Raise Unsupported if workers are known, but too few of them serve adapters for the mode."""
        assert spec.adapter is not None
        workers, without = self.pools.workers, self.pools.without_adapters
        needed = tuple(Role) if self._config.mode == "disaggregated" else (Role.DECODE,)
        for role in needed:
            ids = {worker.info.id for worker in workers if worker.info.role is role}
            # A choice with an earlier attempt was placed on a worker that serves adapters and may come back.
            if ids and ids <= without and (spec.attempt == 0 or is_late):
                raise Unsupported(
                    f"no {role} worker serves adapters such as {spec.adapter.name!r}; set engine.max_adapters, "
                    "and engine.runner to auto or transformers"
                )

    def _check_sampler(self, choice: Choice) -> None:
        if choice.is_of_unknown_sampler and len(self.pools.samplers) > 1:
            raise NoWorker(
                f"{choice.spec.sequence_id} cannot continue: the sampler that drew its tokens was not recorded, and "
                f"the workers have several ({', '.join(name or 'unnamed' for name in self.pools.samplers)}), which "
                "draw different tokens; send the request again from its start"
            )

    def _sampler_in_words(self, choice: Choice) -> str:
        """Return a phrase with the sampler that a choice needs if the pools have others, else an empty string."""
        only = choice.only_sampler
        if only is None or self.pools.samplers in ((), (only,)):
            return ""
        return f" with the sampler {only or 'of a release that does not name it'}, which has drawn the answer so far,"


def _most_trusted_first(candidates: list[Candidate], doubted: Collection[str]) -> Iterator[list[Candidate]]:
    """Yield sets of candidates from the most trusted to all.

    First all workers that are not doubted; then also the doubted workers of pools that have no other; then all. So if
    the only prefill worker is doubted, doubted decode workers are still avoided.
    """
    if doubted:
        undoubted = [c for c in candidates if c.worker_id not in doubted]
        yield undoubted
        roles = {c.role for c in undoubted}
        yield [c for c in candidates if c.worker_id not in doubted or c.role not in roles]
    yield candidates


def _answered_s(prompt: Prompt, prediction: Prediction) -> float:
    return prediction.ttft_s + prediction.exposed_s + prompt.num_expected_tokens * prediction.step_s

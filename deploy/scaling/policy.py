"""How many workers each pool should have: a pure function of what was measured, with its reasons in words.

Both pools are sized together, in workers' worth of work:

    prefill = time spent on prompts, wherever they were computed / time
    decode  = max(sequences / 0.7 of those that one worker decodes within the ITL objective, KV in use / 0.9 of its KV)
    backlog = time that the queue takes / TTFT objective

all of them times (requests that came / requests that were let in), for those refused were work as well. What a pool
needs over what it has is its utilisation. Little's law is in the measurements: sequences are arrivals times residence.
In mode `auto` workers that decode compute prompts beside, which spoils the time between their tokens; so prompts count
as work for the prefill pool.

A split is judged by the greatest utilisation of a pool, without the backlog: under overload `prefill` and `decode` are
of the same requests, those let in, so that their ratio stays true, while a queue says nothing of decoding. Decoding has
the wider margin, since a decode worker beyond its limit makes all of its answers late, and prompts beyond theirs are
refused one by one. A pool above the target gets workers from the other one, as long as that makes the greatest
utilisation smaller by a good deal, and only then (or if both together are too few, with the backlog) new ones.
Utilisation is the driver. Goodput saturates at 1 and tells nothing of slack, so it only guards: no worker is stopped
while requests miss their objectives.

What keeps it calm: measurements are smoothed, a change is followed by a cool-down, a worker is stopped only where one
less would be far below the target for long, and nothing is decided while a worker changes its role. Sizes are absolute
numbers worked out from the work there is, so that deciding twice for one reason orders the same thing twice. All that
is remembered is a `State`; a controller that lost it begins with a cool-down.

The signals are those of NVIDIA Dynamo's planner and llm-d's workload variant autoscaler (projected TTFT, KV use, ITL
against objectives; nothing started while something is about to be); the function with bounds and delays around it is
Ray Serve's scaling policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from baton.cluster import PoolScaling, Role
from baton.costs import ITL_TARGET, PRIOR, StepCosts

if TYPE_CHECKING:
    from baton.config import AutoscaleConfig
    from router.placement import Objective

ITL_LIMIT = 0.7
"""Share of the sequences with which a worker just keeps the objective: they come in bursts, and not evenly."""
KV_LIMIT = 0.9
"""Share of a worker's KV above which sequences wait or are preempted."""
SLACK = 0.7
"""A worker is stopped where the others would be at this share of the target: so far off that noise does not matter."""
BETTER = 0.85
"""Workers change their roles if the greatest utilisation falls to this share of what it is."""
MOST_REFUSED = 4.0
"""Requests that come for each that is let in, at most: a bound on what refusals can order."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Workers."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def of(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMeasured:
    """One pool in a window; what is measured is so of its ready workers."""

    desired: int
    """As was ordered last."""
    ready: int
    draining: int = 0
    prompt_load: float = 0.0
    """Workers' worth of time that went into computing prompts."""
    queued_tokens: int = 0
    """Of prompts; not computed at the window's end."""
    tokens_per_s: float = math.inf
    """Prompt tokens that one worker computes in a second."""
    num_sequences: float = 0.0
    """Held at a time, with those that are about to come."""
    num_context_tokens: float = 0.0
    """Of one of them."""
    kv_use: float = 0.0
    """Share of the KV blocks that sequences hold."""
    costs: StepCosts = PRIOR
    """Of one worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A window."""

    prefill: PoolMeasured
    decode: PoolMeasured
    met: int = 0
    """Requests that met their objectives."""
    missed: int = 0
    rejected: int = 0

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.prefill.desired, self.decode.desired)

    @property
    def num_requests(self) -> int:
        return self.met + self.missed + self.rejected

    @property
    def goodput(self) -> float:
        """Share of the requests that met their objectives; 1 where none came."""
        return self.met / self.num_requests if self.num_requests else 1.0


@dataclass(frozen=True, slots=True)
class Needs:
    """Workers that would be busy all the time."""

    prefill: float
    decode: float
    backlog: float = 0.0
    """Of prefill workers, until the queue is gone."""

    def utilisation(self, sizes: Sizes) -> float:
        """Of the pool that has the greater one. Without a prefill pool prompts are work for the other."""
        return max(self.utilisation_by_role(sizes).values())

    def utilisation_by_role(self, sizes: Sizes) -> dict[Role, float]:
        if not sizes.prefill:
            return {Role.PREFILL: 0.0, Role.DECODE: (self.prefill + self.decode) / sizes.decode}
        return {Role.PREFILL: self.prefill / sizes.prefill, Role.DECODE: self.decode / max(sizes.decode, 1)}

    def pressure(self, sizes: Sizes) -> float:
        """The same with the backlog."""
        return replace(self, prefill=self.prefill + self.backlog, backlog=0.0).utilisation(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the next decision has to know of those before it."""

    acted_s: float = -math.inf
    """When something was ordered last."""
    needs: Needs | None = None
    """Smoothed."""
    num_windows: int = 0
    """In `needs`."""
    quiet_since_s: float = math.inf
    """Since when the pools, as they are, could do without a worker; infinite: they cannot."""
    sizes: Sizes | None = None
    """Of the latest window; None: there was none. With others it counts anew how long they could."""

    @classmethod
    def fresh(cls, now_s: float) -> State:
        """Of a controller that has just begun, and knows not what was ordered before."""
        return cls(acted_s=now_s)


@dataclass(frozen=True, slots=True)
class Flips:
    """Workers that are to change their roles."""

    num: int
    role: Role
    """The new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Orders, in this order: `flips`, then the pools to `sizes`."""

    before: Sizes
    sizes: Sizes
    reasons: tuple[str, ...]
    """Sentences: what was measured, against which limit, and what follows."""
    needs: Needs
    """Of this window, as they are smoothed."""
    state: State
    """For the next decision."""

    @property
    def scaling(self) -> tuple[PoolScaling, ...]:
        """As others are told of it."""
        utilisation = self.needs.utilisation_by_role(self.before)
        return tuple(PoolScaling(role.value, utilisation[role], self.sizes.of(role)) for role in Role)

    @property
    def flips(self) -> Flips | None:
        """As many as one pool gives up and the other one lacks."""
        more_prefill, more_decode = self._more
        if (num := min(more_prefill, -more_decode)) > 0:
            return Flips(num, Role.PREFILL)
        if (num := min(-more_prefill, more_decode)) > 0:
            return Flips(num, Role.DECODE)
        return None

    @property
    def starts(self) -> Sizes:
        """After the flips."""
        prefill, decode = self._after_flips
        return Sizes(max(0, prefill), max(0, decode))

    @property
    def stops(self) -> Sizes:
        """After the flips."""
        prefill, decode = self._after_flips
        return Sizes(max(0, -prefill), max(0, -decode))

    @property
    def num_actions(self) -> int:
        """Workers that change."""
        return (self.flips.num if self.flips else 0) + self.starts.total + self.stops.total

    @property
    def _more(self) -> tuple[int, int]:
        return self.sizes.prefill - self.before.prefill, self.sizes.decode - self.before.decode

    @property
    def _after_flips(self) -> tuple[int, int]:
        prefill, decode = self._more
        if (flips := self.flips) is None:
            return prefill, decode
        to_prefill = flips.num if flips.role is Role.PREFILL else -flips.num
        return prefill - to_prefill, decode + to_prefill


def decide(
    measured: Measured, state: State, config: AutoscaleConfig, objective: Objective, now_s: float, mode: str = "auto"
) -> Decision:
    """Sizes for both pools.

    Args:
        objective: what most requests are held against.
        now_s: the window's end, on a clock that `state` shares.
        mode: the routers'; where they always aggregate, workers that decode are to do all the work.
    """
    latest, reasons = _needs(measured, objective)
    is_aggregated = mode == "aggregated"
    if is_aggregated:
        latest = Needs(0.0, latest.prefill + latest.backlog + latest.decode)
    state = _smoothed(state, latest, config)
    needs = state.needs or latest
    before, bounds = measured.sizes, _Bounds(config, measured, is_aggregated)
    pressure = needs.pressure(before) if before.decode else math.inf
    is_pressed = pressure > config.target_utilisation
    side = "above" if is_pressed else "within"
    reasons.append(
        f"{before} workers, for the work of {needs.prefill:.1f}:{needs.decode:.1f} and a backlog of "
        f"{needs.backlog:.1f}: the busier pool is at {pressure:.0%}, {side} the target of "
        f"{config.target_utilisation:.0%}."
    )
    smaller = None if is_pressed else bounds.one_less(needs, before)
    is_quiet = smaller is not None and needs.pressure(smaller) <= SLACK * config.target_utilisation
    since_s = state.quiet_since_s if state.sizes in (None, before) else now_s
    since_s = min(since_s, now_s) if is_quiet else math.inf
    state = replace(state, quiet_since_s=since_s, sizes=before)

    def order(sizes: Sizes, why: str) -> Decision:
        acted = replace(state, acted_s=now_s) if sizes != before else state
        return Decision(before=before, sizes=sizes, reasons=(*reasons, why), needs=needs, state=acted)

    if why := _why_wait(measured, state, config, now_s):
        return order(before, why)
    if not bounds.allow(before):
        sizes = bounds.best(needs, before, bounds.clip(before.total))
        return order(sizes, f"{before} is outside the bounds: {sizes}.")
    if is_pressed:
        return order(*_relieved(needs, before, bounds, measured, config.target_utilisation))
    if smaller is None or not is_quiet:
        return order(before, "Nothing to change.")
    if measured.goodput < config.goodput_target:
        return order(
            before,
            f"A worker could go, but {measured.goodput:.1%} of the requests met their objectives, less than "
            f"{config.goodput_target:.1%}: none is stopped.",
        )
    if now_s - since_s < config.scale_in_s:
        return order(
            before, f"A worker could go if that holds for {config.scale_in_s:g} s; so far {now_s - since_s:.0f} s."
        )
    return order(
        smaller,
        f"For {now_s - since_s:.0f} s {smaller} would have done, now at {needs.pressure(smaller):.0%}: one stops.",
    )


def _needs(measured: Measured, objective: Objective) -> tuple[Needs, list[str]]:
    """Of this window, and how they came about."""
    prefill, decode = measured.prefill, measured.decode
    let_in = measured.met + measured.missed
    refused = (
        min(measured.num_requests / let_in if let_in else MOST_REFUSED, MOST_REFUSED) if measured.rejected else 1.0
    )
    load = prefill.prompt_load + decode.prompt_load
    queue_s = sum(pool.queued_tokens / pool.tokens_per_s for pool in (prefill, decode))
    batch = sequences_within(decode.costs, objective.itl_s, decode.num_context_tokens)
    by_itl = decode.num_sequences / (ITL_LIMIT * batch)
    by_kv = decode.kv_use * decode.ready / KV_LIMIT
    num_ready = prefill.ready or max(decode.ready, 1)
    reasons = [
        f"prefill: prompts took {load:.2f} workers' time, {decode.prompt_load:.2f} of it on workers that decode; what "
        f"is queued takes {num_ready} workers {queue_s / num_ready:.1f} s, of {objective.ttft_s:g} s to the first "
        "token.",
        f"decode: {decode.num_sequences:.0f} sequences of {decode.num_context_tokens:.0f} tokens, of which a worker "
        f"decodes {batch:.0f} with {objective.itl_s * 1e3:g} ms between tokens; {decode.kv_use:.0%} of the KV in use, "
        f"of {KV_LIMIT:.0%}.",
        f"requests: {measured.met} met their objectives, {measured.missed} missed them, {measured.rejected} refused"
        + (f", so there is {refused:.2f} times the work." if refused > 1 else "."),
    ]
    return Needs(load * refused, max(by_itl, by_kv) * refused, queue_s / objective.ttft_s * refused), reasons


def sequences_within(costs: StepCosts, itl_s: float, num_context_tokens: float) -> float:
    """How many sequences one worker decodes with steps that keep the objective; at least 1."""
    room_s = ITL_TARGET * itl_s - costs.s_overhead
    s_per_sequence = costs.s_per_sequence + costs.s_per_kv_token * num_context_tokens
    with_weights = (room_s - costs.s_weights) / s_per_sequence if s_per_sequence else math.inf
    computing = room_s / (s_per_sequence + costs.s_per_token) if s_per_sequence + costs.s_per_token else math.inf
    return max(1.0, min(with_weights, computing))


def _smoothed(state: State, latest: Needs, config: AutoscaleConfig) -> State:
    """The mean of the windows so far, and then a moving average over the cool-down."""
    num_windows = state.num_windows + 1
    if state.needs is None:
        return replace(state, needs=latest, num_windows=num_windows)
    weight = max(1 / num_windows, min(1.0, config.window_s / config.cool_down_s))
    old = state.needs
    smoothed = (
        getattr(old, field.name) + weight * (getattr(latest, field.name) - getattr(old, field.name))
        for field in fields(Needs)
    )
    return replace(state, needs=Needs(*smoothed), num_windows=num_windows)


def _why_wait(measured: Measured, state: State, config: AutoscaleConfig, now_s: float) -> str:
    """Why nothing is to be changed now, whatever is measured; empty: no reason."""
    if num := measured.prefill.draining + measured.decode.draining:
        return f"{num} workers are leaving their pool: nothing changes meanwhile."
    if not measured.prefill.ready + measured.decode.ready:
        return "No worker is ready, so nothing was measured."
    if (rest_s := state.acted_s + config.cool_down_s - now_s) > 0:
        return f"Nothing changes for another {rest_s:.0f} s after what was ordered last, or after the start."
    return ""


def _relieved(needs: Needs, before: Sizes, bounds: _Bounds, measured: Measured, target: float) -> tuple[Sizes, str]:
    """More workers for the pool that is pressed, from the other one as far as that helps."""
    wanted = bounds.num_workers(needs, target)
    num_coming = before.total - measured.prefill.ready - measured.decode.ready
    total = bounds.clip(before.total if num_coming > 0 else max(before.total, wanted))
    sizes = bounds.best(needs, before, total)
    utilisation, after = needs.utilisation(before), needs.utilisation(sizes)
    if total <= before.total and after > BETTER * utilisation:
        why = (
            f"{num_coming} workers are still to come" if num_coming > 0 else f"{before.total} workers are all there are"
        )
        return before, f"No split does much better ({sizes}: {after:.0%}), and {why}: nothing changes."
    return sizes, f"{sizes} brings the busier pool from {utilisation:.0%} to {after:.0%}, the backlog left out."


@dataclass(frozen=True, slots=True)
class _Bounds:
    config: AutoscaleConfig
    measured: Measured
    is_aggregated: bool
    """Nobody uses the prefill pool: workers may go from there, and none comes."""

    @property
    def _most(self) -> int:
        return self.config.max_workers or max(self.measured.sizes.total, self._min_prefill + self.config.min_decode)

    @property
    def _min_prefill(self) -> int:
        return 0 if self.is_aggregated else self.config.min_prefill

    @property
    def _max_prefill(self) -> int:
        most = self.config.max_prefill or self._most
        return min(most, self.measured.sizes.prefill) if self.is_aggregated else most

    @property
    def _max_decode(self) -> int:
        return self.config.max_decode or self._most

    def clip(self, total: int) -> int:
        most = min(self._most, self._max_prefill + self._max_decode)
        return max(self._min_prefill + self.config.min_decode, min(total, most))

    def num_workers(self, needs: Needs, utilisation: float) -> int:
        """For which no pool is above it, backlog and all, as far as the bounds go."""
        prefill = math.ceil((needs.prefill + needs.backlog) / utilisation)
        decode = math.ceil(needs.decode / utilisation)
        return max(self._min_prefill, prefill) + max(self.config.min_decode, decode)

    def allow(self, sizes: Sizes) -> bool:
        in_prefill = self._min_prefill <= sizes.prefill <= self._max_prefill
        in_decode = self.config.min_decode <= sizes.decode <= self._max_decode
        return in_prefill and in_decode and sizes.total <= self._most

    def best(self, needs: Needs, before: Sizes, total: int) -> Sizes:
        """The split of `total` workers with the least utilisation; of equal ones that which changes least."""
        splits = (Sizes(prefill, total - prefill) for prefill in range(total))
        return min(
            filter(self.allow, splits),
            key=lambda sizes: (round(needs.utilisation(sizes), 3), abs(sizes.prefill - before.prefill)),
        )

    def one_less(self, needs: Needs, before: Sizes) -> Sizes | None:
        """None: the bounds forbid it."""
        if not self.config.max_workers:
            return None  # who is stopped could not be started again
        found = [Sizes(before.prefill - 1, before.decode), Sizes(before.prefill, before.decode - 1)]
        allowed = [sizes for sizes in found if min(sizes.prefill, sizes.decode) >= 0 and self.allow(sizes)]
        return min(allowed, key=needs.utilisation, default=None)

"""Scaling policy: a pure function from measurements to the sizes of both pools, with its reasons in words.

Both pools are sized together. Load is measured in numbers of fully busy workers:

    prefill = time spent on prompts, on any worker / time
    decode  = max(sequences / 0.7 of those that one worker decodes within the ITL objective, KV in use / 0.9 of its KV)
    backlog = time to compute the queue / TTFT objective

Each is multiplied by (requests that arrived / requests that were admitted), because refused requests are load as well.
A pool's utilisation is its need divided by its size. Little's law is in the measurements: sequences are arrivals times
residence. In mode `auto` decode workers also compute prompts, which delays their tokens; so prompts count as load of
the prefill pool.

A distribution of workers is judged by the greatest utilisation of a pool, without the backlog. Under overload `prefill`
and `decode` come from the same admitted requests, so their ratio stays correct, while a queue contains no information
on
decoding. Decoding has the wider margin: a decode worker above its limit delays all of its responses, whereas excess
prompts are refused one by one. A pool above the target first gets workers from the other one, if that lowers the
greatest utilisation noticeably. Otherwise, or if both together are too small with the backlog, it gets new ones.
Utilisation
determines the sizes. Goodput saturates at 1 and does not show slack, so it is only a guard: no worker is stopped while
requests miss their objectives.

To prevent oscillation, measurements are smoothed, a cool-down follows every change, a worker is stopped only if the
pools would have stayed far below the target without it for a long time, and nothing is decided during a change of role.

The policy never empties the decode pool, because an empty pool shows no demand; nor does it fill an empty one. A model
that may sleep (`autoscale.min_decode` 0) stops its last workers if `deploy.scaling.idleness` says so, and the routers'
requests start them again.

Sizes are absolute numbers derived from the load, so a repeated decision gives the same result. The only memory is a
`PolicyState`; a controller that has lost it starts with a cool-down.

The signals are those of NVIDIA Dynamo's planner and llm-d's workload variant autoscaler (projected TTFT, KV use, ITL
against objectives; no start while another one is in progress). The function with bounds and delays around it follows
Ray Serve's scaling policy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from baton.costs import ITL_TARGET, StepCosts
from deploy.scaling.values import Measured, Needs, PolicyState, ScalingDecision, Sizes

if TYPE_CHECKING:
    from baton.config import AutoscaleConfig
    from router.placement import Objective

ITL_LIMIT = 0.7
"""Share of the sequences with which a worker just meets the objective, because arrivals are bursty and uneven."""
KV_LIMIT = 0.9
"""Share of a worker's KV above which sequences wait or are preempted."""
SLACK = 0.7
"""A worker is stopped if the others would then be at this share of the target, so low that noise does not matter."""
BETTER = 0.85
"""Workers change their roles if the greatest utilisation falls to this share of its current value."""
MOST_REFUSED = 4.0
"""Maximum ratio of arrived to admitted requests: it limits the influence of refusals."""


def decide(
    measured: Measured,
    state: PolicyState,
    config: AutoscaleConfig,
    objective: Objective,
    now_s: float,
    *,
    mode: str = "auto",
) -> ScalingDecision:
    """Decide the sizes of both pools.

    Args:
        objective: the objective to size for.
        now_s: end of the window, on the clock of `state`.
        mode: the routers' mode; in `aggregated`, decode workers do all the work; in `disaggregated` the prefill pool is
            never empty.
    """
    if not measured.decode.desired:
        return _empty(measured.sizes, now_s)
    latest, reasons = _needs(measured, objective)
    is_aggregated = mode == "aggregated"
    if is_aggregated:
        latest = Needs(0.0, latest.prefill + latest.backlog + latest.decode)
    state = _smoothed(state, latest, config)
    needs = state.needs or latest
    before, bounds = measured.sizes, _Bounds(config, measured, mode)
    pressure = needs.pressure(before)
    is_pressed = pressure > config.target_utilisation
    reasons.append(_in_words(needs, before, pressure, config.target_utilisation))
    smaller = None if is_pressed else bounds.one_less(needs, before)
    is_quiet = smaller is not None and needs.pressure(smaller) <= SLACK * config.target_utilisation
    since_s = state.quiet_since_s if state.sizes in (None, before) else now_s
    since_s = min(since_s, now_s) if is_quiet else math.inf
    state = replace(state, quiet_since_s=since_s, sizes=before)

    def order(sizes: Sizes, why: str) -> ScalingDecision:
        acted = replace(state, acted_s=now_s) if sizes != before else state
        return ScalingDecision(before=before, sizes=sizes, reasons=(*reasons, why), needs=needs, state=acted)

    if why := _why_wait(measured, state, config, now_s):
        return order(before, why)
    if not bounds.allow(before):
        sizes = bounds.best(needs, before, bounds.clip(before.total))
        return order(sizes, f"{before} is outside the bounds: {sizes}.")
    if is_pressed:
        return order(*_relieved(needs, before, bounds, measured, config.target_utilisation))
    if smaller is None or not is_quiet:
        return order(before, "Nothing to change.")
    if why := _why_keep(measured, config, now_s - since_s):
        return order(before, why)
    return order(
        smaller,
        f"For {now_s - since_s:.0f} s {smaller} was enough, now at {needs.pressure(smaller):.0%}: one stops.",
    )


def to_sleep(decision: ScalingDecision, idle_s: float, now_s: float) -> ScalingDecision:
    """Return the decision to stop all workers, in place of one that follows the load.

    Args:
        idle_s: time without a request.
    """
    why = f"No request has arrived for {idle_s:.0f} s, so the model sleeps until the next one (autoscale.idle_s)."
    return replace(decision, sizes=Sizes(0, 0), reasons=(why,), state=PolicyState.fresh(now_s), may_flip=False)


def _empty(sizes: Sizes, now_s: float) -> ScalingDecision:
    """Return the decision for a model without decode workers, which is asleep, or was stopped by an operator."""
    why = "The decode pool should be empty: the model is asleep, or an operator has stopped it. Nothing changes."
    state = PolicyState.fresh(now_s)
    return ScalingDecision(before=sizes, sizes=sizes, reasons=(why,), needs=Needs(0.0, 0.0), state=state)


def _in_words(needs: Needs, sizes: Sizes, pressure: float, target: float) -> str:
    """Describe the pools' utilisation in relation to the target."""
    side = "above" if pressure > target else "within"
    return (
        f"{sizes} workers, for the work of {needs.prefill:.1f}:{needs.decode:.1f} and a backlog of "
        f"{needs.backlog:.1f}: the busier pool is at {pressure:.0%}, {side} the target of {target:.0%}."
    )


def _needs(measured: Measured, objective: Objective) -> tuple[Needs, list[str]]:
    """Return the needs in this window, and their derivation in words."""
    prefill, decode = measured.prefill, measured.decode
    admitted = measured.met + measured.missed
    refused = (
        min(measured.num_requests / admitted if admitted else MOST_REFUSED, MOST_REFUSED) if measured.rejected else 1.0
    )
    load = prefill.prompt_load + decode.prompt_load
    queue_s = sum(pool.queued_tokens / pool.tokens_per_s for pool in (prefill, decode))
    batch = sequences_within(decode.costs, objective.itl_s, decode.num_context_tokens)
    by_itl = decode.num_sequences / (ITL_LIMIT * batch)
    by_kv = decode.kv_use * decode.ready / KV_LIMIT
    num_ready = prefill.ready or max(decode.ready, 1)
    reasons = [
        f"prefill: prompts took {load:.2f} workers' time, {decode.prompt_load:.2f} of it on workers that decode; the "
        f"queue takes {queue_s / num_ready:.1f} s on the workers that compute prompts ({num_ready}), of "
        f"{objective.ttft_s:g} s to the first token.",
        f"decode: {decode.num_sequences:.0f} sequences of {decode.num_context_tokens:.0f} tokens, of which a worker "
        f"decodes {batch:.0f} with {objective.itl_s * 1e3:g} ms between tokens; {decode.kv_use:.0%} of the KV in use, "
        f"of {KV_LIMIT:.0%}.",
        f"requests: {measured.met} met their objectives, {measured.missed} missed them, {measured.rejected} refused"
        + (f", so there is {refused:.2f} times the work." if refused > 1 else "."),
    ]
    return Needs(load * refused, max(by_itl, by_kv) * refused, queue_s / objective.ttft_s * refused), reasons


def sequences_within(costs: StepCosts, itl_s: float, num_context_tokens: float) -> float:
    """Return how many sequences one worker decodes in steps that meet the objective; at least 1."""
    room_s = ITL_TARGET * itl_s - costs.s_overhead
    s_per_sequence = costs.s_per_sequence + costs.s_per_kv_token * num_context_tokens
    with_weights = (room_s - costs.s_weights) / s_per_sequence if s_per_sequence else math.inf
    computing = room_s / (s_per_sequence + costs.s_per_token) if s_per_sequence + costs.s_per_token else math.inf
    return max(1.0, min(with_weights, computing))


def _smoothed(state: PolicyState, latest: Needs, config: AutoscaleConfig) -> PolicyState:
    """Return the state with smoothed needs: the mean of all windows, later a moving average over the cool-down."""
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


def _why_wait(measured: Measured, state: PolicyState, config: AutoscaleConfig, now_s: float) -> str:
    """Return the reason why nothing may change now, independent of the measurements; empty: there is none."""
    if num := measured.prefill.draining + measured.decode.draining:
        return f"{num} workers are leaving their pool: nothing changes meanwhile."
    if not measured.prefill.ready + measured.decode.ready:
        return "No worker is ready, so nothing was measured."
    if (rest_s := state.acted_s + config.cool_down_s - now_s) > 0:
        return f"Nothing changes for another {rest_s:.0f} s after what was ordered last, or after the start."
    return ""


def _why_keep(measured: Measured, config: AutoscaleConfig, quiet_s: float) -> str:
    """Return the reason why a surplus worker is not stopped yet; empty: there is none.

    Args:
        quiet_s: time for which the pools have had it.
    """
    if measured.goodput < config.goodput_target:
        return (
            f"A worker could go, but {measured.goodput:.1%} of the requests met their objectives, less than "
            f"{config.goodput_target:.1%}: none is stopped."
        )
    if quiet_s < config.scale_in_s:
        return f"A worker could go if that holds for {config.scale_in_s:g} s; so far {quiet_s:.0f} s."
    return ""


def _relieved(needs: Needs, before: Sizes, bounds: _Bounds, measured: Measured, target: float) -> tuple[Sizes, str]:
    """Return sizes with more workers for the overloaded pool, taken from the other one as far as that helps."""
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
    mode: str

    @property
    def _is_aggregated(self) -> bool:
        """True if the prefill pool is unused: workers may leave it, but none joins."""
        return self.mode == "aggregated"

    @property
    def _most(self) -> int:
        return self.config.max_workers or max(self.measured.sizes.total, self._min_prefill + self._min_decode)

    @property
    def _min_prefill(self) -> int:
        return 0 if self._is_aggregated else max(self.config.min_prefill, int(self.mode == "disaggregated"))

    @property
    def _min_decode(self) -> int:
        return max(self.config.min_decode, 1)

    @property
    def _max_prefill(self) -> int:
        most = self.config.max_prefill or self._most
        return min(most, self.measured.sizes.prefill) if self._is_aggregated else most

    @property
    def _max_decode(self) -> int:
        return self.config.max_decode or self._most

    def clip(self, total: int) -> int:
        most = min(self._most, self._max_prefill + self._max_decode)
        return max(self._min_prefill + self._min_decode, min(total, most))

    def num_workers(self, needs: Needs, utilisation: float) -> int:
        """Return the total for which no pool exceeds the target, including the backlog, within the bounds."""
        prefill = math.ceil((needs.prefill + needs.backlog) / utilisation)
        decode = math.ceil(needs.decode / utilisation)
        return max(self._min_prefill, prefill) + max(self._min_decode, decode)

    def allow(self, sizes: Sizes) -> bool:
        in_prefill = self._min_prefill <= sizes.prefill <= self._max_prefill
        in_decode = self._min_decode <= sizes.decode <= self._max_decode
        return in_prefill and in_decode and sizes.total <= self._most

    def best(self, needs: Needs, before: Sizes, total: int) -> Sizes:
        """Return the distribution of `total` workers with the lowest utilisation, then the fewest changes."""
        splits = (Sizes(prefill, total - prefill) for prefill in range(total))
        return min(
            filter(self.allow, splits),
            key=lambda sizes: (round(needs.utilisation(sizes), 3), abs(sizes.prefill - before.prefill)),
        )

    def one_less(self, needs: Needs, before: Sizes) -> Sizes | None:
        """Return the best sizes with one worker less; None if the bounds forbid them."""
        if not self.config.max_workers:
            return None  # a stopped worker could not be restarted
        found = [Sizes(before.prefill - 1, before.decode), Sizes(before.prefill, before.decode - 1)]
        allowed = [sizes for sizes in found if min(sizes.prefill, sizes.decode) >= 0 and self.allow(sizes)]
        return min(allowed, key=needs.utilisation, default=None)

"""What a cluster's work costs, as the simulator counts it: from what its workers say of themselves and clients saw.

Steps the workers have fitted. The rest a client can tell from the times of its requests:

    due ─ request's overhead ─> queue, admission, prefill ─> first token ─ exposed transfer ─> step, gap, step, gap, ...
"""

from __future__ import annotations

import statistics
from dataclasses import astuple
from typing import TYPE_CHECKING

from baton.costs import StepCosts
from baton.fit import CostFit
from deploy.simulate.costs import CostModel
from router.placement.policy import DEFAULT_PRICES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deploy.bench.connection import ServingWorker
    from deploy.bench.replay import Observed


def cost_model(served: Sequence[Observed], workers: Sequence[ServingWorker]) -> CostModel | None:
    """None where no worker told its costs."""
    by_role = {role: median_costs([w.costs for w in workers if w.role == role]) for role in ("prefill", "decode")}
    steps = by_role["decode"]
    if steps is None:
        return None
    latency_s, s_per_token = _transfer(served)
    return CostModel(
        steps,
        latency_s,
        s_per_token,
        prefill_steps=by_role["prefill"],
        request_overhead_s=request_overhead_s(served),
        prompt_step_s=prompt_step_s(served, steps, min(w.chunk_tokens for w in workers)),
    )


def median_costs(costs: Sequence[StepCosts]) -> StepCosts | None:
    """By coefficient; None of none."""
    return StepCosts(*map(statistics.median, zip(*map(astuple, costs), strict=True))) if costs else None


def request_overhead_s(served: Sequence[Observed]) -> float:
    """What a first token takes besides waiting and computing: calls, tokens written and read. Median over requests."""
    overheads = [
        one.token_times[0][0] - one.sent_s - one.timing.queue_s - one.timing.admission_s - one.timing.prefill_s
        for one in served
        if one.timing is not None
    ]
    return max(0.0, statistics.median(overheads)) if overheads else 0.0


def prompt_step_s(served: Sequence[Observed], steps: StepCosts, chunk_tokens: int) -> float:
    """What a decode worker's steps with a prompt take beyond what `steps` says. Median over prompts of one step, beside
    which no other was computed there; those of up to half a chunk count as one step.
    """
    extras = []
    for one in served:
        if one.usage is None or not _computes_where_it_decodes(one):
            continue
        num_new = one.usage.prompt_tokens - one.usage.cached_tokens
        began_s, ended_s = _prefill(one)
        beside = [other for other in served if other is not one and _worker(other) == _worker(one)]
        prompts = [_prefill(other) for other in beside if _computes_where_it_decodes(other)]
        if num_new > chunk_tokens // 2 or any(began < ended_s and ended > began_s for began, ended in prompts):
            continue
        decoding = [other for other in beside if other.token_times[0][0] <= began_s < other.token_times[-1][0]]
        num_kv_tokens = sum(other.request.num_prompt_tokens for other in decoding)
        num_pairs = num_new * (one.usage.prompt_tokens + one.usage.cached_tokens) // 2
        step_s = steps.step_s(len(decoding) + num_new, num_pairs, len(decoding), num_kv_tokens)
        extras.append(ended_s - began_s - step_s)
    return max(0.0, statistics.median(extras)) if extras else 0.0


def _computes_where_it_decodes(one: Observed) -> bool:
    return one.timing is not None and not one.timing.prefill_worker


def _worker(one: Observed) -> str:
    return one.timing.decode_worker if one.timing is not None else ""


def _prefill(one: Observed) -> tuple[float, float]:
    """From its admission to its first token, which has come to the client."""
    ended_s = one.token_times[0][0]
    return ended_s - (one.timing.prefill_s if one.timing is not None else 0.0), ended_s


def _transfer(served: Sequence[Observed]) -> tuple[float, float]:
    """Seconds, and seconds a token, of hand-overs: the part that no computing hid, which is all that a client sees."""
    fit = CostFit((DEFAULT_PRICES.exposed_s, DEFAULT_PRICES.pull_s_per_token))
    for one in served:
        if one.timing is not None and one.timing.transfer_s > 0:
            fit.observe((1.0, one.request.num_prompt_tokens), one.timing.transfer_s)
    latency_s, s_per_token = fit.coefficients
    return latency_s, s_per_token

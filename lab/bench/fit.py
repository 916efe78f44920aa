"""Costs of a cluster in the simulator's terms, from its workers' own models and the clients' measurements.

The workers have fitted the costs of steps. The other costs follow from the times of the requests:

    due ─ request's overhead ─> queue, admission, prefill ─> first token ─ exposed transfer ─> step, gap, step, gap, ...
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING

from baton.costs import StepCosts, StepSize
from baton.fit import CostFit
from lab.simulate.costs import CostModel
from router.placement.policy import DEFAULT_PRICES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lab.bench.connection import ServingWorker
    from lab.bench.replay import ReplayedRequest

RANGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Upper bounds of the ranges of sequence counts that are evaluated together."""
OFTEN = 20
"""Number of measurements that a range needs to count."""
JITTER = 0.1
"""Share of an interval by which clients may see its ends too early or too late."""


def cost_model(served: Sequence[ReplayedRequest], workers: Sequence[ServingWorker]) -> CostModel | None:
    """Return the cost model of the cluster; None: no worker has reported its costs."""
    by_role = {role: median_costs([w.costs for w in workers if w.role == role]) for role in ("prefill", "decode")}
    steps = by_role["decode"]
    if steps is None:
        return None
    latency_s, s_per_token = _transfer(served)
    model = CostModel(
        steps=steps,
        transfer_latency_s=latency_s,
        transfer_s_per_token=s_per_token,
        prefill_steps=by_role["prefill"],
        request_overhead_s=request_overhead_s(served),
        decoding_s=decoding_s(served, steps),
    )
    return replace(model, prompt_step_s=prompt_step_s(served, model, min(w.chunk_tokens for w in workers)))


def median_costs(costs: Sequence[StepCosts]) -> StepCosts | None:
    """Return the median of each coefficient; None: there are no models."""
    if not costs:
        return None
    return StepCosts(**{name: statistics.median(getattr(of, name) for of in costs) for name in StepCosts.__slots__})


def request_overhead_s(served: Sequence[ReplayedRequest]) -> float:
    """Return the time of a first token other than waiting and computing, as a median over requests.

    It includes calls, and writing and reading tokens.
    """
    overheads = [
        one.token_times[0][0] - one.sent_s - one.timing.queue_s - one.timing.admission_s - one.timing.prefill_s
        for one in served
        if one.timing is not None
    ]
    return max(0.0, statistics.median(overheads)) if overheads else 0.0


def decoding_s(served: Sequence[ReplayedRequest], steps: StepCosts) -> tuple[tuple[int, float], ...]:
    """Return the time of decoding beyond `steps`: `(sequences, seconds)` for each of `RANGES` with enough measurements.

    The values are medians over the intervals between two tokens of a sequence in which its worker computed no prompt. A
    matrix product on a CPU may cost less for 16 rows than for 12, which a linear model cannot show.
    """
    beyond: dict[int, list[tuple[int, float]]] = {}
    by_worker: dict[str, list[ReplayedRequest]] = {}
    for one in served:
        by_worker.setdefault(_worker(one), []).append(one)
    for here in by_worker.values():
        decoding = _SpanCounter((one.token_times[0][0], one.token_times[-1][0], _context(one)) for one in here)
        computing = _SpanCounter((*_prefill(one), 0.0) for one in here if _computes_where_it_decodes(one))
        for one in here:
            # The first interval includes the KV transfer.
            for (began_s, _), (ended_s, num_tokens) in itertools.pairwise(one.token_times[1:]):
                margin_s = JITTER * (ended_s - began_s)
                if num_tokens > 1 or computing.between(began_s + margin_s, ended_s - margin_s)[0]:
                    continue
                number, context = decoding.between(middle := (began_s + ended_s) / 2, middle)
                predicted_s = steps.step_s(number, 0, number, int(context))
                seen = beyond.setdefault(bisect.bisect_left(RANGES, number), [])
                seen.append((number, ended_s - began_s - predicted_s))
    return tuple(
        (statistics.median_low(number for number, _ in seen), statistics.median(seconds for _, seconds in seen))
        for _, seen in sorted(beyond.items())
        if len(seen) >= OFTEN
    )


class _SpanCounter:
    """Counts how many of some time spans `(began_s, ended_s, weight)` overlap another span, and sums their weights."""

    def __init__(self, spans: Iterable[tuple[float, float, float]]) -> None:
        spans = list(spans)
        self._began, self._begun = self._summed((began_s, weight) for began_s, _, weight in spans)
        self._ended, self._gone = self._summed((ended_s, weight) for _, ended_s, weight in spans)

    def between(self, began_s: float, ended_s: float) -> tuple[int, float]:
        """Return number and total weight of the spans that started before `ended_s` and were not over at `began_s`."""
        begun, gone = bisect.bisect_left(self._began, ended_s), bisect.bisect_right(self._ended, began_s)
        return begun - gone, self._begun[begun] - self._gone[gone]

    @staticmethod
    def _summed(events: Iterable[tuple[float, float]]) -> tuple[list[float], list[float]]:
        events = sorted(events)
        return [time_s for time_s, _ in events], [0.0, *itertools.accumulate(weight for _, weight in events)]


def _context(one: ReplayedRequest) -> float:
    """Return the mean context length of a sequence while it decodes, in tokens."""
    return one.request.num_prompt_tokens + one.request.num_output_tokens / 2


def prompt_step_s(served: Sequence[ReplayedRequest], model: CostModel, chunk_tokens: int) -> float:
    """Return the additional time of a decode worker's step with a prompt, beyond `model`.

    It is the median over prompts of one step (at most half a chunk) that were alone on the worker.
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
        size = StepSize(
            num_new=len(decoding) + num_new,
            num_pairs=num_pairs,
            num_decoding=len(decoding),
            num_kv_tokens=num_kv_tokens,
        )
        extras.append(ended_s - began_s - model.step_s(size))
    return max(0.0, statistics.median(extras)) if extras else 0.0


def _computes_where_it_decodes(one: ReplayedRequest) -> bool:
    return one.timing is not None and not one.timing.prefill_worker


def _worker(one: ReplayedRequest) -> str:
    return one.timing.decode_worker if one.timing is not None else ""


def _prefill(one: ReplayedRequest) -> tuple[float, float]:
    """Return the time from its admission until its first token reached the client."""
    ended_s = one.token_times[0][0]
    return ended_s - (one.timing.prefill_s if one.timing is not None else 0.0), ended_s


def _transfer(served: Sequence[ReplayedRequest]) -> tuple[float, float]:
    """Return the seconds, and the seconds per token, of KV transfers that were not hidden behind computation."""
    fit = CostFit((DEFAULT_PRICES.exposed_s, DEFAULT_PRICES.pull_s_per_token))
    for one in served:
        if one.timing is not None and one.timing.transfer_s > 0:
            fit.observe((1.0, one.request.num_prompt_tokens), one.timing.transfer_s)
    latency_s, s_per_token = fit.coefficients
    return latency_s, s_per_token

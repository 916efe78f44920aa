"""What a run came to, in the figures by which routers are judged."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deploy.simulate.world import Served, World

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is good when both hold."""

    ttft_s: float
    itl_s: float
    """Mean over the answer."""


@dataclass(frozen=True, slots=True)
class Result:
    """One policy on one trace. Quantiles are those of QUANTILES."""

    policy: str
    num_requests: int
    hit_rate: float
    """Prompt tokens that were not computed, because a cache had them or another worker's did."""
    imbalance: float
    """Most over mean of the prompt tokens that the workers which compute prompts computed."""
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    """Of single intervals between tokens."""
    goodput_per_s: float
    """Requests that met the objective, by the second of the trace."""
    good_share: float
    busy_share: float
    """Of the workers' time until the last request was done."""
    num_preemptions: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def result_of(policy: str, world: World, served: Sequence[Served], objective: Objective) -> Result:
    num_prompt_tokens = sum(s.request.num_prompt_tokens for s in served)
    num_cached_tokens = sum(s.num_cached_tokens for s in served)
    computing = [worker.computed_tokens for worker in world.computing]
    num_good = sum(s.ttft_s <= objective.ttft_s and s.itl_s <= objective.itl_s for s in served)
    lasted_s = max(s.finished_s for s in served)
    arrived_s = served[-1].request.arrival_s or lasted_s
    return Result(
        policy=policy,
        num_requests=len(served),
        hit_rate=num_cached_tokens / num_prompt_tokens,
        imbalance=max(computing) * len(computing) / max(1, sum(computing)),
        ttft_s=quantiles((s.ttft_s, 1) for s in served),
        itl_s=quantiles(interval for s in served for interval in s.intervals),
        goodput_per_s=num_good / arrived_s,
        good_share=num_good / len(served),
        busy_share=sum(worker.busy_s for worker in world.workers) / (lasted_s * len(world.workers)),
        num_preemptions=sum(worker.engine.scheduler.num_preemptions for worker in world.workers),
    )


def quantiles(values: Iterable[tuple[float, int]]) -> tuple[float, ...]:
    """QUANTILES of values that come with how often each occurred; the least value that covers the share."""
    counts: Counter[float] = Counter()
    for value, count in values:
        counts[value] += count
    if not counts:
        return tuple(0.0 for _ in QUANTILES)
    ordered = sorted(counts)
    reached = list(accumulate(counts[value] for value in ordered))
    return tuple(
        next(value for value, num in zip(ordered, reached, strict=True) if num >= share * reached[-1])
        for share in QUANTILES
    )


def table_of(title: str, ceiling: float, results: Sequence[Result]) -> Table:
    """One row a policy, best goodput first; 80 columns wide."""
    table = Table(
        title=title,
        caption=f"A cache without limit hits {ceiling:.3f}. Times: p50/p90/p99. good: objectives met.",
        box=None,
        pad_edge=False,
    )
    table.add_column("policy")
    for heading in ("hit", "imb.", "TTFT s", "ITL ms", "good/s", "good"):
        table.add_column(heading, justify="right")
    for result in sorted(results, key=lambda r: -r.goodput_per_s):
        table.add_row(
            result.policy,
            f"{result.hit_rate:.3f}",
            f"{result.imbalance:.2f}",
            "/".join(f"{value:.2f}" for value in result.ttft_s),
            "/".join(f"{value * 1e3:.0f}" for value in result.itl_s),
            f"{result.goodput_per_s:.2f}",
            f"{result.good_share:.1%}",
        )
    return table

"""Result of a run, in the figures by which routers are compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rich.table import Table

from router.placement import Objective

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lab.simulate.flight import Served
    from lab.simulate.world import World

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a run, simulated or real. Quantiles are those of QUANTILES."""

    num_requests: int
    hit_rate: float
    """Share of prompt tokens that were not computed, because they were cached or pulled from another worker."""
    imbalance: float
    """Maximum over mean of the prompt tokens computed per worker, over the workers that compute prompts."""
    ttft_s: tuple[float, ...]
    itl_s: tuple[float, ...]
    """Quantiles of the intervals between two tokens."""
    goodput_per_s: float
    """Requests per second of the trace that met the objective."""
    good_share: float

    def cells(self) -> tuple[str, ...]:
        """Return the cells for the columns of `figure_table`."""
        return (
            f"{self.hit_rate:.3f}",
            f"{self.imbalance:.2f}",
            "/".join(f"{value:.2f}" for value in self.ttft_s),
            "/".join(f"{value * 1e3:.0f}" for value in self.itl_s),
            f"{self.goodput_per_s:.2f}",
            f"{self.good_share:.1%}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the pool sizes, each written as "PREFILL:DECODE"."""

    at_s: float
    before: str
    sizes: str
    num_actions: int
    """Workers started, stopped, or given another role."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Figures):
    """Figures of one policy on one trace."""

    policy: str
    busy_share: float
    """Share of the workers' time, until the last request ended, in which they were busy."""
    num_preemptions: int
    num_refused: int
    """Requests rejected by admission; figures other than goodput exclude them."""
    mean_workers: float
    """Mean number of workers that are ready or starting, until the last request was done."""
    num_moved: int = 0
    """Responses that migrated to another worker."""
    changes: tuple[Change, ...] = ()

    @property
    def num_actions(self) -> int:
        return sum(change.num_actions for change in self.changes)

    def as_dict(self) -> dict[str, Any]:
        return {"policy": self.policy, **asdict(self)}


def result_of(policy: str, world: World, served: Sequence[Served], objective: Objective) -> Result:
    admitted = [s for s in served if not s.is_refused]
    num_prompt_tokens = sum(s.request.num_prompt_tokens for s in admitted)
    num_cached_tokens = sum(s.num_cached_tokens for s in admitted)
    computing = [worker.computed_tokens for worker in world.computing]
    num_good = sum(s.ttft_s <= objective.ttft_s and s.itl_s <= objective.itl_s for s in admitted)
    lasted_s = max((s.finished_s for s in admitted), default=0.0) or 1.0
    arrived_s = served[-1].request.arrival_s or lasted_s
    worker_s = world.members.worker_seconds(lasted_s)
    return Result(
        policy=policy,
        num_requests=len(served),
        hit_rate=num_cached_tokens / max(1, num_prompt_tokens),
        imbalance=max(computing) * len(computing) / max(1, sum(computing)),
        ttft_s=quantiles((s.ttft_s, 1) for s in admitted),
        itl_s=quantiles(interval for s in admitted for interval in s.intervals),
        goodput_per_s=num_good / arrived_s,
        good_share=num_good / len(served),
        busy_share=sum(worker.busy_s for worker in world.workers) / worker_s,
        num_preemptions=sum(worker.engine.load().preemptions for worker in world.workers),
        num_refused=len(served) - len(admitted),
        mean_workers=worker_s / lasted_s,
        num_moved=world.num_moved,
        changes=tuple(
            Change(
                at_s=at_s,
                before=str(done.before),
                sizes=str(done.sizes),
                num_actions=done.num_actions,
                reasons=done.reasons,
            )
            for at_s, done in world.decisions
        ),
    )


def quantiles(values: Iterable[tuple[float, int]]) -> tuple[float, ...]:
    """Return the QUANTILES of weighted values: for each, the least value that covers the share."""
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
    """Return a table with one row per policy, best goodput first."""
    table = figure_table(title, ceiling, "policy")
    for result in sorted(results, key=lambda r: -r.goodput_per_s):
        table.add_row(result.policy, *result.cells())
    return table


def figure_table(title: str, ceiling: float, first_column: str) -> Table:
    """Return an empty table for rows of a name and `Figures.cells`; 80 columns wide."""
    table = Table(
        title=title,
        caption=f"A cache without limit hits {ceiling:.3f}. Times: p50/p90/p99. good: objectives met.",
        box=None,
        pad_edge=False,
    )
    table.add_column(first_column)
    for heading in ("hit", "imb.", "TTFT s", "ITL ms", "good/s", "good"):
        table.add_column(heading, justify="right")
    return table

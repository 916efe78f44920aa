"""Many runs: every policy at every load, with every division of the workers into pools."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from baton.errors import ConfigError
from lab.simulate.run import run_all
from lab.traces.shape import faster

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lab.simulate.report import Result
    from lab.simulate.run import Scenario


@dataclass(frozen=True, slots=True)
class Setting:
    load: float
    """Arrival rate, as a multiple of the scenario's."""
    prefill: int
    decode: int

    @property
    def pools(self) -> str:
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True)
class Cell:
    """Result of one run, with its setting."""

    setting: Setting
    result: Result
    pools_vary: bool

    @property
    def name(self) -> str:
        return f"{self.result.policy} {self.setting.pools}" if self.pools_vary else self.result.policy

    @property
    def goodput_per_worker(self) -> float:
        return self.result.goodput_per_s / (self.setting.prefill + self.setting.decode)

    def as_dict(self) -> dict[str, Any]:
        setting = self.setting
        return {
            "load": setting.load,
            "prefill": setting.prefill,
            "decode": setting.decode,
            "goodput_per_worker_per_s": self.goodput_per_worker,
            **self.result.as_dict(),
        }


def run_grid(policies: Sequence[str], settings: Sequence[Setting], scenario: Scenario, jobs: int) -> Iterator[Cell]:
    """Yield the results of every policy in every setting, in that order, each as soon as it is ready.

    Args:
        scenario: the base scenario; its pool sizes are ignored.
    """
    runs = [
        (policy, replace(scenario, trace=faster(scenario.trace, s.load), prefill=s.prefill, decode=s.decode))
        for s in settings
        for policy in policies
    ]
    where = [setting for setting in settings for _ in policies]
    vary = len({setting.pools for setting in settings}) > 1
    for s, result in zip(where, run_all(runs, jobs), strict=True):
        yield Cell(s, result, vary)


def pools_of(text: str) -> tuple[int, int]:
    """Return the numbers of prefill and decode workers of "P:D". Raise ConfigError if the text is invalid."""
    prefill, colon, decode = text.partition(":")
    if not (colon and prefill.isdecimal() and decode.isdecimal() and int(decode)):
        raise ConfigError(f"--pools takes PREFILL:DECODE, as in 3:5, got {text!r}")
    return int(prefill), int(decode)


def grid_table(title: str, cells: Sequence[Cell]) -> Table:
    """Return a table with one row per policy and load, best goodput of each load first; 80 columns wide."""
    table = Table(title=title, box=None, pad_edge=False, caption="good: within objectives; a worker: good/s for each.")
    table.add_column("load")
    table.add_column("policy")
    for heading in ("P:D", "hit", "TTFT p50/p90 s", "ITL p90 ms", "refused", "good/s", "a worker", "good"):
        table.add_column(heading, justify="right")
    for cell in sorted(cells, key=lambda c: (c.setting.load, -c.result.goodput_per_s)):
        result = cell.result
        table.add_row(
            f"{cell.setting.load:g}",
            result.policy,
            cell.setting.pools,
            f"{result.hit_rate:.3f}",
            f"{result.ttft_s[0]:.2f}/{result.ttft_s[1]:.2f}",
            f"{result.itl_s[1] * 1e3:.0f}",
            f"{result.num_refused / result.num_requests:.1%}",
            f"{result.goodput_per_s:.2f}",
            f"{cell.goodput_per_worker:.3f}",
            f"{result.good_share:.1%}",
        )
    return table

"""Runs policies on a trace, several at a time, each in its own process."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING

from baton.config import RouterConfig
from baton.errors import ConfigError
from lab.simulate.baselines import BASELINES
from lab.simulate.policy import TwoLegs
from lab.simulate.production import Production
from lab.simulate.report import Result, result_of
from lab.simulate.world import World
from router.placement import NO_OBJECTIVE, Objective, Prices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lab.simulate.costs import CostModel
    from lab.simulate.policy import Placer
    from lab.simulate.scaler import Scaling
    from lab.simulate.worker import WorkerShape
    from lab.traces.trace import Trace

POLICIES = (Production.name, *BASELINES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything except the policy."""

    trace: Trace
    shape: WorkerShape
    costs: CostModel
    of_prefill: tuple[WorkerShape, CostModel] | None = None
    """Shape and costs of the prefill pool's workers; None: both pools have `shape` and `costs`."""
    prefill: int
    """Number of prefill workers; 0: an aggregated pool."""
    decode: int
    objective: Objective
    seed: int = 0
    error: float = 1.0
    """Factor by which the router's cost estimates are wrong."""
    tells_all: bool = False
    """True if the workers receive the objectives under every policy, not only under this router's."""
    router: RouterConfig = field(default_factory=RouterConfig)
    scaling: Scaling | None = None
    """Autoscaler of the pools; None: they stay as they are."""
    knows_lengths: bool = False
    """True if requests ask for exactly the tokens that they get, as those of `baton bench` do, and the router knows
    it."""

    def __post_init__(self) -> None:
        if self.decode < 1 or self.prefill < 0:
            raise ConfigError(
                f"a pool needs a worker that decodes, got {self.prefill} prefill and {self.decode} decode"
            )
        shapes = [self.shape, *(self.of_prefill[:1] if self.of_prefill and self.prefill else ())]
        room = min(shape.num_blocks * shape.block_tokens for shape in shapes)
        longest = max(r.num_prompt_tokens + r.num_output_tokens for r in self.trace.requests)
        if longest > room:
            raise ConfigError(f"the trace has a request of {longest} tokens; a worker's blocks hold {room}")


def run_policy(policy: str, scenario: Scenario) -> Result:
    """Run one policy. Raise ConfigError if it is not one of POLICIES."""
    world = World(
        scenario.trace, _placer(policy, scenario), scenario.shape, scenario.costs,
        prefill=scenario.prefill, decode=scenario.decode, of_prefill=scenario.of_prefill, scaling=scenario.scaling,
    )  # fmt: skip
    return result_of(policy, world, world.run(), scenario.objective)


def run_all(runs: Sequence[tuple[str, Scenario]], jobs: int = 0) -> Iterator[Result]:
    """Yield the results of policies on their scenarios, in the given order, each as soon as possible.

    Each run has its own process.

    Args:
        jobs: maximum number of processes; 0: one per core.

    Raises:
        ConfigError: a policy is not one of POLICIES.
    """
    for policy, _ in runs:
        if policy not in POLICIES:
            raise ConfigError(f"no policy is called {policy!r}; there are {', '.join(POLICIES)}")
    with ProcessPoolExecutor(jobs or os.cpu_count(), get_context("spawn")) as processes:
        yield from processes.map(run_policy, *zip(*runs, strict=True))


def _placer(policy: str, scenario: Scenario) -> Placer:
    if policy == Production.name:
        costs = scenario.costs
        fixed_s = costs.transfer_s(0, scenario.shape.window)
        prices = Prices(fixed_s, costs.transfer_s_per_token, costs.transfer_s(0), exposed_s_per_token=0.0)
        return Production(
            scenario.router, scenario.objective, prices, scenario.error, knows_lengths=scenario.knows_lengths
        )
    objective = scenario.objective if scenario.tells_all else NO_OBJECTIVE
    return TwoLegs(BASELINES[policy](scenario.seed, scenario.shape.block_tokens), objective)

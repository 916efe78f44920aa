"""Runs policies on a trace, several at a time, each in a process of its own."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import TYPE_CHECKING

import torch

from baton.config import RouterConfig
from baton.errors import ConfigError
from deploy.simulate.baselines import BASELINES
from deploy.simulate.policy import TwoLegs
from deploy.simulate.production import Production
from deploy.simulate.report import Objective, Result, result_of
from deploy.simulate.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deploy.simulate.costs import CostModel
    from deploy.simulate.policy import Placer
    from deploy.simulate.trace import Trace
    from deploy.simulate.worker import WorkerShape

POLICIES = (Production.name, *BASELINES)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything but the policy."""

    trace: Trace
    shape: WorkerShape
    costs: CostModel
    prefill: int
    """Workers; none: an aggregated pool."""
    decode: int
    objective: Objective
    seed: int = 0
    router: RouterConfig = field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        if self.decode < 1 or self.prefill < 0:
            raise ConfigError(
                f"a pool needs a worker that decodes, got {self.prefill} prefill and {self.decode} decode"
            )
        room = self.shape.num_blocks * self.shape.block_tokens
        longest = max(r.num_prompt_tokens + r.num_output_tokens for r in self.trace.requests)
        if longest > room:
            raise ConfigError(f"the trace has a request of {longest} tokens; a worker's blocks hold {room}")


def run_policy(policy: str, scenario: Scenario) -> Result:
    """Raises ConfigError for a policy that is not one of POLICIES."""
    world = World(
        scenario.trace, _placer(policy, scenario), scenario.shape, scenario.costs,
        prefill=scenario.prefill, decode=scenario.decode,
    )  # fmt: skip
    return result_of(policy, world, world.run(), scenario.objective)


def run_policies(
    policies: Sequence[str], scenario: Scenario, done: Callable[[Result], None], jobs: int = 0
) -> list[Result]:
    """In the order of `policies`.

    Args:
        done: told each result as it comes.
        jobs: processes at a time; 0: one a core.
    """
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"no policy is called {policy!r}; there are {', '.join(POLICIES)}")
    with ProcessPoolExecutor(jobs or os.cpu_count(), get_context("spawn"), torch.set_num_threads, (1,)) as processes:
        running = {processes.submit(run_policy, policy, scenario): policy for policy in policies}
        results = {}
        for ended in as_completed(running):
            results[running[ended]] = ended.result()
            done(ended.result())
    return [results[policy] for policy in policies]


def _placer(policy: str, scenario: Scenario) -> Placer:
    if policy == Production.name:
        return Production(scenario.router)
    return TwoLegs(BASELINES[policy](scenario.seed, scenario.shape.block_tokens))

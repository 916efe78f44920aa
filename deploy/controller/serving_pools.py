"""Sizes requested by ServingPools, and the statuses reported to them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from baton.cluster import Role
from baton.config import Config
from deploy.controller.reconcile import ObservedWorker, WorkerPhase, num_serving
from deploy.controller.state import sizes_problem
from deploy.kubernetes.serving_pool import PoolReport, PoolSpec


class PoolSpecs:
    """Latest specifications of the ServingPools; none outside Kubernetes.

    Attributes:
        refusal: the reason why the requested sizes are not followed; empty: they are.
    """

    def __init__(self, config: Config) -> None:
        self.refusal = ""
        self._config = config
        self._specs: dict[Role, PoolSpec] = {}

    def put(self, role: Role, spec: PoolSpec) -> None:
        self._specs[role] = spec

    def followed(self, desired: Mapping[Role, int]) -> Mapping[Role, int]:
        """Return the sizes requested by ServingPools that are not paused; `desired` if they are impossible."""
        asked = {role: spec.size for role, spec in self._specs.items() if not spec.is_paused}
        wanted = {**desired, **asked}
        self.refusal = sizes_problem(wanted, self._config)
        return desired if self.refusal else wanted

    def problem(self, sizes: Mapping[Role, int], desired: Mapping[Role, int]) -> str:
        """Return the reason why the pools must not change to those sizes; empty: they may."""
        for role, size in sizes.items():
            if (spec := self._specs.get(role)) and (reason := spec.size_problem(size)):
                return reason
        return sizes_problem({**desired, **sizes}, self._config)

    def drain_timeout_s(self, role: Role) -> float | None:
        """Return the pool's own drain timeout; None: it has none."""
        spec = self._specs.get(role)
        return spec.drain_timeout_s if spec else None

    def report(self, role: Role, desired: int, workers: Mapping[str, ObservedWorker]) -> PoolReport:
        """Return the status of the role's ServingPool."""
        phases = [worker.phase for worker in workers.values() if worker.role is role]
        return PoolReport(
            desired=desired,
            num_workers=len(phases) - phases.count(WorkerPhase.DOWN),
            num_ready=num_serving(workers.values(), role),
            num_draining=phases.count(WorkerPhase.LEAVING),
            refusal=self.refusal,
            engine=self._config.differing_settings(role),
        )

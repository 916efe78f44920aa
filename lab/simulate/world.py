"""Cluster in virtual time: requests arrive, workers execute steps, and pools change (`Members`).

This module makes no decisions: the policy places requests, the router's state machine decides how they continue
(`Driver`), the engine manages batches and blocks, and the autoscaler sizes the pools.

A worker that leaves its pool gets no new work. Between two of its steps the driver interrupts the calls that should
continue elsewhere. The worker has left when its engine is idle and no KV that it has to send is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.cluster import Role
from lab.simulate.clock import Clock
from lab.simulate.driver import Driver
from lab.simulate.flight import Served
from lab.simulate.members import Members
from lab.simulate.scaler import Scaler, StartOrder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deploy.scaling.values import ScalingDecision
    from lab.simulate.costs import CostModel
    from lab.simulate.members import SimulatedMember
    from lab.simulate.policy import Placer
    from lab.simulate.scaler import Scaling
    from lab.simulate.worker import SimulatedWorker, WorkerShape
    from lab.traces.trace import Trace, TraceRequest


class World:
    """One run of the simulator.

    Args:
        prefill, decode: initial numbers of workers. Without prefill workers the pool is aggregated.
        of_prefill: shape and costs of the prefill pool's workers; None: `shape` and `costs` are both pools'. Workers
            must not change their roles otherwise (`Scaling.may_flip`).
        scaling: the autoscaler, if there is one.
    """

    def __init__(
        self,
        trace: Trace,
        placer: Placer,
        shape: WorkerShape,
        costs: CostModel,
        *,
        prefill: int = 0,
        decode: int = 1,
        of_prefill: tuple[WorkerShape, CostModel] | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        if trace.block_tokens != shape.block_tokens:
            raise ValueError(
                f"the trace has blocks of {trace.block_tokens} tokens, and the workers have blocks of "
                f"{shape.block_tokens}"
            )
        self.members = Members(shape, costs, prefill, decode, of_prefill)
        self.served: list[Served] = []
        self.clock = Clock()
        self._trace = trace
        self._costs = costs
        self._scaler = Scaler(scaling, self.members) if scaling else None
        self._driver = Driver(self.clock, self.members, placer, self._scaler, self._wake)
        self._evacuating: set[int] = set()
        self._is_expecting = False

    def run(self) -> list[Served]:
        """Run until every request is done, and return the outcomes in order of arrival."""
        arrivals = iter(self._trace.requests)
        self._expect(next(arrivals, None), arrivals)
        if self._scaler is not None:
            self._scale(self._scaler)
        self.clock.run()
        for worker in self.workers:
            worker.engine.check()
        return self.served

    @property
    def workers(self) -> list[SimulatedWorker]:
        """All workers that ever existed, by index."""
        return [member.worker for member in self.members.all]

    @property
    def computing(self) -> list[SimulatedWorker]:
        """The workers whose main task is to compute prompts; with changing roles, all of them."""
        prefill = self.members.ready(Role.PREFILL)
        return prefill if prefill and self._scaler is None else self.workers

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def num_moved(self) -> int:
        """Responses that migrated to another worker."""
        return self._driver.num_moved

    @property
    def decisions(self) -> list[tuple[float, ScalingDecision]]:
        """Decisions that changed a pool, with their times."""
        return self._scaler.decisions if self._scaler else []

    # -- requests ----------------------------------------------------------------------------------------------------

    def _expect(self, request: TraceRequest | None, later: Iterator[TraceRequest]) -> None:
        self._is_expecting = request is not None
        if request is not None:
            placed_s = request.arrival_s + self._costs.request_overhead_s
            self.clock.at(placed_s, lambda: self._arrive(request, later))

    def _arrive(self, request: TraceRequest, later: Iterator[TraceRequest]) -> None:
        self._expect(next(later, None), later)
        served = Served(request=request)
        self.served.append(served)
        self._driver.serve(served)

    # -- workers -----------------------------------------------------------------------------------------------------

    def _wake(self, worker: SimulatedWorker) -> None:
        """Handle new work on a worker: an idle one starts a step, a busy one may end earlier than expected."""
        if worker.index in self._evacuating:
            return
        if worker.ends_s is None:
            self._advance(worker)
        else:
            self._await(worker)

    def _await(self, worker: SimulatedWorker) -> None:
        ends_s = worker.ends_s
        if ends_s is not None:
            self.clock.at(ends_s, lambda: self._step_ends(worker, ends_s))

    def _step_ends(self, worker: SimulatedWorker, ends_s: float) -> None:
        if worker.ends_s == ends_s:  # otherwise it was cut short
            self._advance(worker)

    def _advance(self, worker: SimulatedWorker) -> None:
        for message in worker.finish(self.clock.now):
            self._driver.received(message)
        if self.members.is_leaving(worker):
            self._evacuate(worker)
        if worker.ends_s is not None:  # the results of the step gave it new work
            return
        for message in worker.begin(self.clock.now):
            self._driver.received(message)
        self._await(worker)

    # -- pools that change -------------------------------------------------------------------------------------------

    def _scale(self, scaler: Scaler) -> None:
        """Scale window after window until no request is left."""
        scaler.observe(self.clock.now)
        self._carry_out(scaler)
        if not self._driver.is_idle or self._is_expecting:
            self.clock.at(self.clock.now + scaler.window_s, lambda: self._scale(scaler))

    def _carry_out(self, scaler: Scaler) -> None:
        """Carry out orders, one after the other."""
        while (order := scaler.next_order()) is not None:
            if isinstance(order, StartOrder):
                member = self.members.start(order.role, self.clock.now)
                self.clock.at(self.clock.now + scaler.start_s, lambda member=member: self.members.is_up(member))  # type: ignore[misc]
            else:
                self.leave(order.member, order.then)

    def leave(self, member: SimulatedMember, then: Role | None) -> None:
        """Have a worker leave its role as soon as its step is done, for another role or for good."""
        self.members.leave(member, then)
        worker = member.worker
        if worker.ends_s is None:
            self._advance(worker)
        else:
            worker.cut_short(self.clock.now)
            self._await(worker)

    def _evacuate(self, worker: SimulatedWorker) -> None:
        """Interrupt the calls on a leaving worker between two of its steps, and let it leave if nothing is left."""
        self._evacuating.add(worker.index)
        self._driver.interrupt(worker)
        self._evacuating.discard(worker.index)
        if self.members.try_to_leave(worker, self.clock.now) and self._scaler is not None:
            self._carry_out(self._scaler)

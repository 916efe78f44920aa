"""Autoscaler in virtual time: `deploy.scaling.policy` with the status of the simulated workers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from baton.cluster import ClusterStatus, Role, RouterInfo
from deploy.scaling.policy import decide
from deploy.scaling.values import PolicyState, ScalingDecision
from deploy.scaling.window import measure

if TYPE_CHECKING:
    from baton.config import AutoscaleConfig
    from lab.simulate.members import Members, SimulatedMember
    from router.placement import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Settings of the autoscaler in a run."""

    config: AutoscaleConfig
    objective: Objective
    mode: str = "auto"
    may_flip: bool = True
    """False: the pools have different workers, which do not change their roles."""
    start_s: float = 30.0
    """Time from the order to start a worker until it is ready."""
    restarts_s: tuple[float, ...] = ()
    """Times at which the controller is killed and loses its state; ascending."""


@dataclass(frozen=True, slots=True)
class StartOrder:
    role: Role


@dataclass(frozen=True, slots=True)
class LeaveOrder:
    """Order: a worker changes its role, or stops."""

    member: SimulatedMember
    then: Role | None


class Scaler:
    """Decides once per window. The caller carries out its orders one after the other."""

    def __init__(self, scaling: Scaling, members: Members) -> None:
        self._scaling = scaling
        self._members = members
        self._state = PolicyState.fresh(0.0)
        self._restarts_s = deque(scaling.restarts_s)
        self._before: tuple[float, ClusterStatus] | None = None
        self._orders: deque[StartOrder | tuple[Role, Role | None]] = deque()
        """Pending orders: a start, or a role that a worker leaves and the role that it takes (None: it stops)."""
        self._met = self._missed = self._rejected = 0
        self.decisions: list[tuple[float, ScalingDecision]] = []
        """Decisions that changed something, with their times."""

    @property
    def window_s(self) -> float:
        return self._scaling.config.window_s

    @property
    def start_s(self) -> float:
        return self._scaling.start_s

    def refused(self) -> None:
        """Count a rejected request."""
        self._rejected += 1

    def finished(self, ttft_s: float, itl_s: float) -> None:
        """Count a served request."""
        objective = self._scaling.objective
        is_met = ttft_s <= objective.ttft_s and itl_s <= objective.itl_s
        self._met += is_met
        self._missed += not is_met

    def observe(self, now: float) -> None:
        """End a window, and start the next."""
        if self._restarts_s and now >= self._restarts_s[0]:
            self._restarts_s.popleft()
            self._state, self._before = PolicyState.fresh(now), None
            self._orders.clear()
        router = RouterInfo(
            id="router",
            pid=0,
            grpc="",
            http="",
            mirror_lag_s=0.0,
            met=self._met,
            missed=self._missed,
            rejected=self._rejected,
        )
        status = self._members.status(now, router)
        if self._before is not None:
            began_s, before = self._before
            measured = measure(before, status, now - began_s)
            config, objective = self._scaling.config, self._scaling.objective
            decision = decide(measured, self._state, config, objective, now, mode=self._scaling.mode)
            decision = replace(decision, may_flip=self._scaling.may_flip)
            self._state = decision.state
            if decision.sizes != decision.before:
                self.decisions.append((now, decision))
                self._order(decision)
        self._before = now, status

    def next_order(self) -> StartOrder | LeaveOrder | None:
        """Return the next order; None while a worker leaves. An order that cannot be carried out is dropped."""
        while self._orders and not self._members.somebody_leaves:
            order = self._orders.popleft()
            if isinstance(order, StartOrder):
                return order
            role, then = order
            if (member := self._members.least_busy(role)) is not None:
                return LeaveOrder(member, then)
        return None

    def _order(self, decision: ScalingDecision) -> None:
        if (flips := decision.flips) is not None:
            other = Role.DECODE if flips.role is Role.PREFILL else Role.PREFILL
            self._orders += [(other, flips.role)] * flips.num
        for role in Role:
            self._orders += [StartOrder(role)] * decision.starts.of(role)
            self._orders += [(role, None)] * decision.stops.of(role)

"""Membership of the pools in virtual time: workers start, change their roles and leave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.cluster import ClusterStatus, PoolStatus, Role, RouterInfo, Worker, WorkerInfo, WorkerState
from kvstore.index import Mirror
from lab.simulate.worker import SimulatedWorker
from router.placement.pool_view import FEW_WORKERS

if TYPE_CHECKING:
    from lab.simulate.costs import CostModel
    from lab.simulate.worker import WorkerShape


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedMember:
    worker: SimulatedWorker
    role: Role
    state: WorkerState = WorkerState.READY
    then: Role | None = None
    """The role that a draining worker will have; None: it stops."""
    num_awaited: int = 0
    """Number of transfers of its KV in progress."""
    started_s: float = 0.0
    stopped_s: float = float("inf")

    @property
    def work(self) -> tuple[int, int, int]:
        """Sort key: the amount of work that it would leave behind."""
        return self.worker.num_requests, self.worker.queued_tokens, self.worker.index


class Members:
    """All workers, in order of their index. Of many, a mirror knows which blocks they hold.

    Args:
        prefill, decode: initial numbers of workers.
        of_prefill: shape and costs of the workers that start in the prefill pool; None: as of the others.
    """

    def __init__(
        self,
        shape: WorkerShape,
        costs: CostModel,
        prefill: int,
        decode: int,
        of_prefill: tuple[WorkerShape, CostModel] | None = None,
    ) -> None:
        self.shape, self.costs = shape, costs
        """Shape and costs of the decode pool's workers, which are those of transfers, too."""
        prefill_shape, prefill_costs = of_prefill or (shape, costs)
        self._shapes = {Role.PREFILL: prefill_shape, Role.DECODE: shape}
        self._costs = {Role.PREFILL: prefill_costs, Role.DECODE: costs}
        self.mirror = Mirror() if prefill + decode > FEW_WORKERS else None
        self.all: list[SimulatedMember] = []
        self._ready: dict[Role, list[SimulatedWorker]] = {}
        """Ready workers by role, until one of them changes."""
        for role, num in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for _ in range(num):
                self.start(role, 0.0).state = WorkerState.READY

    def ready(self, role: Role) -> list[SimulatedWorker]:
        """Return the workers of a role that take work; the same list until one of them changes."""
        if (found := self._ready.get(role)) is None:
            found = [m.worker for m in self.all if m.role is role and m.state is WorkerState.READY]
            self._ready[role] = found
        return found

    def worker(self, index: int) -> SimulatedWorker:
        return self.all[index].worker

    def start(self, role: Role, now: float) -> SimulatedMember:
        """Add a worker that is starting; see `is_up`."""
        worker = SimulatedWorker(len(self.all), self._shapes[role], self._costs_of(role), self.mirror)
        self.all.append(SimulatedMember(worker=worker, role=role, state=WorkerState.STARTING, started_s=now))
        return self.all[-1]

    def is_up(self, member: SimulatedMember) -> None:
        member.state = WorkerState.READY
        self._ready.clear()

    def least_busy(self, role: Role) -> SimulatedMember | None:
        """Return the worker with the least work that may leave its pool; None: there is none, or only the last decode
        worker.
        """
        pool = [m for m in self.all if m.role is role and m.state is WorkerState.READY]
        if len(pool) <= (role is Role.DECODE):
            return None
        return min(pool, key=lambda member: member.work)

    def leave(self, member: SimulatedMember, then: Role | None) -> None:
        """Stop giving the worker new work, until it has left."""
        member.state, member.then = WorkerState.DRAINING, then
        self._ready.clear()

    def computes_prompts(self, worker: SimulatedWorker) -> bool:
        """Return whether the worker is a prefill worker that takes work."""
        member = self.all[worker.index]
        return member.state is WorkerState.READY and member.role is Role.PREFILL

    def is_leaving(self, worker: SimulatedWorker) -> bool:
        return self.all[worker.index].state is WorkerState.DRAINING

    @property
    def somebody_leaves(self) -> bool:
        return any(member.state is WorkerState.DRAINING for member in self.all)

    def await_transfer(self, worker: SimulatedWorker, num: int) -> None:
        self.all[worker.index].num_awaited += num

    def try_to_leave(self, worker: SimulatedWorker, now: float) -> bool:
        """Return whether all of its work is gone; it then takes its new role, or stops."""
        member = self.all[worker.index]
        if member.num_awaited or not worker.engine.is_idle:
            return False
        if member.then is None:
            member.state, member.stopped_s = WorkerState.DEAD, now
            return True
        member.state, member.role, member.then = WorkerState.READY, member.then, None
        self._ready.clear()
        worker.costs = self._costs_of(member.role)
        return True

    def worker_seconds(self, until_s: float) -> float:
        return sum(max(0.0, min(m.stopped_s, until_s) - min(m.started_s, until_s)) for m in self.all)

    def status(self, now: float, router: RouterInfo) -> ClusterStatus:
        """Return the status that a controller would see, including its own orders in progress."""
        living = [member for member in self.all if member.state is not WorkerState.DEAD]
        pools = {}
        for role in Role:
            desired = sum(m.then is role if m.state is WorkerState.DRAINING else m.role is role for m in living)
            pools[role.value] = PoolStatus(desired, len(self.ready(role)))
        workers = tuple(self._described(member, now) for member in living)
        return ClusterStatus(
            pools=pools, workers=workers, routers=(router,), redis_address="", redis_ok=True, models=()
        )

    def described(self, worker: SimulatedWorker, now: float) -> Worker:
        """Return a worker as its lease would describe it."""
        return self._described(self.all[worker.index], now)

    def _described(self, member: SimulatedMember, now: float) -> Worker:
        shape = self._shapes[member.role]
        info = WorkerInfo(
            id=str(member.worker.index),
            role=member.role,
            address="",
            pid=0,
            node="",
            epoch=0,
            content_id="",
            wire_compat="",
            block_size=shape.block_tokens,
            max_model_len=shape.num_blocks * shape.block_tokens,
            chunk_tokens=shape.max_num_batched_tokens,
        )
        return Worker(info, member.worker.load(now, member.state))

    def _costs_of(self, role: Role) -> CostModel:
        return self._costs[role].of_prefill() if role is Role.PREFILL else self._costs[role]

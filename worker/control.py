"""Orders to one worker: drain, and change the role. Its calls migrate to other workers while its engine continues.

    READY ── drain ──> DRAINING ── all calls gone ──> READY in the other role, or the process ends
                           `────── timeout, or any failure ──────> READY in the old role (for a change of role)

A draining worker accepts no new choices and hands back those that it has not started. It asks the routers to migrate
every choice that it decodes: the next worker pulls the KV from this one while it still generates tokens, and gets the
few missing blocks by an ordinary KV transfer. The duration depends on the KV, not on the tokens still to generate.

A worker that drains for good never takes work again. If the order did not come from the controller, the controller sees
the drain in the lease and starts a replacement.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc

from baton.cluster import Role, WorkerState, with_role
from baton.config import MAX_TIMEOUT_S
from baton.errors import Conflict, InvalidRequest, WorkerDraining
from baton.v1 import worker_pb2, worker_pb2_grpc
from worker.calls import CallServicer
from worker.member import Member

logger = logging.getLogger(__name__)


class WorkerControl(worker_pb2_grpc.WorkerControlServicer):
    """Executes the orders to one worker, on its event loop."""

    def __init__(self, member: Member, calls: CallServicer) -> None:
        self.member = member
        self._calls = calls
        self._changing = asyncio.Lock()
        self._is_leaving = False

    async def drain(self, timeout_s: float) -> int:
        """Drain the worker for good. Return when no call is left, or at the timeout.

        Returns:
            The number of calls that are left.
        """
        self._is_leaving = True
        return await self._drain(timeout_s)

    async def _drain(self, timeout_s: float) -> int:
        member = self.member
        logger.info("%s drains, for %g s at most", with_role(member.worker_id, member.role), timeout_s)
        member.become(WorkerState.DRAINING)
        member.engine.hand_back(WorkerDraining(f"{member.worker_id} takes no new work"))
        self._calls.migrate(member.engine.hypotheses)
        try:
            async with asyncio.timeout(timeout_s):
                await self._calls.wait_until_idle()  # pulls from this worker are not waited for
        except TimeoutError:
            return self._calls.num_running
        return 0

    async def set_role(self, role: Role, timeout_s: float) -> None:
        """Change the role. Raise Conflict if the worker is not ready, or not idle in time; it then keeps its role."""
        member = self.member
        async with self._changing:
            if member.role is role:
                return
            if member.state is not WorkerState.READY:
                raise Conflict(f"{member.worker_id} is {member.state}; only a worker that is ready can change its role")
            try:
                num_left = await self._drain(timeout_s)
                if num_left:
                    raise Conflict(
                        f"{num_left} calls were still running on {member.worker_id} after {timeout_s:g} s; "
                        f"it stays a {member.role} worker"
                    )
            except BaseException:  # including cancellation: the caller may be gone
                self._stay(member.role)
                raise
            self._stay(role)
            logger.info("%s is a %s worker now", member.worker_id, role)

    def _stay(self, role: Role) -> None:
        """Make the worker ready again, unless it has been ordered to drain for good in the meantime."""
        self.member.become(WorkerState.DRAINING if self._is_leaving else WorkerState.READY, role)

    async def Drain(  # noqa: N802 - the generated name
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.DrainResponse:
        return worker_pb2.DrainResponse(num_left=await self.drain(_required_time(request.timeout_s)))

    async def SetRole(  # noqa: N802
        self, request: worker_pb2.SetRoleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.SetRoleResponse:
        if request.role not in tuple(Role):
            raise InvalidRequest(f"a worker's role is prefill or decode, not {request.role!r}", "role")
        await self.set_role(Role(request.role), _required_time(request.timeout_s))
        return worker_pb2.SetRoleResponse()


def _required_time(timeout_s: float) -> float:
    """Return the timeout if a timer can take it. Raise InvalidRequest otherwise, also for NaN."""
    if not 0 <= timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(f"timeout_s must be 0 to {MAX_TIMEOUT_S}, not {timeout_s:g}", "timeout_s")
    return timeout_s

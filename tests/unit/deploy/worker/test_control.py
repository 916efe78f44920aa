"""A worker that changes its role, while calls go on arriving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.context import Context

from baton import wire
from baton.cluster import Role, WorkerState
from baton.errors import InvalidRequest, WorkerDraining
from baton.messages import DecodeRequest, Event, NewTokens, StartCall
from baton.tasks import cancel_and_wait
from baton.v1 import worker_pb2
from deploy.worker.calls import CallServicer
from deploy.worker.control import WorkerControl
from deploy.worker.member import Member
from tests.support.builders import sequence_spec

pytestmark = pytest.mark.asyncio


@dataclass(slots=True)
class State:
    """What an order changes of a worker."""

    worker_id: str = "decode-0"
    role: Role = Role.DECODE
    state: WorkerState = WorkerState.READY
    loop: Any = None

    def become(self, state: WorkerState, role: Role | None = None) -> None:
        self.state, self.role = state, role or self.role


@pytest.mark.parametrize("num_passes", range(8))
async def test_a_call_that_comes_as_the_last_one_ends_keeps_nobody_in_its_role(num_passes: int) -> None:
    """Of the event loop's passes between the last call's end and the next one's start, some number puts this one
    between the moment in which no call ran and whoever waits for it."""
    serving, may_end, has_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def decode(request: DecodeRequest, trace: Context) -> AsyncGenerator[Event]:
        if member.state is WorkerState.DRAINING:
            raise WorkerDraining("it takes no new work")
        serving.set()
        await may_end.wait()
        has_ended.set()
        yield NewTokens(token_ids=(1,), finish_reason=None)

    async def commands() -> AsyncIterator[worker_pb2.ServeRequest]:
        yield call(1)
        await has_ended.wait()
        for _ in range(num_passes):
            await asyncio.sleep(0)
        yield call(2)
        await asyncio.Event().wait()

    async def write(frame: worker_pb2.ServeResponse) -> None:
        return None

    member = State(loop=SimpleNamespace(hand_back=lambda reason: None))
    calls = CallServicer(decode=decode)
    control = WorkerControl(cast(Member, member), calls)
    stream = asyncio.create_task(calls.Serve(commands(), cast(Any, SimpleNamespace(write=write))))
    try:
        async with asyncio.timeout(10):
            await serving.wait()
            changing = asyncio.create_task(control.set_role(Role.PREFILL, 10.0))
            await asyncio.sleep(0)
            may_end.set()
            await changing
        assert (member.role, member.state) == (Role.PREFILL, WorkerState.READY)
    finally:
        await cancel_and_wait((stream,))


def call(call_id: int) -> worker_pb2.ServeRequest:
    spec = sequence_spec(request_id=f"{call_id}")
    return wire.serve_request(
        [wire.start_command(StartCall(call_id, DecodeRequest(spec, await_kv=False, source=None), {}))]
    )


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 1e300])
async def test_a_time_that_no_timer_takes_is_refused_and_the_worker_stays(timeout_s: float) -> None:
    """NaN would leave the event loop's timers without an order."""
    member = State(loop=SimpleNamespace(hand_back=lambda reason: None))
    control = WorkerControl(cast(Member, member), CallServicer())
    context = cast(Any, None)
    with pytest.raises(InvalidRequest, match="timeout_s must be 0 to 604800"):
        await control.Drain(worker_pb2.DrainRequest(timeout_s=timeout_s), context)
    with pytest.raises(InvalidRequest, match="timeout_s must be 0 to 604800"):
        await control.SetRole(worker_pb2.SetRoleRequest(role="prefill", timeout_s=timeout_s), context)
    assert (member.role, member.state) == (Role.DECODE, WorkerState.READY)

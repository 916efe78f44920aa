"""A worker that changes its role, while calls go on arriving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.context import Context

from baton import wire
from baton.cluster import Role, WorkerState
from baton.errors import InvalidRequest, WorkerDraining
from baton.hypotheses import NO_HYPOTHESES, Beam, Hypotheses
from baton.messages import Adapter, DecodeRequest, Event, Migrate, NewTokens, PlacedImage, SequenceSpec, StartCall
from baton.sampling import FinishReason
from baton.scores import TokenScores
from baton.tasks import cancel_and_wait
from baton.v1 import worker_pb2
from tests.support.builders import sequence_spec
from worker.calls import CallServicer, require_servable
from worker.control import WorkerControl
from worker.member import Member


@dataclass(slots=True)
class State:
    """What an order changes of a worker."""

    worker_id: str = "decode-0"
    role: Role = Role.DECODE
    state: WorkerState = WorkerState.READY
    engine: Any = None

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

    member = State(engine=SimpleNamespace(hand_back=lambda reason: None, hypotheses=lambda spec: NO_HYPOTHESES))
    calls = CallServicer(decode=decode)
    control = WorkerControl(cast("Member", member), calls)
    stream = asyncio.create_task(calls.Serve(commands(), cast("Any", SimpleNamespace(write=write))))
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


TWO_BEAMS = Hypotheses(
    running=(Beam(token_ids=(5, 6), logprob=-1.0), Beam(token_ids=(5, 7), logprob=-2.0)),
    finished=(Beam(token_ids=(9,), logprob=-0.5, finish_reason=FinishReason.STOP),),
)


@pytest.mark.parametrize("is_small", [True, False])
async def test_the_state_of_a_search_goes_with_the_order_to_move_unless_it_is_too_large(
    is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SequenceSpec] = []
    come: list[Event | None] = []
    serving = asyncio.Event()

    def hypotheses(spec: SequenceSpec) -> Hypotheses:
        asked.append(spec)
        return TWO_BEAMS

    async def decode(request: DecodeRequest, trace: Context) -> AsyncGenerator[Event]:
        serving.set()
        await asyncio.Event().wait()
        yield NewTokens(token_ids=(1,), finish_reason=None)

    async def commands() -> AsyncIterator[worker_pb2.ServeRequest]:
        yield call(1)
        await asyncio.Event().wait()

    async def write(frame: worker_pb2.ServeResponse) -> None:
        come.extend(event for _, event in wire.events(frame))

    if not is_small:
        monkeypatch.setattr("baton.wire.worker.MAX_HYPOTHESES_BYTES", 40)
    member = State(engine=SimpleNamespace(hand_back=lambda reason: None, hypotheses=hypotheses))
    calls = CallServicer(decode=decode)
    stream = asyncio.create_task(calls.Serve(commands(), cast("Any", SimpleNamespace(write=write))))
    try:
        async with asyncio.timeout(10):
            await serving.wait()
            await WorkerControl(cast("Member", member), calls).drain(0.1)
        assert come == [Migrate(TWO_BEAMS if is_small else NO_HYPOTHESES)]
        assert asked == [sequence_spec(request_id="1")]
    finally:
        await cancel_and_wait((stream,))


SEARCH = sequence_spec([3, 4, 5], num_prompt_tokens=2, max_tokens=3, use_beam_search=True, beam_width=2)
RUNNING, FINISHED = TWO_BEAMS.running, TWO_BEAMS.finished
SCORES = TokenScores((-0.5,), (9,), (-0.5,))


def test_the_state_of_a_search_can_be_served() -> None:
    require_servable(replace(SEARCH, hypotheses=TWO_BEAMS))
    at_begin = replace(SEARCH, token_ids=(3, 4), hypotheses=Hypotheses(running=(Beam(),)))
    require_servable(at_begin)
    require_servable(replace(at_begin, hypotheses=NO_HYPOTHESES))


@pytest.mark.parametrize(
    ("hypotheses", "more"),
    [
        (
            Hypotheses(running=RUNNING[:1]),
            {
                "sampling": replace(SEARCH.sampling, use_beam_search=False, beam_width=None),
                "token_ids": (3, 4, 5, 6),
            },
        ),
        (NO_HYPOTHESES, {}),
        (replace(TWO_BEAMS, running=()), {"token_ids": (3, 4)}),
        (TWO_BEAMS, {"token_ids": (3, 4)}),
        (TWO_BEAMS, {"token_ids": (3, 4, 6)}),
        (TWO_BEAMS, {"sampling": replace(SEARCH.sampling, max_tokens=2)}),
        (TWO_BEAMS, {"sampling": replace(SEARCH.sampling, logprobs=1)}),
        (replace(TWO_BEAMS, running=(*RUNNING, RUNNING[1])), {}),
        (replace(TWO_BEAMS, finished=FINISHED * 3), {}),
        (replace(TWO_BEAMS, running=(RUNNING[0], Beam(token_ids=(5,)))), {}),
        (replace(TWO_BEAMS, running=(RUNNING[0], replace(RUNNING[1], finish_reason=FinishReason.STOP))), {}),
        (replace(TWO_BEAMS, running=(RUNNING[0], replace(RUNNING[1], logprob=float("nan")))), {}),
        (replace(TWO_BEAMS, finished=(replace(FINISHED[0], finish_reason=None),)), {}),
        (replace(TWO_BEAMS, finished=(replace(FINISHED[0], token_ids=()),)), {}),
        (replace(TWO_BEAMS, finished=(replace(FINISHED[0], token_ids=(1, 2, 3)),)), {}),
        (replace(TWO_BEAMS, finished=(replace(FINISHED[0], logprob=float("-inf")),)), {}),
        (replace(TWO_BEAMS, finished=(replace(FINISHED[0], scores=SCORES),)), {}),
    ],
)
def test_what_cannot_be_the_state_of_the_search_is_refused(hypotheses: Hypotheses, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="the hypotheses are not those of its beam search"):
        require_servable(replace(SEARCH, hypotheses=hypotheses, **more))


def test_beams_with_unequal_scores_are_refused() -> None:
    """They could not be joined."""
    asked = replace(SEARCH, sampling=replace(SEARCH.sampling, logprobs=1))
    one, two = TokenScores((-0.5,) * 2, (9,) * 2, (-0.5,) * 2), TokenScores((-0.5,) * 2, (9,) * 4, (-0.5,) * 4)
    finished = (replace(FINISHED[0], scores=SCORES),)
    good = Hypotheses(running=tuple(replace(each, scores=one) for each in RUNNING), finished=finished)
    require_servable(replace(asked, hypotheses=good))
    bad = replace(good, running=(good.running[0], replace(RUNNING[1], scores=two)))
    with pytest.raises(InvalidRequest, match="the hypotheses are not those"):
        require_servable(replace(asked, hypotheses=bad))


def call(call_id: int) -> worker_pb2.ServeRequest:
    spec = sequence_spec(request_id=f"{call_id}")
    return wire.serve_request(
        [wire.start_command(StartCall(call_id, DecodeRequest(spec, await_kv=False, source=None), {}))]
    )


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 1e300])
async def test_a_time_that_no_timer_takes_is_refused_and_the_worker_stays(timeout_s: float) -> None:
    """NaN would leave the event loop's timers without an order."""
    member = State(engine=SimpleNamespace(hand_back=lambda reason: None, hypotheses=lambda spec: NO_HYPOTHESES))
    control = WorkerControl(cast("Member", member), CallServicer())
    context = cast("Any", None)
    with pytest.raises(InvalidRequest, match="timeout_s must be 0 to 604800"):
        await control.Drain(worker_pb2.DrainRequest(timeout_s=timeout_s), context)
    with pytest.raises(InvalidRequest, match="timeout_s must be 0 to 604800"):
        await control.SetRole(worker_pb2.SetRoleRequest(role="prefill", timeout_s=timeout_s), context)
    assert (member.role, member.state) == (Role.DECODE, WorkerState.READY)


IMAGE = PlacedImage(digest=b"i" * 16, offset=1, num_tokens=4, grid=(1, 4, 4))


def test_images_that_lie_in_the_prompt_are_served() -> None:
    spec = sequence_spec((5,) * 12, max_tokens=4)
    require_servable(replace(spec, images=(IMAGE, replace(IMAGE, offset=5, num_tokens=7))))


@pytest.mark.parametrize(
    "images",
    [
        (replace(IMAGE, digest=b"i" * 15),),
        (replace(IMAGE, num_tokens=0),),
        (replace(IMAGE, grid=(1,) * 4),),
        (replace(IMAGE, num_tokens=12),),
        (IMAGE, replace(IMAGE, offset=4)),
        (replace(IMAGE, offset=6), IMAGE),
    ],
)
def test_images_that_have_no_place_of_their_own_are_refused(images: tuple[PlacedImage, ...]) -> None:
    with pytest.raises(InvalidRequest, match="its images must have"):
        require_servable(replace(sequence_spec((5,) * 12, max_tokens=4), images=images))


ADAPTER = Adapter(name="org/poet", path="/adapters/poet", digest="0a" * 16, rank=2**16)


def test_an_adapter_that_can_be_registered_is_served() -> None:
    require_servable(sequence_spec(adapter=ADAPTER))
    require_servable(sequence_spec(adapter=None))


@pytest.mark.parametrize(
    "adapter",
    [
        replace(ADAPTER, name=""),
        replace(ADAPTER, name="poet\nroot"),
        replace(ADAPTER, name="p" * 129),
        replace(ADAPTER, path="adapters/poet"),
        replace(ADAPTER, path="/adapters\0"),
        replace(ADAPTER, path="/" * 1025),
        replace(ADAPTER, digest=""),
        replace(ADAPTER, digest="0A" * 16),
        replace(ADAPTER, digest="0a" * 33),
        replace(ADAPTER, rank=0),
        replace(ADAPTER, rank=2**16 + 1),
    ],
)
def test_an_adapter_that_cannot_be_registered_is_refused(adapter: Adapter) -> None:
    with pytest.raises(InvalidRequest, match="its adapter must have"):
        require_servable(sequence_spec(adapter=adapter))

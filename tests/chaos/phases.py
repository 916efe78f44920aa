"""How long after a client has left its request's blocks are free on both workers, by what they were doing for it.

Router and Redis are processes of their own. The workers run on the event loop of whoever measures, so that it sees
their engines from within; each still has its engine's thread, its gRPC server and its links.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import grpc

from baton import wire
from baton.api import GenerateRequest
from baton.cluster import Role
from baton.config import EngineConfig, RouterConfig, TransferConfig
from baton.errors import NoWorker
from baton.v1 import inference_pb2, inference_pb2_grpc
from engine.core.runner import OnLayerDone, StepInput, StepOutput, ignore_layer
from engine.core.sequence import Sequence, Status
from engine.engines import engine_over
from engine.testing import ArithmeticRunner
from tests.chaos import asks
from tests.chaos.fleet import NUM_LAYERS, START_TIMEOUT_S, Fleet, running_fleet
from tests.support.asking import prompt_of
from tests.support.members import engine_of
from tests.support.waiting import until, wait_until
from worker.member import Member
from worker.process import running

STEP_S = 0.02
LINK_DELAY_MS = 20
"""Before each chunk, so that there is a KV transfer and a pull to break into."""
NUM_BLOCKS = {Role.PREFILL: 128, Role.DECODE: 1024}
"""The prefill worker keeps one prompt at most, so that it has to pull those before from the decode worker."""
NUM_PROMPT_TOKENS = 1500
"""Three steps."""
POLL_S = 0.0005
PHASE_TIMEOUT_S = 10.0
NUM_TRIES = 5
"""A machine that does something else for a moment may let a phase pass unseen."""


class Phase(StrEnum):
    """What the workers do for a request as its client leaves."""

    QUEUED = "queued"
    RESERVED = "reserved"
    PULLING = "pulling"
    PREFILLING = "prefilling"
    HANDING_OVER = "transferring"
    DECODING = "decoding"


class Stream:
    """A request under way."""

    def __init__(self, stub: inference_pb2_grpc.InferenceAsyncStub, request: GenerateRequest) -> None:
        self.request_id = request.request_id
        self.num_tokens = 0
        self._call = stub.Generate(wire.generate_request(request))
        self._reading = asyncio.create_task(self._read())

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    def leave(self) -> None:
        self._call.cancel()

    async def end(self) -> None:
        """Returns once it has ended; raises what it failed with."""
        await self._reading

    async def _read(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            async for part in self._call:
                assert isinstance(part, inference_pb2.GenerateResponse)
                self.num_tokens += len(part.token_ids)


@dataclass(frozen=True)
class Leaving:
    """What it took until both workers were free of a request whose client had left."""

    seconds: float
    num_steps: int
    """How many steps either worker began after it had heard of it; the most of the two."""


class CountingRunner(ArithmeticRunner):
    """Counts the steps that it begins."""

    num_steps = 0

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        self.num_steps += 1
        return super().execute(step, on_layer_done)


class CancelBench:
    """A prefill and a decode worker, each for one sequence at a time."""

    def __init__(self, members: dict[Role, Member], channel: grpc.aio.Channel) -> None:
        self._members = members
        self._heard_at: dict[tuple[Role, str], int] = {}
        for role in members:
            self._note_what_it_hears(role)
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        self._numbers = itertools.count()

    async def left_in(self, phase: Phase) -> Leaving:
        """From a client's leaving in `phase` until neither worker holds or awaits anything for its request.

        Raises:
            AssertionError: no request was ever seen in this phase, or something stays.
        """
        for _ in range(NUM_TRIES):
            if (found := await self._try_to_leave_in(phase)) is not None:
                return found
        raise AssertionError(f"{NUM_TRIES} requests have ended without being seen {phase}")

    async def _try_to_leave_in(self, phase: Phase) -> Leaving | None:
        """None: it has ended before it was seen in that phase."""
        prompt = prompt_of(7000 + next(self._numbers), NUM_PROMPT_TOKENS)
        others: list[Stream] = []
        if phase is Phase.PULLING:
            for cached in (prompt, prompt_of(8000 + next(self._numbers), NUM_PROMPT_TOKENS)):
                await self._ask(cached, 2).end()
            await asyncio.sleep(0.6)  # until the router has heard of what is cached and of what no longer is
        if phase is Phase.QUEUED:
            others.append(self._ask(prompt_of(9000, 100), 1500))
            await until(lambda: others[0].num_tokens > 1, PHASE_TIMEOUT_S)
        stream = self._ask(prompt, 200)
        await until(lambda: self._is_in(phase, stream) or stream.has_ended, PHASE_TIMEOUT_S, every_s=POLL_S)
        was_seen = not stream.has_ended
        began_s = time.monotonic()
        stream.leave()
        await until(
            lambda: self._is_free_of(stream) and (bool(others) or self.is_idle()), PHASE_TIMEOUT_S, every_s=POLL_S
        )
        found = Leaving(time.monotonic() - began_s, self._num_steps_since_heard(stream))
        await stream.end()
        for other in others:
            other.leave()
            await other.end()
        await until(self.is_idle, PHASE_TIMEOUT_S)
        for member in self._members.values():
            engine_of(member).check()
        return found if was_seen else None

    def is_idle(self) -> bool:
        """No block is reserved, held or pinned, and no staging slot in use."""
        return all(
            engine_of(m).is_idle and engine_of(m).pool.counts().in_use == 0 and m.kv.counts().slots_in_use == 0
            for m in self._members.values()
        )

    def _note_what_it_hears(self, role: Role) -> None:
        engine = engine_of(self._members[role])
        end = engine.end

        def heard(sequence: Sequence) -> None:
            self._heard_at[role, sequence.spec.request_id] = self._num_steps(role)
            end(sequence)

        engine.end = heard  # type: ignore[method-assign]

    def _num_steps_since_heard(self, stream: Stream) -> int:
        heard_at = {role: self._heard_at.get((role, stream.request_id)) for role in Role}
        return max((self._num_steps(role) - at for role, at in heard_at.items() if at is not None), default=0)

    def _num_steps(self, role: Role) -> int:
        runner = engine_of(self._members[role]).runner
        assert isinstance(runner, CountingRunner)
        return runner.num_steps

    def _ask(self, prompt: list[int], num_tokens: int) -> Stream:
        return Stream(self._stub, replace(asks.greedy(prompt, num_tokens), request_id=f"asked-{next(self._numbers)}"))

    def _is_in(self, phase: Phase, stream: Stream) -> bool:
        on_prefill = list(self._sequences(Role.PREFILL, stream))
        decode = engine_of(self._members[Role.DECODE]).scheduler
        on_decode = list(self._sequences(Role.DECODE, stream))
        is_reserved = any(sequence in decode.reserved for sequence in on_decode)
        match phase:
            case Phase.QUEUED:
                return any(sequence in decode.waiting for sequence in on_decode)
            case Phase.RESERVED:
                return is_reserved
            case Phase.PULLING:
                return any(s.spec.max_tokens == 0 and s.status is Status.RESERVED for s in on_prefill)
            case Phase.PREFILLING:
                return any(0 < s.num_computed_tokens < NUM_PROMPT_TOKENS for s in on_prefill)
            case Phase.HANDING_OVER:
                return is_reserved and stream.num_tokens > 0
            case Phase.DECODING:
                return stream.num_tokens > 2

    def _is_free_of(self, stream: Stream) -> bool:
        return not any(list(self._sequences(role, stream)) for role in Role)

    def _sequences(self, role: Role, stream: Stream) -> Iterator[Sequence]:
        scheduler = engine_of(self._members[role]).scheduler
        for sequence in (*scheduler.waiting, *scheduler.running, *scheduler.reserved):
            if sequence.spec.request_id == stream.request_id:
                yield sequence


@contextlib.contextmanager
def cancel_fleet() -> Iterator[Fleet]:
    """Router and Redis for `cancel_bench`, which brings the workers. To be entered before any event loop runs."""
    router = RouterConfig(mode="disaggregated", cache_secret="cancel")
    with running_fleet(TransferConfig(), router, lease_s=10.0, faults=f"link_delay_ms={LINK_DELAY_MS}") as fleet:
        yield fleet


@contextlib.asynccontextmanager
async def cancel_bench(fleet: Fleet) -> AsyncGenerator[CancelBench]:
    async with contextlib.AsyncExitStack() as stack:
        members = {}
        for number, role in enumerate(Role):
            runner = CountingRunner(
                NUM_BLOCKS[role], max_num_seqs=1, num_layers=NUM_LAYERS, layer_s=STEP_S / NUM_LAYERS
            )
            config = replace(fleet.config, engine=EngineConfig(num_blocks=NUM_BLOCKS[role], max_num_seqs=1))
            worker = running(config, role, f"worker-{number}", "127.0.0.1", engine_over(runner, config.engine))
            control, _ = await stack.enter_async_context(worker)
            members[role] = control.member
        await asyncio.to_thread(  # the workers live on this loop
            wait_until,
            lambda: len(fleet.client.status()["workers"]) == len(Role),
            START_TIMEOUT_S,
            every_s=0.05,
            not_yet=(NoWorker,),  # the router may not have started yet
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(fleet.routers[0].grpc))
        yield CancelBench(members, channel)

"""Sends a trace's requests, each at its time, regardless of the requests before.

A request's clock starts when it is due, not when it is sent: a client that falls behind, or that waits because of a
limit on requests in flight, hides no waiting time of users. How late it sent is reported, too.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from baton.errors import BatonError, InvalidRequest, Overloaded, WorkerFailed
from lab.bench.connection import chunk_of, message_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from baton.api import GenerateChunk, Timing, Usage
    from lab.bench.connection import BenchConnection
    from lab.bench.prompts import Prompts
    from lab.traces.trace import Trace, TraceRequest
    from router.placement import Objective


@dataclass(slots=True, kw_only=True)
class ReplayedRequest:
    """The outcome of a request that was sent. Times are seconds since the replay's start."""

    request: TraceRequest
    sent_s: float
    outcome: str = "cancelled"
    """"served", "rejected" (overload), "failed" or "cancelled" (by Ctrl-C)."""
    error: BatonError | None = None
    """The error of a rejected or failed request."""
    token_times: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many at once; this and all below of one that is served."""
    usage: Usage | None = None
    timing: Timing | None = None

    @property
    def late_s(self) -> float:
        return self.sent_s - self.request.arrival_s

    @property
    def ttft_s(self) -> float:
        return self.token_times[0][0] - self.request.arrival_s

    @property
    def itl_s(self) -> float:
        """Mean; 0 for a single token."""
        num_intervals = self.request.num_output_tokens - 1
        return (self.token_times[-1][0] - self.token_times[0][0]) / num_intervals if num_intervals else 0.0

    @property
    def intervals(self) -> Iterator[tuple[float, int]]:
        """Seconds between two tokens, and how often; as many as the simulator has for the same request.

        Tokens that come in one message come at the same time: one interval is the time since the message before, and
        all others are 0. So a stall is as long here as it is for a reader, and not divided by what comes after it.
        """
        before_s = None
        for time_s, num_tokens in self.token_times:
            if before_s is not None:
                yield time_s - before_s, 1
            if num_tokens > 1:
                yield 0.0, num_tokens - 1
            before_s = time_s

    def settle(self, chunks: Sequence[tuple[float, GenerateChunk]]) -> None:
        """Records the whole answer, with the time of each message. An answer that is not what was asked has failed."""
        token_times = [(time_s, len(chunk.token_ids)) for time_s, chunk in chunks if chunk.token_ids]
        num_tokens = sum(count for _, count in token_times)
        usage, timing = (chunks[-1][1].usage, chunks[-1][1].timing) if chunks else (None, None)
        asked = self.request.num_prompt_tokens, self.request.num_output_tokens
        got = (usage.prompt_tokens if usage else None), num_tokens
        if usage is None or timing is None or got != asked:
            self.refuse(WorkerFailed(f"prompt and answer have {got} tokens where {asked} were asked for"))
            return
        self.outcome, self.token_times, self.usage, self.timing = "served", token_times, usage, timing

    def refuse(self, error: BatonError) -> None:
        self.outcome = "rejected" if isinstance(error, Overloaded) else "failed"
        self.error = error


@dataclass(slots=True)
class Replay:
    """The outcomes of the requests, in order of arrival."""

    observed: list[ReplayedRequest] = field(default_factory=list)
    interrupted: bool = False


async def check(connection: BenchConnection, prompts: Prompts, objective: Objective) -> None:
    """Generates one token from a prompt of one token, the largest id: the first request of a replay then finds an open
    connection, and an error that every request would get is reported once.

    Raises:
        InvalidRequest: the model's vocabulary is smaller than that of the prompts.
        BatonError: any other error, except that the cluster is overloaded.
    """
    call = connection.generate(message_of([prompts.vocab_size - 1], 1, objective))
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        typed = connection.typed(error)
        if isinstance(typed, InvalidRequest):
            raise InvalidRequest(f"{typed}; lower --vocab") from None
        if not isinstance(typed, Overloaded):
            raise typed from None


OnEnded = Callable[[ReplayedRequest], None]
"""Called with each request when it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of a replay, and how they are sent."""

    trace: Trace
    prompts: Prompts
    objective: Objective
    """The objective that every request carries."""
    concurrency: int = 0
    """The most requests in flight; others wait, and their waiting counts. 0: no limit."""


async def replay(load: Load, connection: BenchConnection, on_ended: OnEnded) -> Replay:
    """Sends all of a trace, and waits for the answers. Ctrl-C cancels the unfinished ones, and this still returns."""
    result = Replay()
    sending = asyncio.create_task(_send(load, connection, on_ended, result.observed))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, sending.cancel)
    try:
        await sending
    except asyncio.CancelledError:
        result.interrupted = True
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return result


async def _send(load: Load, connection: BenchConnection, on_ended: OnEnded, observed: list[ReplayedRequest]) -> None:
    trace = load.trace
    places = asyncio.Semaphore(load.concurrency or len(trace.requests))
    async with asyncio.TaskGroup() as group:
        start_s = time.monotonic()
        for number, request in enumerate(trace.requests):
            token_ids = load.prompts.token_ids(number, request)
            message = message_of(token_ids, request.num_output_tokens, load.objective)
            await asyncio.sleep(start_s + request.arrival_s - time.monotonic())
            await places.acquire()
            one = ReplayedRequest(request=request, sent_s=time.monotonic() - start_s)
            observed.append(one)
            reading = group.create_task(_read(connection, connection.generate(message), one, start_s))

            def over(_: asyncio.Task[None], one: ReplayedRequest = one) -> None:
                places.release()
                on_ended(one)

            reading.add_done_callback(over)


async def _read(
    connection: BenchConnection, call: grpc.aio.UnaryStreamCall[bytes, bytes], one: ReplayedRequest, start_s: float
) -> None:
    """Takes the time of each message, and looks into them when the last has come."""
    messages: list[tuple[float, bytes]] = []
    try:
        while isinstance(message := await call.read(), bytes):
            messages.append((time.monotonic() - start_s, message))
    except grpc.aio.AioRpcError as error:
        one.refuse(connection.typed(error))
    else:
        one.settle([(time_s, chunk_of(message)) for time_s, message in messages])
    finally:
        call.cancel()

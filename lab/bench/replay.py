"""Sends each request of a trace at its time, regardless of the requests before it.

A request's clock starts when it is due, not when it is sent, so a client that falls behind, or that waits because of a
limit on requests in flight, does not hide waiting time of users. The report also shows how late requests were sent.
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
    """Outcome of a request that was sent. Times are seconds since the replay's start."""

    request: TraceRequest
    sent_s: float
    outcome: str = "cancelled"
    """"served", "rejected" (overload), "failed" or "cancelled" (by Ctrl-C)."""
    error: BatonError | None = None
    """The error of a rejected or failed request."""
    token_times: list[tuple[float, int]] = field(default_factory=list)
    """Time of each arrival of tokens, and their number; like the fields below only set for a served request."""
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
        """Mean inter-token latency; 0 for a single token."""
        num_intervals = self.request.num_output_tokens - 1
        return (self.token_times[-1][0] - self.token_times[0][0]) / num_intervals if num_intervals else 0.0

    @property
    def intervals(self) -> Iterator[tuple[float, int]]:
        """Yield the seconds between two tokens, and how often; as many as the simulator has for the same request.

        Tokens in one message arrive at the same time: one interval is the time since the message before, and all others
        are 0. So a stall appears with its full length, as a reader sees it, and is not spread over the tokens after it.
        """
        before_s = None
        for time_s, num_tokens in self.token_times:
            if before_s is not None:
                yield time_s - before_s, 1
            if num_tokens > 1:
                yield 0.0, num_tokens - 1
            before_s = time_s

    def settle(self, chunks: Sequence[tuple[float, GenerateChunk]]) -> None:
        """Record the complete response, with the time of each message. An unexpected response counts as failed."""
        token_times = [(time_s, len(chunk.token_ids)) for time_s, chunk in chunks if chunk.token_ids]
        num_tokens = sum(count for _, count in token_times)
        usage, timing = (chunks[-1][1].usage, chunks[-1][1].timing) if chunks else (None, None)
        asked = self.request.num_prompt_tokens, self.request.num_output_tokens
        got = (usage.prompt_tokens if usage else None), num_tokens
        if usage is None or timing is None or got != asked:
            self.refuse(WorkerFailed(f"prompt and output have {got} tokens, but {asked} were requested"))
            return
        self.outcome, self.token_times, self.usage, self.timing = "served", token_times, usage, timing

    def refuse(self, error: BatonError) -> None:
        self.outcome = "rejected" if isinstance(error, Overloaded) else "failed"
        self.error = error


@dataclass(slots=True)
class Replay:
    """Outcomes of the requests, in order of arrival."""

    observed: list[ReplayedRequest] = field(default_factory=list)
    interrupted: bool = False


async def check(connection: BenchConnection, prompts: Prompts, objective: Objective) -> None:
    """Generate one token from a prompt of one token, the largest id.

    The first request of a replay then finds an open connection, and an error that every request would get is reported
    once.

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
"""Callback for each request that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests of a replay, and how they are sent."""

    trace: Trace
    prompts: Prompts
    objective: Objective
    """Objective that every request carries."""
    concurrency: int = 0
    """Maximum number of requests in flight; others wait, and their waiting time counts. 0: no limit."""


async def replay(load: Load, connection: BenchConnection, on_ended: OnEnded) -> Replay:
    """Send all requests of a trace, and wait for the responses. Ctrl-C cancels the unfinished ones and still
    returns.
    """
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
    """Record the time of each message, and parse the messages when the last one has arrived."""
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

"""The worker's side of the single stream from each router; the router's side is `router.serve.worker_client`.

    router ──> worker    start 7, start 8      start 9       cancel 8
    router <── worker    7: tokens, 8: tokens      7: tokens, 8: tokens, 9: tokens      7: tokens, 7: ended, 9: tokens

A frame contains everything that was ready when it was written, so the tokens of one engine step travel together. One
gRPC call per choice and one message per token would cost the router more than everything else it does for them.

Each call is a task, and no call can block another: its events go into an unbounded outbox. The outbox stays small,
because events are tokens, and a call produces at most as many as its request asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from opentelemetry.context import Context

from baton import wire
from baton.blocks import KEY_BYTES
from baton.errors import BatonError, InvalidRequest, Unsupported
from baton.hypotheses import NO_HYPOTHESES, Hypotheses
from baton.images import MAX_REQUEST_BYTES
from baton.messages import (
    Adapter,
    CallEnded,
    CancelCall,
    DecodeRequest,
    Event,
    FetchRequest,
    Migrate,
    PrefillRequest,
    SeenImage,
    SequenceSpec,
    StartCall,
)
from baton.registered_adapters import DIGEST, MAX_RANK, check_name, check_path
from baton.rpc.errors import to_failed
from baton.tasks import Outbox
from baton.telemetry import logs, tracing
from baton.v1 import worker_pb2, worker_pb2_grpc
from worker.adapters import AdapterChecks

MAX_FRAME_EVENTS = 4096
MAX_TOP_K = 2**20
"""Upper bound of `top_k`; no vocabulary is larger."""
Prefill = Callable[[PrefillRequest, Context], AsyncGenerator[Event]]
Decode = Callable[[DecodeRequest, Context], AsyncGenerator[Event]]
Fetch = Callable[[FetchRequest, Context], AsyncGenerator[Event]]
Look = Callable[[Sequence[bytes], bytes], Awaitable[tuple[SeenImage, ...]]]

logger = logging.getLogger(__name__)


def max_message_bytes(max_model_len: int, *, takes_images: bool = False) -> int:
    """Return the message size limit for a worker with this sequence length: a router's frame, or gRPC's own limit.

    Args:
        takes_images: a frame may have a single command with the images of a request instead.
    """
    start_bytes = int(wire.max_start_bytes(max_model_len))
    most = max(wire.MAX_FRAME_COMMANDS * start_bytes, 4 * 2**20)
    return max(most, start_bytes + MAX_REQUEST_BYTES) if takes_images else most


class CallServicer(worker_pb2_grpc.WorkerCallsServicer):
    """Runs the calls of any number of routers.

    Args:
        prefill, decode, fetch: each returns the events of one call; None: the worker refuses such calls. Closing the
            generator cancels the call and frees what it holds. Typed errors reach the router unchanged.
        checks: checks the folders of adapters; None: this worker serves no adapters.
        look: returns what the engine sees of images (`ServingEngine.look`); None: it takes none.
        max_model_len: maximum number of tokens in a sequence on this worker.
    """

    def __init__(
        self,
        *,
        prefill: Prefill | None = None,
        decode: Decode | None = None,
        fetch: Fetch | None = None,
        checks: AdapterChecks | None = None,
        look: Look | None = None,
        max_model_len: float = math.inf,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._fetch = fetch
        self._checks = checks or AdapterChecks()
        self._look = look
        self._max_model_len = max_model_len
        self._running: dict[asyncio.Task[None], tuple[StartCall, Outbox[tuple[int, Event]]]] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def wait_until_idle(self) -> None:
        """Wait until no call runs. The next call may already have started on return."""
        await self._is_idle.wait()

    def migrate(self, hypotheses: Callable[[SequenceSpec], Hypotheses]) -> None:
        """Ask the routers to migrate every choice that decodes here, or waits to.

        Args:
            hypotheses: returns the state of the beam search of a call's sequence (see `ServingEngine.hypotheses`).
        """
        for start, outbox in self._running.values():
            if isinstance(start.request, DecodeRequest):
                found = hypotheses(start.request.sequence)
                outbox.put((start.call_id, Migrate(found if wire.may_travel(found) else NO_HYPOTHESES)))

    async def Serve(  # type: ignore[override]  # noqa: N802 - the generated name; it writes, where it could yield
        self, requests: AsyncIterator[worker_pb2.ServeRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Serve a router's stream until the router closes it or is gone, which cancels its calls.

        Raises:
            InvalidRequest: a message is not one that routers send.
        """
        outbox = Outbox[tuple[int, Event]]()
        writing = asyncio.create_task(_write(context, outbox))
        calls: dict[int, asyncio.Task[None]] = {}
        try:
            async for frame in requests:
                for command in wire.commands(frame, self._max_model_len):
                    if isinstance(command, CancelCall):
                        _cancel(calls.get(command.call_id))
                    elif command.call_id in calls:
                        taken = InvalidRequest(f"call {command.call_id} of this stream is running already")
                        outbox.put((command.call_id, to_failed(taken)))
                    else:
                        call = calls[command.call_id] = asyncio.create_task(self._run(command, outbox))
                        self._running[call] = _without_images(command), outbox
                        self._is_idle.clear()
                        call.add_done_callback(partial(self._forget, calls, command.call_id))
                    del command
                del frame  # it may hold images, and the next one may take long
        finally:
            writing.cancel()
            for call in calls.values():
                _cancel(call)
            await asyncio.wait((writing, *calls.values()))

    async def CheckAdapter(  # noqa: N802
        self, request: worker_pb2.CheckAdapterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.CheckAdapterResponse:
        facts = await self._checks.check(request.path)
        return worker_pb2.CheckAdapterResponse(digest=facts.digest, rank=facts.rank, num_bytes=facts.num_bytes)

    async def Look(  # noqa: N802 - the generated name
        self, request: worker_pb2.LookRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.LookResponse:
        """Answer a router's question about images. Raises InvalidRequest and Unsupported if they cannot be taken."""
        if self._look is None:
            raise Unsupported("this worker takes no images")
        return wire.look_response(await self._look(*wire.looked_at(request)))

    async def _run(self, start: StartCall, outbox: Outbox[tuple[int, Event]]) -> None:
        call_id = start.call_id
        try:
            async with contextlib.aclosing(self._events(start)) as events:
                del start  # its images are no longer needed once the engine has them
                async for event in events:
                    outbox.put((call_id, event))
            outbox.put((call_id, CallEnded()))
        except BatonError as error:
            outbox.put((call_id, to_failed(error)))
        except asyncio.CancelledError:
            outbox.put((call_id, CallEnded()))
            raise
        except Exception:  # a bug: the log gets the traceback, the router a short error
            logger.exception("a call failed unexpectedly")
            outbox.put((call_id, to_failed(BatonError("internal error; the worker's log says more"))))

    def _events(self, start: StartCall) -> AsyncGenerator[Event]:
        trace = tracing.from_metadata(start.trace.items())
        logs.about(tracing.span_of(trace))
        if isinstance(start.request, BatonError):
            raise start.request
        if start.request is not None:
            require_servable(start.request.sequence)
        match start.request:
            case PrefillRequest() as request if self._prefill is not None:
                return self._prefill(request, trace)
            case DecodeRequest() as request if self._decode is not None:
                return self._decode(request, trace)
            case FetchRequest() as request if self._fetch is not None:
                return self._fetch(request, trace)
        raise Unsupported("this worker does not serve such calls")

    def _forget(self, calls: dict[int, asyncio.Task[None]], call_id: int, call: asyncio.Task[None]) -> None:
        del calls[call_id], self._running[call]
        if not self._running:
            self._is_idle.set()


def _without_images(start: StartCall) -> StartCall:
    """Return a call as it is kept while it runs."""
    if isinstance(start.request, PrefillRequest | DecodeRequest) and start.request.images:
        return replace(start, request=replace(start.request, images=()))
    return start


def require_servable(spec: SequenceSpec) -> None:
    """Raise InvalidRequest for a value that would affect other calls too, since an engine serves many in one step.

    The engine itself checks the number of tokens.
    """
    settled = spec.sampling.max_tokens is not None and spec.sampling.seed is not None
    for ok, rule in (
        (0 < spec.num_prompt_tokens <= len(spec.token_ids), "num_prompt_tokens must be 1 to the number of token_ids"),
        (settled, "the router must settle max_tokens and seed"),
        (
            not settled or len(spec.token_ids) - spec.num_prompt_tokens < spec.max_tokens,
            "max_tokens must be more than the tokens that the answer has",
        ),
        (0 <= spec.sampling.top_k <= MAX_TOP_K, f"top_k must be 0 to {MAX_TOP_K}"),
        (not spec.sampling.stop and spec.sampling.n == 1, "stop strings and n stay with the router"),
        (
            _may_search(spec) if spec.sampling.use_beam_search else spec.hypotheses == NO_HYPOTHESES,
            "the hypotheses are not those of its beam search",
        ),
        (spec.ttft_s >= 0 and spec.itl_s >= 0, "ttft_s and itl_s must be at least 0"),  # which NaN is not
        (len(spec.cache_seed) <= KEY_BYTES, f"cache_seed must have at most {KEY_BYTES} bytes"),
        (_are_placed(spec), "its images must have a digest and a place of their own in the prompt"),
        (_may_be_registered(spec.adapter), "its adapter must have fields that can be registered"),
    ):
        if not ok:
            raise InvalidRequest(f"a worker cannot serve this sequence: {rule}")


def _are_placed(spec: SequenceSpec) -> bool:
    """Return whether the images of a sequence are named, and lie in its prompt one after the other."""
    end = 0
    for image in spec.images:
        if len(image.digest) != KEY_BYTES or image.offset < end or not image.num_tokens or len(image.grid) > 3:
            return False
        end = image.end
    return end <= spec.num_prompt_tokens


def _may_be_registered(adapter: Adapter | None) -> bool:
    """Return whether an adapter is None, or one that an operator may have registered."""
    if adapter is None:
        return True
    try:
        check_name(adapter.name, model_id="")  # this worker need not know the model's name
        check_path(adapter.path)
    except InvalidRequest:
        return False
    return DIGEST.fullmatch(adapter.digest) is not None and 0 < adapter.rank <= MAX_RANK


def _may_search(spec: SequenceSpec) -> bool:
    """Return whether a beam search may be in the state of its hypotheses, or at its start."""
    params, running, finished = spec.sampling, spec.hypotheses.running, spec.hypotheses.finished
    beams, num_tokens = (*running, *finished), len(running[0].token_ids) if running else 0
    return (
        max(len(running), len(finished)) <= params.num_beams
        and num_tokens < spec.max_tokens
        and all(len(beam.token_ids) == num_tokens and beam.finish_reason is None for beam in running)
        and all(0 < len(beam.token_ids) <= num_tokens and beam.finish_reason is not None for beam in finished)
        and all(math.isfinite(beam.logprob) for beam in beams)
        and all(len(beam.scores) == len(beam.token_ids) * params.wants_scores for beam in beams)
        and len({beam.scores.num_top for beam in beams if beam.token_ids}) <= 1
        and spec.token_ids[spec.num_prompt_tokens :] == spec.hypotheses.shared_token_ids()
    )


def _cancel(call: asyncio.Task[None] | None) -> None:
    """Cancel the call once: a second cancellation would interrupt its cleanup."""
    if call is not None and not call.cancelling():
        call.cancel()


async def _write(context: grpc.aio.ServicerContext[Any, Any], outbox: Outbox[tuple[int, Event]]) -> None:
    while True:
        await context.write(wire.serve_response(await outbox.take(MAX_FRAME_EVENTS)))

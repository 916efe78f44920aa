"""The stream of one HTTP request between a gateway and the endpoint picker.

The gateway sends the parts of the request and later those of the response, and the picker responds to each part. The
body mode, which the gateway announces with the headers, decides when the picker can name the endpoint:

- full duplex (which the protocol of the inference extension demands): the picker keeps the body until it is complete,
  then names the endpoint in the response to the headers, and sends the body back in pieces;
- buffered: the picker answers the headers at once and names the endpoint in the response to the body;
- streamed or none: the picker chooses by load, before it sees the body.

The picker changes no body. It forwards a body that it cannot parse, or for which it has no memory. The router then
validates it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from baton.cluster import RouterInfo
from baton.errors import (
    BatonError,
    InvalidRequest,
    ModelNotFound,
    NotRead,
    NotWhole,
    NoWorker,
    Overloaded,
    TooLarge,
)
from baton.rpc.errors import CallContext
from router.api.exchange import MAX_BODY_BYTES
from router.api.parsing import BodyParser, PartCount
from router.picker import wire
from router.picker.pick import Wanted, choose
from router.picker.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

logger = logging.getLogger(__name__)
MAX_HELD_BYTES = 64 * 2**20
"""Maximum size of the incomplete bodies of all streams. Further bodies are passed on without being read."""
IDLE_S = 3600.0
"""Longest wait for the next part of a response. After it the picker ends the stream, and the gateway proceeds without
the picker."""
RETRY_AFTER_S = 1.0
FAILING_S = 5.0
"""Time for which an endpoint comes last after a gateway has served a request elsewhere, although it was named first. A
dead router is no longer announced after that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Queries of the picker to its router."""

    routers: Callable[[], Sequence[RouterInfo]]
    """Returns the live routers of the endpoint."""
    lookup: Callable[[wire.Request, str, Mapping[str, Any]], Wanted]
    """Returns the session of a request and the models that may serve it.

    Its arguments are the request, the requested model ("" if the body names none) and the whole body. It
    raises ModelNotFound if the client may learn that there is no such model; after any other error, a router answers.
    """
    is_crowded: Callable[[], bool]
    """Returns whether the endpoint is at capacity, so that the picker refuses requests."""


class Chooser:
    """Chooses the endpoints of requests."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._parser = BodyParser()
        self._failing: dict[str, float] = {}
        """Endpoint -> time on the monotonic clock until which it comes last."""

    async def choose(self, request: wire.Request, body: bytes | None, parts: PartCount | None) -> tuple[str, ...]:
        """Return the endpoints to try, in order.

        Args:
            body: the whole body; None: it is not known.
            parts: counts of the body; None: it has too many parts to be parsed.

        Raises:
            ModelNotFound: the client requests a model that does not exist.
            Overloaded: the endpoint is at capacity. Requests without a body cost little, and never get this error.
            NoWorker: no router can be chosen.
        """
        if request.has_body and self._sources.is_crowded():
            raise Overloaded("the endpoint is at capacity; try again later", RETRY_AFTER_S)
        wanted = None
        if body and parts is not None:
            wanted = await self._wanted(request, body, parts)
        # A request of an unknown session gets a random one, so it goes to the less loaded of two random routers.
        now_s = time.monotonic()
        self._failing = {each: until_s for each, until_s in self._failing.items() if until_s > now_s}
        found = wanted or Wanted(os.urandom(8))
        endpoints = choose(self._sources.routers(), found, request.subset, self._failing)
        if not endpoints:
            which = "" if request.subset is None else " of those that the gateway allows"
            raise NoWorker(
                f"no router{which} is alive at an IP address; set cluster.advertise_host to one if it is not"
            )
        return endpoints

    def note_served(self, endpoints: Sequence[str], served: str) -> None:
        """Record which of the named endpoints has served a request. If not the first, put that one last for a while."""
        if served not in endpoints or served == (first := endpoints[0]):
            return
        if first not in self._failing:
            logger.warning("%s has served a request that was meant for %s, which comes last now", served, first)
        self._failing[first] = time.monotonic() + FAILING_S

    async def _wanted(self, request: wire.Request, body: bytes, parts: PartCount) -> Wanted | None:
        def read(value: Any) -> Wanted | None:
            if not isinstance(value, dict):
                return None
            model = value.get("model")
            return self._sources.lookup(request, model if isinstance(model, str) else "", value)

        try:
            return await self._parser.parse(body, parts, request.api_key or "", read)
        except ModelNotFound:
            raise
        except (BatonError, ValueError, RecursionError):
            return None


@dataclass(slots=True)
class BodyMemory:
    """Memory for the bodies of all streams."""

    num_free: int

    def take(self, num_bytes: int) -> bool:
        """Take memory, and return True; return False if there is not enough."""
        if num_bytes > self.num_free:
            return False
        self.num_free -= num_bytes
        return True


class Exchange:
    """One stream. `run` follows it to its end.

    Args:
        call: the gateway's call.
        stall_s: longest wait for the next part of a request, and for a gateway that does not read.
    """

    def __init__(self, call: CallContext, chooser: Chooser, memory: BodyMemory, stall_s: float) -> None:
        self._call = call
        self._chooser = chooser
        self._memory = memory
        self._stall_s = stall_s
        self._request: wire.Request | None = None
        """None: the headers have not arrived."""
        self._is_answered = False
        """True if the gateway has the endpoints, or needs none."""
        self._endpoints: Sequence[str] = ()
        """Endpoints that the gateway has received."""
        self._is_over = False
        self._held: deque[bytes] = deque()
        """The body as far as it has arrived, until the endpoints are named."""
        self._num_held = 0
        self._num_bytes = 0
        """Size of the body as far as it has arrived."""
        self._parts: PartCount | None = PartCount()
        """None: the body has too many parts."""

    async def run(self) -> None:
        """Answer the gateway's messages until the stream ends.

        Raises:
            InvalidRequest: a message is empty or out of order.
            NotWhole: the gateway sends nothing.
            NotRead: the gateway does not read.
        """
        try:
            while not self._is_over and (message := await self._next()) is not None:
                if not message.observability_mode:
                    await self._on(message)
        except NotWhole as error:
            if self._request is None:
                raise
            await self._refuse(error)
        finally:
            self._release()

    async def _next(self) -> ProcessingRequest | None:
        """Return the next message; None: there is none."""
        try:
            async with asyncio.timeout(IDLE_S if self._is_answered else self._stall_s):
                message = await self._call.read()
        except TimeoutError:
            if self._is_answered:
                return None
            raise NotWhole(f"nothing more of the request has arrived within {self._stall_s:g} s") from None
        return None if message is grpc.aio.EOF else message

    async def _on(self, message: ProcessingRequest) -> None:
        kind, request = message.WhichOneof("request"), self._request
        if (kind == "request_headers") != (request is None) or kind is None:
            raise InvalidRequest(f"a message of the stream has no content or is out of order: {kind}")
        match kind:
            case "request_headers":
                await self._on_headers(message)
            case "request_body":
                await self._on_body(message)
            case "request_trailers":
                await self._on_trailers(message)
            case _:
                await self._on_response(message)

    # -- request -------------------------------------------------------------------------------------------------------

    async def _on_headers(self, message: ProcessingRequest) -> None:
        self._request = request = wire.request_of(message)
        if not request.has_body or request.request_mode not in wire.DUPLEX | wire.WHOLE:
            await self._name(None)
        elif request.request_mode in wire.WHOLE:
            await self._write(wire.unchanged(message))

    async def _on_body(self, message: ProcessingRequest) -> None:
        assert self._request is not None
        body, is_last = message.request_body.body, message.request_body.end_of_stream
        self._num_bytes += len(body)
        if self._num_bytes > MAX_BODY_BYTES:
            await self._refuse(TooLarge(f"the body is longer than {MAX_BODY_BYTES} bytes; shorten the prompt"))
        elif self._request.request_mode not in wire.DUPLEX:
            if self._request.request_mode in wire.WHOLE and not self._is_answered:
                await self._hold(body)
                await self._name(b"".join(self._held), wire.picked_at_body)
            else:
                await self._write(wire.unchanged(message))
        elif self._is_answered:
            await self._send_back(wire.pieces_of(body), is_last)
        elif await self._hold(body):
            if is_last:
                await self._name_and_send_back(b"".join(self._held), True)
        else:
            await self._name_and_send_back(None, False)
            await self._send_back(wire.pieces_of(body), is_last)

    async def _on_trailers(self, message: ProcessingRequest) -> None:
        assert self._request is not None
        if self._is_answered:
            await self._write(wire.unchanged(message))
        elif self._request.request_mode in wire.WHOLE:  # a request without a body, whose headers are answered
            await self._name(None, wire.picked_at_trailers)
        else:
            await self._name_and_send_back(b"".join(self._held), False)
            if not self._is_over:
                await self._write(wire.unchanged(message))

    async def _hold(self, body: bytes) -> bool:
        """Keep a part of the body. Returns False if there is no memory for it."""
        if not self._memory.take(len(body)):
            return False
        self._num_held += len(body)
        for piece in wire.pieces_of(body):
            self._held.append(piece)
            self._count(piece)
            await asyncio.sleep(0)  # other streams are served in between
        return True

    def _count(self, piece: bytes) -> None:
        if self._parts is not None:
            try:
                self._parts.add(piece)
            except InvalidRequest:  # the router says so
                self._parts = None

    async def _name_and_send_back(self, body: bytes | None, is_last: bool) -> None:
        await self._name(body)
        if not self._is_over:
            await self._send_back_held(is_last)

    async def _name(
        self,
        body: bytes | None,
        response: Callable[[Sequence[str]], ProcessingResponse] = wire.picked_at_headers,
    ) -> None:
        """Send the gateway the endpoints, or the error that it must send to its client.

        Args:
            body: the whole body; None: it is not known.
            response: returns the response that names the endpoints.
        """
        assert self._request is not None
        try:
            self._endpoints = await self._chooser.choose(self._request, body, self._parts)
        except BatonError as error:
            await self._refuse(error)
            return
        self._is_answered = True
        await self._write(response(self._endpoints))

    async def _send_back(self, pieces: Sequence[bytes], is_last: bool) -> None:
        for number, piece in enumerate(pieces, 1):
            await self._write(wire.request_piece(piece, is_last and number == len(pieces)))

    async def _send_back_held(self, is_last: bool) -> None:
        while self._held:
            piece = self._held.popleft()
            await self._write(wire.request_piece(piece, is_last and not self._held))
            self._give_back(len(piece))

    async def _refuse(self, error: BatonError) -> None:
        assert self._request is not None
        self._is_over = True
        await self._write(wire.refusal(error, self._request.path, self._request.request_id))

    def _release(self) -> None:
        self._held.clear()
        self._give_back(self._num_held)

    def _give_back(self, num_bytes: int) -> None:
        self._memory.num_free += num_bytes
        self._num_held -= num_bytes

    # -- response ------------------------------------------------------------------------------------------------------

    async def _on_response(self, message: ProcessingRequest) -> None:
        assert self._request is not None
        self._is_answered = True  # also if the gateway has answered its client without a router
        self._release()
        if message.WhichOneof("request") == "response_headers":
            self._chooser.note_served(self._endpoints, wire.served_of(message))
        if message.WhichOneof("request") == "response_body" and self._request.response_mode in wire.DUPLEX:
            pieces = wire.pieces_of(message.response_body.body)
            for number, piece in enumerate(pieces, 1):
                is_last = message.response_body.end_of_stream and number == len(pieces)
                await self._write(wire.response_piece(piece, is_last))
        else:
            await self._write(wire.unchanged(message))

    async def _write(self, response: ProcessingResponse) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._call.write(response)
        except TimeoutError:
            raise NotRead(f"the gateway has read no response for {self._stall_s:g} s") from None

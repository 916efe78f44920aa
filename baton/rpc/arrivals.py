"""Limits on the messages that a server receives: their number at a time, and their duration.

gRPC buffers the received part of a message until the message is complete. A call whose message the server does not read
yet buffers at most one window of it. So the server reads a message only when its call is admitted and has a place. A
connection has a few places, and all connections together have some more. Other calls wait, and the connections are
served round robin. While a connection waits because others have all places, messages that are incomplete after a moment
are preempted. So a client that sends as fast as it can is served, however many others hold their messages back.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.errors import InvalidRequest, NotWhole, Overloaded
from baton.rpc.errors import CallContext

MIB = 2**20
MESSAGE_S = 30.0
"""Longest time from the moment when a server reads a message until the message is complete, in seconds."""
HELD_BYTES = 64 * MIB
"""Maximum bytes of incoming messages of admitted calls of an endpoint, if each has the maximum length."""
OPEN_HELD_BYTES = 16 * MIB
"""Maximum bytes of incoming messages of public calls: health and reflection."""
CONNECTIONS_SHARE = 4
"""One connection has at most a quarter of the places."""
MAX_WAITING = 4096
"""Maximum number of calls that wait for a place. Each holds a window of its message."""
MAX_SLOW = 16_384
"""Maximum number of connections that are remembered as slow."""
TICK_S, TICKS = 0.025, 2
"""A message is preempted after two ticks. At the first, the event loop may not know yet that it is complete."""
SLOW_TICKS = 20
"""Ticks until a message is preempted for a slow connection: ending and restarting calls has a cost, too."""
OPEN = "/grpc."
"""Prefix of the public methods."""


@dataclass(eq=False, slots=True)
class _TakenPlace:
    connection: str
    limit: asyncio.Timeout | None = None
    """None: its call does not know yet that it has the place."""
    num_ticks: int = 0
    """Number of ticks since it was taken."""
    makes_room: bool = False


_Line = dict[str, deque[asyncio.Future[_TakenPlace]]]
"""Connection -> its waiting calls, the oldest first. The first connection is served next."""


@dataclass(slots=True, kw_only=True)
class MessagePlaces:
    """Places for incoming messages.

    While connections wait for a place, connections whose messages are incomplete after two ticks become slow, until one
    of their messages is complete. Slow connections keep half of the places, and other connections are served first.

    Args:
        num: places of all connections.
        num_per_connection: places of one connection.
        message_s: longest time for a message, in seconds.
    """

    num: int
    num_per_connection: float
    message_s: float
    _taken: dict[str, list[_TakenPlace]] = field(default_factory=dict)
    """Connection -> its places, the oldest first."""
    _num_taken: int = 0
    _slow: dict[str, None] = field(default_factory=dict)
    """Slow connections, the one first that has been slow for the longest time."""
    _lines: tuple[_Line, _Line] = field(default_factory=lambda: ({}, {}))
    """Waiting connections: those that are not slow, and those that are."""
    _num_waiting: int = 0
    _ticking: asyncio.TimerHandle | None = None

    async def read(self, context: CallContext) -> Any:
        """Read a call's next message, which has a place until it is complete; grpc.aio.EOF: there is none.

        Raises:
            NotWhole: it takes too long.
            Overloaded: it was preempted, or too many messages wait.
        """
        connection = context.peer()
        is_free = self._is_free(connection in self._slow) and self._has_share(connection)
        place = self._take(connection) if is_free else await self._turn(connection)
        try:
            async with asyncio.timeout(self.message_s) as place.limit:
                message = await context.read()
        except TimeoutError:
            if place.makes_room:
                raise Overloaded("the message was preempted because it was incomplete; send it again") from None
            raise NotWhole(f"the client has not sent the whole message within {self.message_s:g} s") from None
        finally:
            self._give_back(place)
        self._set_slow(connection, False)
        return message

    def _is_free(self, is_slow: bool) -> bool:
        return self._num_taken < self.num and not (is_slow and self._num_over >= 0)

    @property
    def _num_over(self) -> int:
        """Number of places that slow connections have beyond their half; below 0: that many are left to them."""
        return sum(len(self._taken[each]) for each in self._taken if each in self._slow) - max(self.num // 2, 1)

    def _has_share(self, connection: str) -> bool:
        return len(self._taken.get(connection, ())) < self.num_per_connection

    def _take(self, connection: str) -> _TakenPlace:
        place = _TakenPlace(connection)
        self._taken.setdefault(connection, []).append(place)
        self._num_taken += 1
        return place

    def _give_back(self, place: _TakenPlace) -> None:
        places = self._taken[place.connection]
        places.remove(place)
        if not places:
            del self._taken[place.connection]
        self._num_taken -= 1
        self._grant()

    def _set_slow(self, connection: str, is_slow: bool) -> None:
        if is_slow == (connection in self._slow):
            return
        if (waiting := self._lines[not is_slow].pop(connection, None)) is not None:
            self._lines[is_slow][connection] = waiting
        if is_slow:
            self._slow[connection] = None
        else:
            del self._slow[connection]
        if len(self._slow) > MAX_SLOW:
            self._set_slow(next(iter(self._slow)), False)

    async def _turn(self, connection: str) -> _TakenPlace:
        """Wait for a place."""
        turn: asyncio.Future[_TakenPlace] = asyncio.get_running_loop().create_future()
        self._lines[connection in self._slow].setdefault(connection, deque()).append(turn)
        self._num_waiting += 1
        if self._num_waiting > MAX_WAITING:
            those = self._lines[0] | self._lines[1]
            longest = self._next_of(max(those, key=lambda each: len(those[each])))
            if not longest.done():
                longest.set_exception(Overloaded("too many messages wait to be received; send it again"))
        self._grant()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(connection, turn)
            elif turn.exception() is None:
                self._give_back(turn.result())
            raise

    def _next_of(self, connection: str) -> asyncio.Future[_TakenPlace]:
        turn = self._lines[connection in self._slow][connection][0]
        self._forget(connection, turn)
        return turn

    def _forget(self, connection: str, turn: asyncio.Future[_TakenPlace]) -> None:
        line = self._lines[connection in self._slow]
        if turn in line.get(connection, ()):  # a cancelled call may have been granted a place before it knows
            line[connection].remove(turn)
            self._num_waiting -= 1
            if not line[connection]:
                del line[connection]

    def _grant(self) -> None:
        """Grant free places to waiting calls, one connection after the other."""
        for is_slow, line in enumerate(self._lines):
            while (
                self._is_free(bool(is_slow)) and (connection := next(filter(self._has_share, line), None)) is not None
            ):
                turn = self._next_of(connection)
                if connection in line:
                    line[connection] = line.pop(connection)  # it is served last in the next round
                if not turn.done():
                    turn.set_result(self._take(connection))
            if self._ticking is None and any(map(self._has_share, line)):
                self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        """Preempt old messages, if connections wait because others have the places."""
        self._ticking = None
        num_first, num_slow = (sum(map(self._has_share, line)) for line in self._lines)
        places = [place for those in sorted(self._taken.values(), key=len, reverse=True) for place in those]
        for place in places:
            place.num_ticks += 1
            if place.num_ticks >= TICKS:
                self._set_slow(place.connection, True)
        num_first = max(num_first, self._num_over) if num_first else 0
        for place in places:
            if place.num_ticks < TICKS or place.makes_room or place.limit is None or place.limit.expired():
                continue
            if num_first:
                num_first -= 1
            elif num_slow and place.num_ticks >= SLOW_TICKS:
                num_slow -= 1
            else:
                continue
            place.makes_room = True
            place.limit.reschedule(asyncio.get_running_loop().time())
        self._grant()


class Arrivals(grpc.aio.ServerInterceptor):
    """Interceptor that reads a message only when its call has one of the limited places; see `MessagePlaces`.

    It must be the last interceptor, so that the others can reject a call before any of it is read. Every handler that
    it returns takes a stream of messages, also for methods that take one message.

    Args:
        max_message_bytes: maximum size of a message that the server accepts.
        message_s: maximum time to receive one message, in seconds.
    """

    def __init__(self, max_message_bytes: int, message_s: float = MESSAGE_S) -> None:
        num = max(HELD_BYTES // max_message_bytes, 1)
        share = max(num // CONNECTIONS_SHARE, 1)
        self._admit = MessagePlaces(num=num, num_per_connection=share, message_s=message_s)
        num_open = max(OPEN_HELD_BYTES // max_message_bytes, 1)
        self._open = MessagePlaces(num=num_open, num_per_connection=math.inf, message_s=message_s)
        self._known: dict[str, tuple[Any, Any]] = {}
        """Handler of each method, and its replacement."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        known = self._known.get(details.method)
        if known is None or known[0] is not handler:
            known = self._known[details.method] = handler, self._received(handler, details.method.startswith(OPEN))
        return known[1]

    def _received(self, handler: Any, is_open: bool) -> Any:
        places = self._open if is_open else self._admit
        if not handler.request_streaming:
            method = handler.unary_stream if handler.response_streaming else handler.unary_unary
            method = _of_one(method, places)
        elif is_open:
            method = _of_many(handler.stream_stream, places)
        else:
            return handler  # between members that have proved their identity
        return streaming(handler, method)


def streaming(handler: Any, method: Callable[..., Any]) -> Any:
    """Return the handler with another method, which takes a stream of messages."""
    make: Any = (
        grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    )
    return make(method, handler.request_deserializer, handler.response_serializer)


def _of_one(method: Callable[..., Any], places: MessagePlaces) -> Callable[..., Any]:
    async def message(context: CallContext) -> Any:
        found = await places.read(context)
        if found is grpc.aio.EOF:
            raise InvalidRequest("the call has no message")
        return found

    async def answered(_: Any, context: CallContext) -> Any:
        return await method(await message(context), context)

    async def streamed(_: Any, context: CallContext) -> AsyncIterator[Any]:
        async with contextlib.aclosing(method(await message(context), context)) as responses:
            async for response in responses:
                yield response

    return streamed if inspect.isasyncgenfunction(method) else answered


def _of_many(method: Callable[..., Any], places: MessagePlaces) -> Callable[..., Any]:
    async def messages(context: CallContext) -> AsyncIterator[Any]:
        while (message := await places.read(context)) is not grpc.aio.EOF:
            yield message

    async def streamed(_: Any, context: CallContext) -> AsyncIterator[Any]:
        async with contextlib.aclosing(method(messages(context), context)) as responses:
            async for response in responses:
                yield response

    return streamed

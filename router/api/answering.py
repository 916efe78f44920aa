"""Answers a request of any API, whole or as a stream.

An endpoint reads its body (`read_body`), gives the request an id (`named`), builds a `GenerateRequest` and asks for its
chunks (`chunks_of`), all within `router.api.taking.Taking`. Then it answers with the chunks (`answered`), in the format
of its API (`AnswerForm`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from fastapi import Request
from fastapi.responses import Response

from baton.api import GenerateChunk, GenerateRequest, Timing
from baton.errors import BatonError
from baton.tasks import cancel_and_wait
from baton.telemetry import tracing
from router.admission.tenants import Tenant
from router.api.exchange import (
    WAITING,
    EventStream,
    JsonAnswer,
    id_headers,
    limit_headers,
    timing_headers,
    unless_disconnected,
)
from router.api.several import at_once, together
from router.service import RouterService
from router.timeline.log import Ingress

PATIENCE_S = 5.0
"""Longest wait for the first chunk before a stream's headers are sent. An error before the headers sets the status."""
WAIT_S = 10.0
"""Time between two comments of a stream that waits for its first token."""


class AnswerForm(Protocol):
    """Format in which an API writes the answer to one request."""

    async def whole(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> dict[str, Any]:
        """Return the whole answer, built from the first chunk and the rest. Always closes `chunks`."""
        ...

    def events(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> AsyncGenerator[bytes]:
        """Yield the server-sent events of the first chunk and of the rest. Always closes `chunks`.

        An error becomes an event as well, because the status is already sent.
        """
        ...

    def broken(self, error: BatonError) -> bytes:
        """Return the last event of a stream that this error ends, whatever events came before it."""
        ...


class Asked(NamedTuple):
    """Request that is ready to be answered. It keeps nothing of the body, because an answer may take minutes."""

    chunks: AsyncGenerator[GenerateChunk]
    form: AnswerForm
    is_streamed: bool


def chunks_of(
    service: RouterService,
    request: Request,
    asked: Sequence[GenerateRequest],
    *,
    is_streamed: bool,
    num_choices: int = 1,
) -> AsyncGenerator[GenerateChunk]:
    """Return the chunks of the answers to one prompt or several, generated for the request's tenant.

    Args:
        num_choices: number of choices per prompt.

    Raises:
        InvalidRequest: see `at_once`.
    """
    address, port = request.scope.get("server") or ("", 0)
    ingress = Ingress(address, port or 0, is_streamed)
    trace = tracing.from_metadata(request.headers.items())
    tenant: Tenant = request.state.tenant
    starts = [partial(service.generate, each, trace, tenant, ingress) for each in asked]
    num_answers = max(num_choices, asked[0].sampling.get("best_of") or 1)
    return together(starts, num_choices, at_once(tenant, len(asked), num_answers))


async def answered(
    request: Request, chunks: AsyncGenerator[GenerateChunk], form: AnswerForm, is_streamed: bool
) -> Response:
    """Return the response. A client that disconnects ends the request everywhere.

    Raises:
        BatonError: the request is refused, or fails before its first chunk.
        ClientDisconnect: the client has disconnected.
    """
    if not is_streamed:
        body, headers = await unless_disconnected(request, _whole(chunks, form))
        return JsonAnswer(body, headers=id_headers(request) | headers)
    # Wait a moment for the first chunk, so that a refusal can still set the status code.
    first = asyncio.create_task(_first(chunks))
    try:
        await unless_disconnected(request, asyncio.wait((first,), timeout=PATIENCE_S))
    except BaseException:
        await cancel_and_wait((first,))
        raise
    ahead, headers = request.app.state.ahead, id_headers(request)
    if not first.done():
        return EventStream(_once_begun(first, chunks, form), headers, ahead, form.broken)
    headers |= limit_headers(first.result().quota)
    return EventStream(form.events(first.result(), chunks), headers, ahead, form.broken)


async def _first(chunks: AsyncGenerator[GenerateChunk]) -> GenerateChunk:
    return await anext(chunks)


async def _once_begun(
    first: asyncio.Task[GenerateChunk], chunks: AsyncGenerator[GenerateChunk], form: AnswerForm
) -> AsyncGenerator[bytes]:
    """Yield comments until the first chunk comes, so that no proxy takes the connection for dead; then the events.

    An error becomes an event as well.
    """
    try:
        while not first.done():
            yield WAITING
            await asyncio.wait((first,), timeout=WAIT_S)
        begun = first.result()
    except BatonError as error:
        yield form.broken(error)
        return
    finally:
        await cancel_and_wait((first,))
    async with contextlib.aclosing(form.events(begun, chunks)) as events:
        async for each in events:
            yield each


async def _whole(chunks: AsyncGenerator[GenerateChunk], form: AnswerForm) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the whole answer, and the headers with the tenant's remaining quota and the request's timing."""
    timings: list[Timing] = []

    async def noted() -> AsyncGenerator[GenerateChunk]:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if chunk.timing is not None:
                    timings.append(chunk.timing)
                yield chunk

    following = noted()
    first = await anext(following)
    body = await form.whole(first, following)
    return body, limit_headers(first.quota) | timing_headers(timings[0] if timings else None)

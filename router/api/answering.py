"""How a request of any API is answered, whole or as a stream.

An endpoint reads its body (`read_body`), names the request (`named`), makes a `GenerateRequest` of it, asks for its
chunks (`chunks_of`) and answers with them (`answered`), in the form of its API (`AnswerForm`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from baton.api import GenerateChunk, GenerateRequest
from baton.telemetry import tracing
from router.api.exchange import EventStream, id_headers, unless_disconnected
from router.api.several import together
from router.request.model import Ingress
from router.service import RouterService


class AnswerForm(Protocol):
    """How an API writes the answer to one request."""

    async def whole(self, chunks: AsyncGenerator[GenerateChunk]) -> dict[str, Any]:
        """Reads all chunks and returns the whole answer. Closes them, at whatever point it ends."""
        ...

    def events(self, first: GenerateChunk, chunks: AsyncGenerator[GenerateChunk]) -> AsyncGenerator[str]:
        """Yields server-sent events: those of the first chunk, and of those that follow. Closes the chunks.

        An error is an event as well: the status is long sent.
        """
        ...


def chunks_of(
    service: RouterService,
    request: Request,
    asked: Sequence[GenerateRequest],
    *,
    is_streamed: bool,
    num_choices: int = 1,
) -> AsyncGenerator[GenerateChunk]:
    """Returns the answers to what was asked in the name of the request's tenant, one prompt or several.

    Args:
        num_choices: of each prompt.
    """
    address, port = request.scope.get("server") or ("", 0)
    ingress = Ingress(address, port or 0, is_streamed)
    trace = tracing.from_metadata(request.headers.items())
    starts = [partial(service.generate, each, trace, request.state.tenant, ingress) for each in asked]
    return together(starts, num_choices)


async def answered(
    request: Request, chunks: AsyncGenerator[GenerateChunk], form: AnswerForm, *, is_streamed: bool
) -> Response:
    """Returns the answer. A client that leaves ends it everywhere.

    Raises:
        BatonError: it is refused, or fails before there is something of it.
        ClientDisconnect: the client has left.
    """
    if not is_streamed:
        return JSONResponse(await unless_disconnected(request, form.whole(chunks)), headers=id_headers(request))
    # The first chunk is awaited here, so that a refusal still becomes a status code.
    first = await unless_disconnected(request, anext(chunks))
    return EventStream(form.events(first, chunks), id_headers(request))

"""The endpoints of the Responses API: a stateless translation of what /v1/chat/completions serves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from baton.api import GenerateRequest
from baton.errors import InvalidRequest
from router.admission import check_model
from router.api.answering import answered, chunks_of
from router.api.exchange import id_headers, named, read_body
from router.api.openai import SloBody
from router.api.responses.body import InputBody, ResponsesBody
from router.api.responses.form import ResponseForm
from router.api.responses.head import head_of
from router.api.responses.prompt import chat_of
from router.service import RouterService

PATH = "/v1/responses"
COUNT_PATH = "/v1/responses/input_tokens"
_PARAMS = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "structured_outputs": "text.format",
}
"""Names in the service's refusals -> the fields of this API."""


def add_endpoints(app: FastAPI, service: RouterService) -> None:
    """Adds the endpoints."""

    async def responses(request: Request) -> Response:
        return await _answer(service, request, await read_body(request, ResponsesBody))

    async def input_tokens(request: Request) -> Response:
        return await _count(service, request, await read_body(request, InputBody))

    app.add_route(PATH, responses, ["POST"])
    app.add_route(COUNT_PATH, input_tokens, ["POST"])


async def _answer(service: RouterService, request: Request, body: ResponsesBody) -> Response:
    response_id = named(request, body.request_id, "resp_")
    slo = body.slo or SloBody()
    generate = GenerateRequest(
        prompt=chat_of(body),
        request_id=response_id,
        model=body.model or "",
        sampling=body.sampling(),
        priority=body.priority or 0,
        ttft_ms=slo.ttft_ms,
        itl_ms=slo.itl_ms,
        e2e_ms=slo.e2e_ms,
        skip_reasoning=body.include_reasoning is False,
    )
    is_streamed = bool(body.stream)
    chunks = chunks_of(service, request, [generate], is_streamed=is_streamed)
    head = head_of(body, response_id=response_id, created_at=int(time.time()), model=service.facts.id)
    with _in_our_words():
        return await answered(request, chunks, ResponseForm(head), is_streamed=is_streamed)


async def _count(service: RouterService, request: Request, body: InputBody) -> Response:
    check_model(body.model or "", service.facts)
    body.check()
    with _in_our_words():
        tokens = await service.tokenize(chat_of(body), request.state.tenant)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(tokens)}, headers=id_headers(request))


@contextlib.contextmanager
def _in_our_words() -> Iterator[None]:
    """Lets refusals name fields of this API."""
    try:
        yield
    except InvalidRequest as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise

"""The endpoints of the Responses API: a stateless translation to the service behind /v1/chat/completions."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from baton.api import GenerateRequest
from router.admission import check_model
from router.api.answering import Asked, Taking, answered, chunks_of
from router.api.exchange import id_headers, ignored_of, named
from router.api.openai import SloBody
from router.api.responses.body import InputBody, ResponsesBody, head_of
from router.api.responses.prompt import chat_of
from router.api.responses.tools import Functions
from router.api.responses.writer import ResponseForm
from router.api.routes import STREAMED, Reader
from router.service import RouterService


def add_endpoints(app: FastAPI, service: RouterService) -> None:
    """Add the endpoints."""

    @app.post("/v1/responses", responses=STREAMED)
    async def responses(request: Request, read: Reader[ResponsesBody]) -> Response:
        """Answer input items with a response."""
        with Taking(service, request, "chat"):
            asked = _asked(service, request, await read())
        return await answered(request, *asked)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(request: Request, read: Reader[InputBody]) -> Response:
        """Count the tokens of input items."""
        with Taking(service, request, "count_tokens"):
            body = await read()
            check_model(body.model or "", service.facts, service.adapters)
            functions = Functions.of(body.tools or ())
            chat = chat_of(body, functions, lambda: service.model.tokenizer.chat_template, ignored_of(request))
        tokens = await service.tokenize(chat, request.state.tenant)
        counted = {"object": "response.input_tokens", "input_tokens": len(tokens)}
        return JSONResponse(counted, headers=id_headers(request))


def _asked(service: RouterService, request: Request, body: ResponsesBody) -> Asked:
    response_id = named(request, body.request_id, "resp_")
    slo, functions = body.slo or SloBody(), Functions.of(body.tools or ())
    generate = GenerateRequest(
        prompt=chat_of(body, functions, lambda: service.model.tokenizer.chat_template, ignored_of(request)),
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
    model = service.name_of(generate.model)
    head = head_of(body, response_id=response_id, created_at=int(time.time()), model=model)
    return Asked(chunks, ResponseForm(head, functions.places), is_streamed)

"""Anthropic's endpoints: stateless translations to and from the values that all APIs share."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from baton.api import GenerateRequest
from router.admission import check_model
from router.api.answering import Asked, Taking, answered, chunks_of
from router.api.anthropic.body import CountTokensBody, MessageBody
from router.api.anthropic.events import MessageForm
from router.api.anthropic.prompt import chat_of
from router.api.exchange import id_headers, ignored_of, named
from router.api.routes import STREAMED, Reader
from router.service import RouterService


def add_endpoints(app: FastAPI, service: RouterService) -> None:
    """Add Anthropic's endpoints."""

    @app.post("/v1/messages", responses=STREAMED)
    async def messages(request: Request, read: Reader[MessageBody]) -> Response:
        """Answer a chat."""
        with Taking(service, request, "chat"):
            asked = _asked(service, request, await read())
        return await answered(request, *asked)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, read: Reader[CountTokensBody]) -> Response:
        """Count the tokens of a prompt."""
        with Taking(service, request, "count_tokens"):
            body = await read()
            check_model(body.model, service.facts, service.adapters)
            prompt = chat_of(body, service.model.tokenizer.chat_template, ignored_of(request))
        tokens = await service.tokenize(prompt, request.state.tenant)
        return JSONResponse({"input_tokens": len(tokens)}, headers=id_headers(request))


def _asked(service: RouterService, request: Request, body: MessageBody) -> Asked:
    request_id, ignored = named(request, None, "msg_"), ignored_of(request)
    sampling = body.sampling()
    if "thinking_budget" in sampling and service.model.format.reasoning is None:
        del sampling["thinking_budget"]
        ignored.note("thinking")
    asked = GenerateRequest(
        prompt=chat_of(body, service.model.tokenizer.chat_template, ignored),
        request_id=request_id,
        model=body.model,
        sampling=sampling,
        skip_reasoning=body.skips_reasoning,
        continuous_usage=True,
        shortens_answer=True,
    )
    is_streamed = bool(body.stream)
    chunks = chunks_of(service, request, [asked], is_streamed=is_streamed)
    form = MessageForm(request_id, service.name_of(body.model), request.state.request_id, body.max_tokens)
    return Asked(chunks, form, is_streamed)

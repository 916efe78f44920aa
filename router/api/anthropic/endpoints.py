"""Anthropic's endpoints: stateless translations to and from the values that all APIs share."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from baton.api import GenerateRequest
from router.admission import check_model
from router.api.answering import answered, chunks_of
from router.api.anthropic.body import CountTokensBody, MessageBody
from router.api.anthropic.events import MessageForm
from router.api.anthropic.prompt import chat_of
from router.api.exchange import id_headers, named, read_body
from router.service import RouterService


def add_endpoints(app: FastAPI, service: RouterService) -> None:
    """Adds Anthropic's endpoints."""

    async def messages(request: Request) -> Response:
        body = await read_body(request, MessageBody)
        request_id = named(request, None, "msg_")
        asked = GenerateRequest(
            prompt=chat_of(body, service.model.tokenizer.chat_template),
            request_id=request_id,
            model=body.model,
            sampling=body.sampling(),
            skip_reasoning=body.skips_reasoning,
            continuous_usage=True,
        )
        is_streamed = bool(body.stream)
        chunks = chunks_of(service, request, [asked], is_streamed=is_streamed)
        form = MessageForm(request_id, service.facts.id, request.state.request_id)
        return await answered(request, chunks, form, is_streamed=is_streamed)

    async def count_tokens(request: Request) -> Response:
        body = await read_body(request, CountTokensBody)
        check_model(body.model, service.facts)
        prompt = chat_of(body, service.model.tokenizer.chat_template)
        tokens = await service.tokenize(prompt, request.state.tenant)
        return JSONResponse({"input_tokens": len(tokens)}, headers=id_headers(request))

    app.add_route("/v1/messages", messages, ["POST"])
    app.add_route("/v1/messages/count_tokens", count_tokens, ["POST"])

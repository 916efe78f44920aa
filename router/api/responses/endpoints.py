"""The endpoints of the Responses API: a stateless translation to the service behind /v1/chat/completions."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from baton.api import Chat, GenerateRequest
from baton.chat import WITH_IMAGES, ChatMessage, content_of, tool_call
from baton.errors import InvalidRequest
from baton.images import image_in_url
from router.api.answering import Asked, Taking, answered, chunks_of
from router.api.efforts import Effort, Template, set_effort, variables_of
from router.api.exchange import id_headers, ignored_of, named
from router.api.fields import Ignored
from router.api.openai import SloBody
from router.api.responses.body import (
    CustomCallItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputBody,
    InputImagePart,
    InputItem,
    InputTextPart,
    MessageItem,
    OutputTextPart,
    ReasoningItem,
    RefusalPart,
    ResponsesBody,
    head_of,
)
from router.api.responses.tools import Functions, tools_of
from router.api.responses.writer import ResponseForm
from router.api.routes import STREAMED, Reader
from router.models.table import ModelTable


def add_endpoints(app: FastAPI, models: ModelTable) -> None:
    """Add the endpoints."""

    @app.post("/v1/responses", responses=STREAMED)
    async def responses(request: Request, read: Reader[ResponsesBody]) -> Response:
        """Answer input items with a response."""
        with Taking(models, request, "chat") as taking:
            asked = _asked(taking, request, await read())
        return await answered(request, *asked)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(request: Request, read: Reader[InputBody]) -> Response:
        """Count the tokens of input items."""
        with Taking(models, request, "count_tokens") as taking:
            body = await read()
            service = taking.service(body)
            functions = Functions.of(body.tools or ())
            chat = chat_of(body, functions, lambda: service.model.tokenizer.chat_template, ignored_of(request))
        tokens = await service.tokenize(chat, request.state.tenant)
        counted = {"object": "response.input_tokens", "input_tokens": len(tokens)}
        return JSONResponse(counted, headers=id_headers(request))


def _asked(taking: Taking, request: Request, body: ResponsesBody) -> Asked:
    service = taking.service(body)
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


def chat_of(body: InputBody, functions: Functions, template: Template, ignored: Ignored) -> Chat:
    """Return the chat of a body.

    Args:
        functions: the functions of the body.
        template: returns the model's template.
        ignored: records fields without effect.

    Raises:
        InvalidRequest: the input is empty, two fields contradict each other, or an image is not valid.
        Unsupported: an image has a media type that is not supported, or is elsewhere.
    """
    messages = [] if body.instructions is None else [ChatMessage(role="system", content=body.instructions)]
    match body.input:
        case str(text):
            messages.append(ChatMessage(role="user", content=text))
        case []:
            raise InvalidRequest("input is empty; send at least one item", "input")
        case list(items):
            messages += messages_of(items, functions)
    tools, choice = tools_of(functions, body.tool_choice, body.parallel_tool_calls)
    variables = variables_of(body.chat_template_kwargs, template, ignored, has_tools=bool(tools))
    effort = Effort(body.reasoning.effort if body.reasoning else None, "reasoning.effort")
    set_effort(variables, effort, template, ignored, has_tools=bool(tools))
    return Chat(
        messages=tuple(messages),
        tools=tools,
        tool_choice=choice,
        template_kwargs=variables,
        parse_special=bool(body.parse_special),
    )


def messages_of(items: Sequence[InputItem], functions: Functions) -> list[ChatMessage]:
    """Return the messages of a chat with these items.

    Consecutive reasoning, text and calls were one answer, so they become one message of the assistant. Text behind the
    calls belongs to the same message.

    Raises:
        InvalidRequest, Unsupported: an image is not valid, or belongs to a message that can have none.
    """
    messages: list[ChatMessage] = []
    turn = _AssistantTurn()
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not turn.takes(item):
            messages += turn.message()
            turn = _AssistantTurn()
        match item:
            case MessageItem(role="assistant", content=content):
                text, parts = _content(content, where)
                _check_role("assistant", parts, where)
                turn.texts.append(text)
            case ReasoningItem():
                turn.reasonings += [part.text for part in item.content or item.summary or ()]
            case FunctionCallItem(call_id=call_id, name=own, arguments=arguments):
                name = functions.name_of(item.namespace, own)
                turn.calls.append(tool_call(call_id=call_id, name=name, arguments=arguments))
            case CustomCallItem(call_id=call_id, name=name, input=text):
                written = json.dumps({"input": text}, ensure_ascii=False)
                turn.calls.append(tool_call(call_id=call_id, name=name, arguments=written))
            case FunctionCallOutputItem(call_id=call_id, output=output):
                text, parts = _content(output, where, "output")
                messages.append(ChatMessage(role="tool", content=text, parts=parts, tool_call_id=call_id))
            case MessageItem(role=role, content=content):
                text, parts = _content(content, where)
                _check_role(role, parts, where)
                messages.append(ChatMessage(role=role, content=text, parts=parts))
    return [*messages, *turn.message()]


@dataclass(slots=True)
class _AssistantTurn:
    """Texts, calls and reasoning of one answer of the assistant so far."""

    reasonings: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def takes(self, item: InputItem) -> bool:
        """Return whether the item can belong to the same answer."""
        match item:
            case ReasoningItem():
                return not (self.texts or self.calls)
            case MessageItem(role="assistant"):
                return bool(self.calls) or not self.texts
            case FunctionCallItem() | CustomCallItem():
                return True
        return False

    def message(self) -> list[ChatMessage]:
        """Return the message in a list; empty if the answer has no content."""
        if not (self.reasonings or self.texts or self.calls):
            return []
        return [
            ChatMessage(
                role="assistant",
                content="".join(self.texts),
                reasoning="\n".join(self.reasonings) if self.reasonings else None,
                tool_calls=tuple(self.calls),
            )
        ]


def _content(
    content: str | Sequence[InputTextPart | InputImagePart | OutputTextPart | RefusalPart],
    where: str,
    name: str = "content",
) -> tuple[str, tuple[str | bytes, ...]]:
    """Return the `content` and the `parts` of a message."""
    if isinstance(content, str):
        return content, ()
    return content_of([_part(part, f"{where}.{name}[{index}]") for index, part in enumerate(content)])


def _check_role(role: str, parts: Sequence[str | bytes], where: str) -> None:
    if parts and role not in WITH_IMAGES:
        raise InvalidRequest(f"{where} of role {role} has an image; only users and tools send images", where)


def _part(part: InputTextPart | InputImagePart | OutputTextPart | RefusalPart, where: str) -> str | bytes:
    match part:
        case InputImagePart(image_url=url):
            return image_in_url(url, f"{where}.image_url")
        case RefusalPart(refusal=refusal):
            return refusal
    return part.text

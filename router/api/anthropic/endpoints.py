"""Anthropic's endpoints: stateless translations to and from the values that all APIs share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from baton.api import Chat, GenerateRequest
from baton.chat import ChatMessage, content_of, tool_call
from baton.errors import InvalidRequest
from baton.images import image_in_base64
from baton.nesting import check_levels
from baton.tools import ANY_TOOL, Tool, ToolChoice, ToolUse
from router.api.answering import Asked, Taking, answered, chunks_of
from router.api.anthropic.body import (
    AnyToolBody,
    AutoToolBody,
    CountTokensBody,
    ImageBlock,
    MessageBody,
    NoToolBody,
    OneToolBody,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabledBody,
    ToolBody,
    ToolResultBlock,
    ToolUseBlock,
)
from router.api.anthropic.events import MessageForm
from router.api.efforts import Effort, set_effort, thinking_switch
from router.api.exchange import id_headers, ignored_of, named
from router.api.fields import Ignored
from router.api.routes import STREAMED, Reader
from router.models.table import ModelTable
from router.prompt import ChatTemplate

ERROR = "Error: "
"""Prefix of the result of a failed call, because chat templates have no other way to mark it."""


def add_endpoints(app: FastAPI, models: ModelTable) -> None:
    """Add Anthropic's endpoints."""

    @app.post("/v1/messages", responses=STREAMED)
    async def messages(request: Request, read: Reader[MessageBody]) -> Response:
        """Answer a chat."""
        with Taking(models, request, "chat") as taking:
            asked = _asked(taking, request, await read())
        return await answered(request, *asked)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, read: Reader[CountTokensBody]) -> Response:
        """Count the tokens of a prompt."""
        with Taking(models, request, "count_tokens") as taking:
            body = await read()
            service = taking.service(body)
            prompt = chat_of(body, service.model.tokenizer.chat_template, ignored_of(request))
        tokens = await service.tokenize(prompt, request.state.tenant)
        return JSONResponse({"input_tokens": len(tokens)}, headers=id_headers(request))


def _asked(taking: Taking, request: Request, body: MessageBody) -> Asked:
    service, request_id, ignored = taking.service(body), named(request, None, "msg_"), ignored_of(request)
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


def chat_of(body: CountTokensBody, template: ChatTemplate, ignored: Ignored) -> Chat:
    """Return the chat of a body.

    Consecutive messages of one role are merged. If the last message is the assistant's, the answer continues it.

    Args:
        template: the model's template, which may have a variable that turns the reasoning on and off.
        ignored: records fields without effect.

    Raises:
        InvalidRequest: a tool result has no call before it, a last call has no result, or a call's input is nested too
            deeply, or an image is not valid; `param` names the field.
        Unsupported: an image has a media type that is not supported.
    """
    messages = [ChatMessage(role="system", content=_text(body.system))] if body.system else []
    places = list(enumerate(body.messages))
    known_calls: set[str] = set()
    for role, group in groupby(places, key=lambda place: place[1].role):
        turn = list(group)
        if role == "assistant":
            messages.append(_assistants(turn, known_calls))
        elif role == "user":
            messages += _users(turn, known_calls)
        else:
            messages += [_systems(message) for _, message in turn]
    continues = bool(body.messages) and body.messages[-1].role == "assistant"
    if continues and messages[-1].tool_calls:
        where = f"messages[{len(places) - 1}]"
        raise InvalidRequest(f"{where} calls a tool; a message with the result must follow", where)
    return Chat(
        messages=tuple(messages),
        tools=tuple(map(_tool, body.tools or ())),
        tool_choice=_choice(body),
        template_kwargs=_variables(body, template, ignored),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


def _assistants(turn: Sequence[tuple[int, Any]], known_calls: set[str]) -> ChatMessage:
    thoughts, texts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for place, message in turn:
        content = message.content
        if isinstance(content, str):
            texts.append(content)
            continue
        for index, block in enumerate(content):
            match block:
                case TextBlock(text=text):
                    texts.append(text)
                case ThinkingBlock(thinking=thinking):
                    thoughts.append(thinking)
                case ToolUseBlock(id=call_id, name=name, input=arguments):
                    check_levels(arguments, f"messages[{place}].content[{index}].input")
                    written = json.dumps(arguments, ensure_ascii=False)
                    calls.append(tool_call(call_id=call_id, name=name, arguments=written))
                    known_calls.add(call_id)
    return ChatMessage(
        role="assistant",
        content="".join(texts),  # an answer is cut into blocks around each call
        reasoning="\n".join(thoughts) if thoughts else None,
        tool_calls=tuple(calls),
    )


def _users(turn: Sequence[tuple[int, Any]], known_calls: set[str]) -> list[ChatMessage]:
    """Return the messages of a user's turn: consecutive texts and images are one, and each tool result is one."""
    messages: list[ChatMessage] = []
    parts: list[str | bytes] = []
    """Texts and images of the current message."""
    for place, message in turn:
        content = message.content
        blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        for index, block in enumerate(blocks):
            where = f"messages[{place}].content[{index}]"
            match block:
                case ToolResultBlock():
                    if block.tool_use_id not in known_calls:
                        where += ".tool_use_id"
                        raise InvalidRequest(f"{where} does not match a tool call of an earlier message", where)
                    messages += _user(parts)
                    parts = []
                    messages.append(_result(block, where))
                case TextBlock() | ImageBlock():
                    parts.append(_part(block, where))
    messages += _user(parts)
    return messages or [ChatMessage(role="user", content="")]


def _result(block: ToolResultBlock, where: str) -> ChatMessage:
    given = block.content or ""
    blocks = [TextBlock(type="text", text=given)] if isinstance(given, str) else given
    text, parts = content_of([_part(each, f"{where}.content[{index}]") for index, each in enumerate(blocks)])
    if block.is_error:
        text, parts = ERROR + text, (ERROR, *parts) if parts else ()
    return ChatMessage(role="tool", content=text, parts=parts, tool_call_id=block.tool_use_id)


def _part(block: TextBlock | ImageBlock, where: str) -> str | bytes:
    if isinstance(block, TextBlock):
        return block.text
    return image_in_base64(block.source.data, block.source.media_type, f"{where}.source")


def _user(given: Sequence[str | bytes]) -> list[ChatMessage]:
    """Return a user message of consecutive texts and images; empty if there are none."""
    text, parts = content_of(given)
    return [ChatMessage(role="user", content=text, parts=parts)] if given else []


def _systems(message: Any) -> ChatMessage:
    return ChatMessage(role="system", content=_text(message.content))


def _text(content: str | Sequence[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _tool(tool: ToolBody) -> Tool:
    return Tool(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=bool(tool.strict))


def _choice(body: CountTokensBody) -> ToolChoice:
    match body.tool_choice:
        case AutoToolBody(disable_parallel_tool_use=is_one):
            return ToolChoice(is_parallel=not is_one)
        case AnyToolBody(disable_parallel_tool_use=is_one):
            return ToolChoice(use=ToolUse.REQUIRED, is_parallel=not is_one)
        case OneToolBody(name=name, disable_parallel_tool_use=is_one):
            return ToolChoice(use=ToolUse.REQUIRED, name=name, is_parallel=not is_one)
        case NoToolBody():
            return ToolChoice(use=ToolUse.NONE)
    return ANY_TOOL


def _variables(body: CountTokensBody, template: ChatTemplate, ignored: Ignored) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    has_tools = bool(body.tools)
    effort = Effort(body.output_config.effort if body.output_config else None, "output_config.effort")
    set_effort(variables, effort, lambda: template, ignored, has_tools=has_tools)
    if body.thinking is not None and (switch := thinking_switch(template, has_tools=has_tools)) is not None:
        variables[switch] = not isinstance(body.thinking, ThinkingDisabledBody)
    return variables

"""The bodies of /v1/responses and /v1/responses/input_tokens.

Fields of OpenAI's API that are not served are refused by name, unless they ask for what happens anyway. null stands for
a field that is not set. `router.api.fields` handles unknown fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from baton.chat import MAX_NAME
from baton.structure import StructuredOutputs
from router.api.fields import (
    ByType,
    DeclaredBody,
    Listed,
    OrText,
    Refusal,
    StreamBody,
    StrictBody,
    Values,
    WithoutEffect,
)
from router.api.openai import SloBody
from router.api.responses.tools import AnyChoice, AnyTool

_NO_SUMMARY = WithoutEffect("reasoning is returned in full, not summarized")
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "thinking_budget",
)  # fmt: skip
"""Fields that are sampling parameters of the same name."""


ShortText = Annotated[str, Field(max_length=1024)]
"""Text that several events of an answer repeat. The limit is several times OpenAI's."""
_NOTHING_STORED = "nothing is stored; send the whole conversation as input"

WITHOUT_EFFECT: Mapping[str, str] = {
    "context_management": "conversations are not compacted",
    "include": "there is no additional output; reasoning is returned as text",
    "max_tool_calls": "it limits calls of built-in tools, and there are none",
    "metadata": "it is stored with answers, and answers are not stored",
    "prompt_cache_key": "the prefix cache works automatically, across all requests",
    "prompt_cache_options": "prefixes are cached until their space is needed",
    "prompt_cache_retention": "prefixes are cached until their space is needed",
    "safety_identifier": "it identifies the client's own user",
    "service_tier": "`priority` and the tenant's SLO class set the priority",
    "store": "answers are not stored",
    "user": "it identifies the client's own user",
}
"""Fields that are accepted, and change no answer -> why."""

_REFUSED_OF_BOTH: Mapping[str, Refusal] = {
    "conversation": Refusal(_NOTHING_STORED),
    "previous_response_id": Refusal(_NOTHING_STORED),
    "truncation": Refusal("prompts that are too long are refused", ("disabled", "auto")),
}
REFUSED_OF_INPUT: Mapping[str, Refusal] = {
    **_REFUSED_OF_BOTH,
    "personality": Refusal("use `instructions` for the style of an answer"),
}
"""Fields that are refused when tokens are counted -> why."""
REFUSED: Mapping[str, Refusal] = {
    **_REFUSED_OF_BOTH,
    "access_programs": Refusal("there are no access programs"),
    "background": Refusal("answers are not stored, so a client could not fetch one later", (False,)),
    "image": Refusal("answers are text; send images as items of type input_image"),
    "moderation": Refusal("the operator decides (docs/moderation.md)"),
    "prompt": Refusal("prompt templates are not stored; send the prompt as input"),
    "top_logprobs": Refusal("use /v1/chat/completions for log probabilities", (0,)),
}
"""Fields that are refused -> why."""
_ITEM_ID = WithoutEffect("it names a stored item, and items are not stored")
_STATUS = WithoutEffect("finished and unfinished items are treated alike")
_BREAKPOINT = WithoutEffect("the prefix cache works automatically")
_ID = Annotated[str | None, _ITEM_ID]
_ItemStatus = Annotated[Literal["in_progress", "completed", "incomplete"] | None, _STATUS]
_CALLERS = Refusal("only the model itself calls functions", ({"type": "direct"},))

REFUSED_PARTS: Mapping[str, str] = {
    "input_file": "prompts hold texts and images only",
    "input_audio": "prompts hold texts and images only",
}
"""Parts of a message or of a tool's result that are refused -> why."""


class InputTextPart(StrictBody):
    """Text of the client."""

    type: Literal["input_text", "text"]
    text: str
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, _BREAKPOINT] = None


class InputImagePart(StrictBody):
    """Image of the client."""

    type: Literal["input_image"]
    image_url: str | None = Field(default=None, repr=False)
    """Data URL."""
    file_id: Annotated[Any, Refusal("files are not stored; send a data URL")] = None
    detail: Annotated[str | None, WithoutEffect("the model's own image processor decides")] = None
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, _BREAKPOINT] = None


class OutputTextPart(StrictBody):
    """Text of the model, in the format of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[Any, WithoutEffect("the prompt contains the text only")] = None
    logprobs: Annotated[Any, WithoutEffect("the prompt contains the text only")] = None


class RefusalPart(StrictBody):
    """Text with which a model refused to answer."""

    type: Literal["refusal"]
    refusal: str


class ReasoningTextPart(StrictBody):
    """Text of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryTextPart(StrictBody):
    """Summary of a reasoning."""

    type: Literal["summary_text"]
    text: str


_MessagePart = Annotated[InputTextPart | InputImagePart | OutputTextPart | RefusalPart, ByType(refused=REFUSED_PARTS)]
_OutputPart = Annotated[InputTextPart | InputImagePart | OutputTextPart, ByType(refused=REFUSED_PARTS)]


class MessageItem(StrictBody):
    """Message of the client or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str | Listed[_MessagePart], OrText()]
    id: _ID = None
    status: _ItemStatus = None
    name: Annotated[str | None, WithoutEffect("the prompt contains the role only")] = None
    phase: Annotated[str | None, WithoutEffect("no known chat template reads it")] = None


class _CallItem(StrictBody):
    call_id: str = Field(max_length=MAX_NAME)
    name: str = Field(min_length=1, max_length=MAX_NAME)
    id: _ID = None
    status: _ItemStatus = None
    caller: Annotated[Any, _CALLERS] = None
    is_async: Annotated[Any, Refusal("calls are not asynchronous", (False,))] = Field(default=None, alias="async")


class FunctionCallItem(_CallItem):
    """Function call of an earlier answer."""

    type: Literal["function_call"]
    arguments: str
    namespace: str | None = Field(default=None, max_length=MAX_NAME)


class CustomCallItem(_CallItem):
    """Call of a tool that takes text, from an earlier answer of another service."""

    type: Literal["custom_tool_call"]
    input: str
    namespace: Annotated[str | None, WithoutEffect("the name identifies the tool")] = None


class FunctionCallOutputItem(StrictBody):
    """Result of a function, or of a tool that takes text."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = Field(max_length=MAX_NAME)
    output: Annotated[str | Listed[_OutputPart], OrText()]
    id: _ID = None
    status: _ItemStatus = None
    name: Annotated[str | None, WithoutEffect("the matching call has the function's name")] = None
    caller: Annotated[Any, _CALLERS] = None
    namespace: Annotated[str | None, WithoutEffect("the matching call has the function's namespace")] = None


class ReasoningItem(StrictBody):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: Listed[Annotated[SummaryTextPart, ByType()]] | None = None
    content: Listed[Annotated[ReasoningTextPart, ByType()]] | None = None
    id: _ID = None
    status: _ItemStatus = None
    encrypted_content: Annotated[Any, WithoutEffect("only the service that wrote it can read it")] = None


_NO_TOOLS = "the cluster has no built-in tools, and answers call functions only"
_NO_STORED_ITEMS = "items are not stored; send the items themselves"
_NO_COMPACTION = "conversations are not compacted; send the items that the model must read"

LEFT_OUT_ITEMS: Mapping[str, str] = dict.fromkeys(
    (
        "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call",
        "computer_call_output", "file_search_call", "image_generation_call", "local_shell_call",
        "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools",
        "program", "program_output", "shell_call", "shell_call_output", "tool_search_call", "tool_search_output",
        "web_search_call",
    ),
    _NO_TOOLS,
)  # fmt: skip
"""Items that another service's tools left in a conversation. They are dropped, or refused with `router.strict` -> why.
"""
REFUSED_ITEMS: Mapping[str, str] = {
    "additional_tools": "declare all tools in the request's tools",
    "compaction": _NO_COMPACTION,
    "compaction_trigger": _NO_COMPACTION,
    "configuration_update": "set the fields of the request instead",
    "item_reference": _NO_STORED_ITEMS,
}
"""Items of the input that are refused -> why."""

InputItem = MessageItem | FunctionCallItem | CustomCallItem | FunctionCallOutputItem | ReasoningItem
AnyInputItem = Annotated[InputItem, ByType(refused=REFUSED_ITEMS, left_out=LEFT_OUT_ITEMS, default="message")]


class PlainTextFormat(StrictBody):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(StrictBody):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(StrictBody):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    name: str
    of_json: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Accepted, but every schema is enforced."""


TextFormat = PlainTextFormat | JsonObjectFormat | JsonSchemaFormat


class TextBody(StrictBody):
    """The field `text`."""

    format: Annotated[TextFormat, ByType()] | None = None
    verbosity: Annotated[str | None, WithoutEffect("no known chat template reads it")] = None

    def structure(self) -> StructuredOutputs | None:
        """Return the structure that the answer must have; None: free text.

        Raises:
            InvalidRequest: the schema is too large.
        """
        match self.format:
            case JsonSchemaFormat(of_json=schema):
                return StructuredOutputs(json=json.dumps(schema, ensure_ascii=False))
            case JsonObjectFormat():
                return StructuredOutputs(json_object=True)
        return None

    def echoed(self) -> dict[str, Any]:
        """Return the field as a response echoes it."""
        form = {"type": "text"} if self.format is None else self.format.model_dump(by_alias=True, exclude_none=True)
        return {"format": form, "verbosity": "medium"}


class ReasoningBody(StrictBody):
    """The field `reasoning`."""

    effort: str | None = None
    """Value of the template's variable `reasoning_effort`."""
    summary: Annotated[Any, _NO_SUMMARY] = None
    generate_summary: Annotated[Any, _NO_SUMMARY] = None
    context: Annotated[Any, Refusal("the chat template decides which reasoning is in the prompt", ("auto",))] = None
    mode: Annotated[Any, Refusal("there is only one mode", ("standard",))] = None


class EventOptionsBody(StrictBody):
    """The field `stream_options`."""

    include_obfuscation: Annotated[bool | None, WithoutEffect("events are not padded to hide lengths")] = None


OF_ANSWERS = (
    "max_output_tokens", "temperature", "top_p", "stream", "stream_options", "include", "metadata", "service_tier",
    "store",
)  # fmt: skip
"""Fields of /v1/responses that clients also send to count the tokens of an input."""


class InputBody(DeclaredBody):
    """Request to count the tokens of input items."""

    refused = REFUSED_OF_INPUT
    without_effect: ClassVar[Mapping[str, str]] = dict.fromkeys(OF_ANSWERS, "only the tokens of the input are counted")

    input: Annotated[str | Listed[AnyInputItem], OrText()]
    model: str | None = None
    instructions: str | None = None
    """Text of a system message before all items."""
    tools: Listed[AnyTool] | None = None
    tool_choice: AnyChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    # Not OpenAI's: the names are those of /v1/chat/completions.
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special: bool | None = None
    skip_special_tokens: Literal[True] | None = None
    # See `OF_ANSWERS`.
    max_output_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    stream: Any = None
    stream_options: Any = None
    include: Any = None
    metadata: Any = None
    service_tier: Any = None
    store: Any = None


class ResponsesBody(InputBody, StreamBody):
    """Request to answer input items with a response."""

    refused = REFUSED
    without_effect = WITHOUT_EFFECT

    stream_options: EventOptionsBody | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    # Not OpenAI's either.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Values[str] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    thinking_budget: int | None = None
    include_reasoning: bool | None = None
    request_id: str | None = None
    priority: int | None = None
    slo: SloBody | None = None
    # See `WITHOUT_EFFECT`.
    context_management: Listed[Any] | None = None
    include: Values[str] | None = None
    max_tool_calls: int | None = None
    metadata: Annotated[dict[ShortText, ShortText | float | bool | None] | None, Field(max_length=64)] = None
    prompt_cache_key: ShortText | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: ShortText | None = None
    service_tier: ShortText | None = None
    store: bool | None = None
    user: ShortText | None = None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that the client set, by the service's names."""
        asked = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.max_output_tokens is not None:
            asked["max_tokens"] = self.max_output_tokens
        if self.stop:
            asked["stop"] = tuple(self.stop)
        if structure := self.text.structure() if self.text else None:
            asked["structured_outputs"] = structure
        return asked


def head_of(body: ResponsesBody, *, response_id: str, created_at: int, model: str) -> dict[str, Any]:
    """Return a response without its output: the request's fields as OpenAI echoes them, null if not set.

    Args:
        created_at: in seconds since 1970.
    """
    choice, reasoning = body.tool_choice, body.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "model": model,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort if reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature,
        "text": (body.text or TextBody()).echoed(),
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump() if choice else "auto",
        "tools": [tool.echoed() for tool in body.tools or ()],
        "top_logprobs": 0,
        "top_p": body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }

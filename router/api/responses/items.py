"""The items of a request's `input`: earlier messages, calls, results and reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.chat import MAX_NAME
from router.api.fields import ByType, Listed, OrText, Refusal, StrictBody, WithoutEffect

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
_NOTHING_STORED = "items are not stored; send the items themselves"
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
    "item_reference": _NOTHING_STORED,
}
"""Items of the input that are refused -> why."""

InputItem = MessageItem | FunctionCallItem | CustomCallItem | FunctionCallOutputItem | ReasoningItem
AnyInputItem = Annotated[InputItem, ByType(refused=REFUSED_ITEMS, left_out=LEFT_OUT_ITEMS, default="message")]

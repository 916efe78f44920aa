"""The items of a request's `input`: what was said, called and thought before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.chat import MAX_NAME
from router.api.fields import Refusal, WithoutEffect
from router.api.strict import Listed, StrictBody
from router.api.unions import ByType, OrText

_ITEM_ID = WithoutEffect("names an item that is stored; nothing is stored")
_STATUS = WithoutEffect("an item of the input is what it is, finished or not")
_BREAKPOINT = WithoutEffect("prefixes are found by their tokens")
_ID = Annotated[str | None, _ITEM_ID]
_ItemStatus = Annotated[Literal["in_progress", "completed", "incomplete"] | None, _STATUS]
_CALLERS = Refusal("models call functions themselves, and no program does", ({"type": "direct"},))

REFUSED_PARTS: Mapping[str, str] = {
    "input_image": "prompts are text",
    "input_file": "prompts are text",
    "input_audio": "prompts are text",
}
"""Parts of a message or of a tool's result that are refused -> why."""


class InputTextPart(StrictBody):
    """A text of the client's."""

    type: Literal["input_text", "text"]
    text: str
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, _BREAKPOINT] = None


class OutputTextPart(StrictBody):
    """A text of the model's, as an answer has it."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[Any, WithoutEffect("a prompt has no annotations")] = None
    logprobs: Annotated[Any, WithoutEffect("a prompt has no log probabilities")] = None


class RefusalPart(StrictBody):
    """A text by which a model refused to answer."""

    type: Literal["refusal"]
    refusal: str


class ReasoningTextPart(StrictBody):
    """A text of a reasoning."""

    type: Literal["reasoning_text"]
    text: str


class SummaryTextPart(StrictBody):
    """A text that sums a reasoning up."""

    type: Literal["summary_text"]
    text: str


_MessagePart = Annotated[InputTextPart | OutputTextPart | RefusalPart, ByType(refused=REFUSED_PARTS)]
_OutputPart = Annotated[InputTextPart | OutputTextPart, ByType(refused=REFUSED_PARTS)]


class MessageItem(StrictBody):
    """A message, of the client's or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str | Listed[_MessagePart], OrText()]
    id: _ID = None
    status: _ItemStatus = None
    name: Annotated[str | None, WithoutEffect("the role says who speaks")] = None
    phase: Annotated[str | None, WithoutEffect("no template is known to read it")] = None


class _CallItem(StrictBody):
    call_id: str = Field(max_length=MAX_NAME)
    name: str = Field(min_length=1, max_length=MAX_NAME)
    id: _ID = None
    status: _ItemStatus = None
    caller: Annotated[Any, _CALLERS] = None
    is_async: Annotated[Any, Refusal("a call waits for its result", (False,))] = Field(default=None, alias="async")


class FunctionCallItem(_CallItem):
    """A call of a function, of an earlier answer."""

    type: Literal["function_call"]
    arguments: str
    namespace: str | None = Field(default=None, max_length=MAX_NAME)


class CustomCallItem(_CallItem):
    """A call of a tool that takes a text, of an earlier answer of another service."""

    type: Literal["custom_tool_call"]
    input: str
    namespace: Annotated[str | None, WithoutEffect("the name says which tool it was")] = None


class FunctionCallOutputItem(StrictBody):
    """What a function, or a tool that takes a text, has returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str = Field(max_length=MAX_NAME)
    output: Annotated[str | Listed[_OutputPart], OrText()]
    id: _ID = None
    status: _ItemStatus = None
    name: Annotated[str | None, WithoutEffect("the call has the function's name")] = None
    caller: Annotated[Any, _CALLERS] = None
    namespace: Annotated[str | None, WithoutEffect("the call has the function's namespace")] = None


class ReasoningItem(StrictBody):
    """What the model thought before an earlier answer."""

    type: Literal["reasoning"]
    summary: Listed[Annotated[SummaryTextPart, ByType()]] | None = None
    content: Listed[Annotated[ReasoningTextPart, ByType()]] | None = None
    id: _ID = None
    status: _ItemStatus = None
    encrypted_content: Annotated[Any, WithoutEffect("only another service can read it")] = None


_NO_TOOLS = "the cluster has no tools of its own, and answers call functions only"
_NOTHING_STORED = "nothing is stored; send the items themselves"
_NO_COMPACTION = "conversations are not compacted; send what the model is to read"

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
"""Items that tools of another service have left in a conversation: they are left out, or refused by `router.strict` ->
why."""
REFUSED_ITEMS: Mapping[str, str] = {
    "additional_tools": "set tools",
    "compaction": _NO_COMPACTION,
    "compaction_trigger": _NO_COMPACTION,
    "configuration_update": "a request has one configuration; set its fields",
    "item_reference": _NOTHING_STORED,
}
"""Items of an input that are refused -> why."""

InputItem = MessageItem | FunctionCallItem | CustomCallItem | FunctionCallOutputItem | ReasoningItem
AnyInputItem = Annotated[InputItem, ByType(refused=REFUSED_ITEMS, left_out=LEFT_OUT_ITEMS, default="message")]

"""The blocks that Anthropic's messages consist of, as clients send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.chat import MAX_NAME
from router.api.fields import Refusal, WithoutEffect
from router.api.strict import Listed, StrictBody
from router.api.unions import ByType, OrText

CACHED = WithoutEffect("prefixes are found by their tokens, of whatever request")
NO_TOOLSETS = Refusal("the cluster has no tools of its own")
NO_FILES = "the model reads text"
NO_SERVER_TOOLS = "the cluster runs no tools of its own"
REFUSED_BLOCKS: Mapping[str, str] = {
    "advisor_tool_result": NO_SERVER_TOOLS,
    "bash_code_execution_tool_result": NO_SERVER_TOOLS,
    "browser_state": NO_SERVER_TOOLS,
    "code_execution_tool_result": NO_SERVER_TOOLS,
    "compaction": "nothing is compacted here",
    "container_upload": NO_SERVER_TOOLS,
    "document": NO_FILES,
    "fallback": "one model is served",
    "image": NO_FILES,
    "mcp_tool_listing": NO_SERVER_TOOLS,
    "mcp_tool_result": NO_SERVER_TOOLS,
    "mcp_tool_use": NO_SERVER_TOOLS,
    "search_result": NO_FILES,
    "server_tool_use": NO_SERVER_TOOLS,
    "text_editor_code_execution_tool_result": NO_SERVER_TOOLS,
    "tool_addition": "tools are those of the request",
    "tool_reference": NO_SERVER_TOOLS,
    "tool_removal": "tools are those of the request",
    "tool_search_tool_result": NO_SERVER_TOOLS,
    "web_fetch_tool_result": NO_SERVER_TOOLS,
    "web_search_tool_result": NO_SERVER_TOOLS,
}
"""Types of blocks that are refused by name -> why."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


CacheControl = Annotated[dict[str, Any] | None, CACHED]


class TextBlock(StrictBody):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Annotated[Any, WithoutEffect("a prompt has the text alone")] = None


class ThinkingBlock(StrictBody):
    """What an assistant thought."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str | None, WithoutEffect("a thought is taken as it is")] = None
    cache_control: CacheControl = None


class RedactedThinkingBlock(StrictBody):
    """A thought whose text only another service knows."""

    type: Literal["redacted_thinking"]
    data: Annotated[str, WithoutEffect("nobody here can read it")]


class ToolUseBlock(StrictBody):
    """A call that an assistant asked for."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Annotated[Any, Refusal("calls are the model's own", ({"type": "direct"},))] = None
    toolset_name: Annotated[Any, NO_TOOLSETS] = None


OnlyText = Annotated[TextBlock, ByType(refused=REFUSED_BLOCKS)]
Texts = Annotated[str | Listed[OnlyText], OrText()]


class ToolResultBlock(StrictBody):
    """What a call of a tool has given."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None
    toolset_name: Annotated[Any, NO_TOOLSETS] = None


UserBlock = Annotated[TextBlock | ToolResultBlock, ByType(refused=REFUSED_BLOCKS)]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, ByType(refused=REFUSED_BLOCKS)
]


class UserMessage(StrictBody):
    """A message of the user: texts, and results of calls."""

    role: Literal["user"]
    content: Annotated[str | Listed[UserBlock], OrText()]


class AssistantMessage(StrictBody):
    """A message of the assistant: thoughts, texts and calls."""

    role: Literal["assistant"]
    content: Annotated[str | Listed[AssistantBlock], OrText()]


class SystemMessage(StrictBody):
    """An instruction in the midst of a chat."""

    role: Literal["system"]
    content: Texts
    clear_at: Annotated[Any, Refusal("messages stay", ("never",))] = None
    output_config: Annotated[Any, Refusal("the request's own holds for the whole answer")] = None


MessageBlocks = Annotated[UserMessage | AssistantMessage | SystemMessage, ByType(by="role")]

"""The content blocks and messages of Anthropic's API, as clients send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.chat import MAX_NAME
from router.api.fields import Refusal, WithoutEffect
from router.api.strict import Listed, StrictBody
from router.api.unions import ByType, OrText

CACHED = WithoutEffect("the prefix cache works automatically, across all requests")
NO_TOOLSETS = Refusal("the cluster has no built-in tools")
NO_FILES = "prompts hold texts and images only"
NO_IMAGES = "only the user and tools send images"
NO_URLS = "the router fetches nothing; send the image itself, with a source of type base64"
NO_SERVER_TOOLS = "the cluster has no built-in tools"
REFUSED_BLOCKS: Mapping[str, str] = {
    "advisor_tool_result": NO_SERVER_TOOLS,
    "bash_code_execution_tool_result": NO_SERVER_TOOLS,
    "browser_state": NO_SERVER_TOOLS,
    "code_execution_tool_result": NO_SERVER_TOOLS,
    "compaction": "conversations are not compacted",
    "container_upload": NO_SERVER_TOOLS,
    "document": NO_FILES,
    "fallback": "the cluster serves one model",
    "mcp_tool_listing": NO_SERVER_TOOLS,
    "mcp_tool_result": NO_SERVER_TOOLS,
    "mcp_tool_use": NO_SERVER_TOOLS,
    "search_result": NO_FILES,
    "server_tool_use": NO_SERVER_TOOLS,
    "text_editor_code_execution_tool_result": NO_SERVER_TOOLS,
    "tool_addition": "declare all tools in the request's tools",
    "tool_reference": NO_SERVER_TOOLS,
    "tool_removal": "declare all tools in the request's tools",
    "tool_search_tool_result": NO_SERVER_TOOLS,
    "web_fetch_tool_result": NO_SERVER_TOOLS,
    "web_search_tool_result": NO_SERVER_TOOLS,
}
"""Types of blocks that are refused by name -> why."""
REFUSED_BESIDE_TEXT: Mapping[str, str] = {**REFUSED_BLOCKS, "image": NO_IMAGES}
"""Types of blocks that are refused by name in messages without images -> why."""
REFUSED_SOURCES: Mapping[str, str] = {"url": NO_URLS, "file": NO_URLS}
"""Types of images' sources that are refused by name -> why."""

Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME)]


CacheControl = Annotated[dict[str, Any] | None, CACHED]


class TextBlock(StrictBody):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Annotated[Any, WithoutEffect("the prompt contains the text only")] = None


class Base64Source(StrictBody):
    """Image in the request itself."""

    type: Literal["base64"]
    media_type: str
    data: str = Field(repr=False)


class ImageBlock(StrictBody):
    """Image."""

    type: Literal["image"]
    source: Annotated[Base64Source, ByType(refused=REFUSED_SOURCES)]
    cache_control: CacheControl = None
    transformations: Annotated[Any, Refusal("the model's own image processor decides")] = None


class ThinkingBlock(StrictBody):
    """Reasoning of an assistant."""

    type: Literal["thinking"]
    thinking: str
    signature: Annotated[str | None, WithoutEffect("signatures are not checked")] = None
    cache_control: CacheControl = None


class RedactedThinkingBlock(StrictBody):
    """Encrypted reasoning that only another service can read."""

    type: Literal["redacted_thinking"]
    data: Annotated[str, WithoutEffect("only the service that wrote it can read it")]


class ToolUseBlock(StrictBody):
    """Tool call of an assistant."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl = None
    caller: Annotated[Any, Refusal("only the model itself calls tools", ({"type": "direct"},))] = None
    toolset_name: Annotated[Any, NO_TOOLSETS] = None


OnlyText = Annotated[TextBlock, ByType(refused=REFUSED_BESIDE_TEXT)]
Texts = Annotated[str | Listed[OnlyText], OrText()]
ResultBlock = Annotated[TextBlock | ImageBlock, ByType(refused=REFUSED_BLOCKS)]


class ToolResultBlock(StrictBody):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Annotated[str | Listed[ResultBlock], OrText()] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None
    toolset_name: Annotated[Any, NO_TOOLSETS] = None


UserBlock = Annotated[TextBlock | ImageBlock | ToolResultBlock, ByType(refused=REFUSED_BLOCKS)]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, ByType(refused=REFUSED_BESIDE_TEXT)
]


class UserMessage(StrictBody):
    """Message of the user: texts, images, and results of tool calls."""

    role: Literal["user"]
    content: Annotated[str | Listed[UserBlock], OrText()]


class AssistantMessage(StrictBody):
    """Message of the assistant: reasoning, texts and tool calls."""

    role: Literal["assistant"]
    content: Annotated[str | Listed[AssistantBlock], OrText()]


class SystemMessage(StrictBody):
    """Instruction in the middle of a chat."""

    role: Literal["system"]
    content: Texts
    clear_at: Annotated[Any, Refusal("messages are never cleared from the chat", ("never",))] = None
    output_config: Annotated[Any, Refusal("set output_config of the request instead")] = None


MessageBlocks = Annotated[UserMessage | AssistantMessage | SystemMessage, ByType(by="role")]

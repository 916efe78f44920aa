"""The bodies of /v1/messages and /v1/messages/count_tokens.

Every field of the request types of Anthropic's client is here: served, refused unless it asks for what happens anyway,
or without effect. null stands for a field that is not set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from baton.chat import MAX_NAME
from baton.errors import InvalidRequest
from baton.structure import StructuredOutputs
from router.api.fields import LEFT_OUT, ByType, Listed, OrText, Refusal, StrictBody, Values, WithoutEffect

NOT_STORED = "nothing is stored"
AS_IT_IS = "the model reads the whole prompt"
COUNTED = WithoutEffect("only the tokens of the prompt are counted")
BY_CLASS = WithoutEffect("the tenant's SLO class sets the priority")
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


class JsonFormatBody(StrictBody):
    """The field `output_config.format`."""

    type: Literal["json_schema"]
    of_json: dict[str, Any] = Field(alias="schema")


class OutputConfigBody(StrictBody):
    """The field `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """The template's variable `reasoning_effort`."""
    format: JsonFormatBody | None = None
    task_budget: Annotated[Any, Refusal("use `max_tokens` and `thinking` to limit an answer")] = None


class ThinkingEnabledBody(StrictBody):
    """Reasoning with a maximum number of tokens."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=0)
    display: Literal["summarized", "omitted"] | None = None
    """Whether the answer includes the reasoning; both other values return it unabridged."""
    block_binding: Annotated[Any, Refusal(NOT_STORED)] = None


class ThinkingAdaptiveBody(StrictBody):
    """Reasoning whose length the model decides."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None
    block_binding: Annotated[Any, Refusal(NOT_STORED)] = None


class ThinkingDisabledBody(StrictBody):
    """No reasoning, or reasoning that is not returned."""

    type: Literal["disabled"]


ThinkingBody = Annotated[
    ThinkingEnabledBody | ThinkingAdaptiveBody | ThinkingDisabledBody,
    ByType(refused={"between_tools": "an answer reasons only at its start"}),
]


class AutoToolBody(StrictBody):
    """Tool choice: the model decides whether it calls tools."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyToolBody(StrictBody):
    """Tool choice: the model must call tools, and nothing else."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class OneToolBody(StrictBody):
    """Tool choice: the model must call this tool."""

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class NoToolBody(StrictBody):
    """Tool choice: the model calls no tool."""

    type: Literal["none"]


ToolChoiceBody = Annotated[AutoToolBody | AnyToolBody | OneToolBody | NoToolBody, ByType()]


class ToolBody(StrictBody):
    """Tool of the client."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: Annotated[Any, Refusal("only the model itself calls tools", (["direct"],))] = None
    cache_control: CacheControl = None
    defer_loading: Annotated[Any, WithoutEffect("the prompt contains every tool")] = None
    eager_input_streaming: Annotated[
        bool | None, WithoutEffect("arguments are always streamed as they are generated")
    ] = None
    input_examples: Annotated[Any, WithoutEffect("no known chat template reads it")] = None


def _refuse_servers_own(value: Any) -> Any:
    found = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(found, str) and found != "custom":
        why = "has type {type}, which is not supported: the cluster has no built-in tools"
        raise PydanticCustomError(LEFT_OUT, why, {"type": found[:80].encode("ascii", "backslashreplace").decode()})
    return value


class CountTokensBody(StrictBody):
    """Request to count the tokens of a prompt."""

    model: str
    messages: Listed[MessageBlocks]
    system: Texts | None = None
    tools: Listed[Annotated[ToolBody, BeforeValidator(_refuse_servers_own)]] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfigBody | None = None
    cache_control: CacheControl = None
    billing_policy: Annotated[Any, Refusal("usage counts for the tenant of the API key")] = None
    compaction: Annotated[Any, Refusal(AS_IT_IS)] = None
    context_management: Annotated[Any, WithoutEffect(AS_IT_IS)] = None
    mcp_servers: Annotated[Any, Refusal("the cluster makes no calls to other services", ([],))] = None
    speed: Annotated[Any, BY_CLASS] = None
    # Clients send the fields of /v1/messages here as well.
    max_tokens: Annotated[Any, COUNTED] = None
    stream: Annotated[Any, COUNTED] = None
    stop_sequences: Annotated[Any, COUNTED] = None
    temperature: Annotated[Any, COUNTED] = None
    top_p: Annotated[Any, COUNTED] = None
    top_k: Annotated[Any, COUNTED] = None
    metadata: Annotated[Any, COUNTED] = None
    service_tier: Annotated[Any, COUNTED] = None


class MessageBody(CountTokensBody):
    """Request to answer a chat."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: Values[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Annotated[dict[str, Any] | None, WithoutEffect("it identifies the client's own user")] = None
    container: Annotated[Any, Refusal("the cluster does not run code of clients")] = None
    diagnostics: Annotated[Any, WithoutEffect(NOT_STORED)] = None
    fallback_credit_token: Annotated[Any, Refusal("the cluster serves one model")] = None
    fallbacks: Annotated[Any, Refusal("the cluster serves one model", ([],))] = None
    inference_geo: Annotated[Any, Refusal("the cluster runs in one place", ("global",))] = None
    output_format: JsonFormatBody | None = None
    """The older name of `output_config.format`."""
    service_tier: Annotated[Any, BY_CLASS] = None
    thread: Annotated[Any, Refusal(NOT_STORED)] = None

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that the client set, by the service's names.

        Raises:
            InvalidRequest: the thinking budget is not less than `max_tokens`; see `StructuredOutputs` too.
        """
        asked: dict[str, Any] = {"max_tokens": self.max_tokens}
        for name in ("temperature", "top_p", "top_k"):
            if (value := getattr(self, name)) is not None:
                asked[name] = value
        if self.stop_sequences is not None:
            asked["stop"] = tuple(self.stop_sequences)
        if isinstance(self.thinking, ThinkingEnabledBody):
            if self.thinking.budget_tokens >= self.max_tokens:
                raise InvalidRequest(
                    "thinking.budget_tokens must be less than max_tokens, which includes the reasoning", "thinking"
                )
            asked["thinking_budget"] = self.thinking.budget_tokens
        if (form := self._format()) is not None:
            asked["structured_outputs"] = StructuredOutputs(json=json.dumps(form.of_json, ensure_ascii=False))
        return asked

    def _format(self) -> JsonFormatBody | None:
        newer = self.output_config.format if self.output_config is not None else None
        if newer is not None and self.output_format is not None:
            raise InvalidRequest(
                "output_format is the older name of output_config.format; set one of them", "output_format"
            )
        return newer or self.output_format

    @property
    def skips_reasoning(self) -> bool:
        """True if the reasoning is counted, but not returned."""
        match self.thinking:
            case ThinkingDisabledBody():
                return True
            case ThinkingEnabledBody(display=display) | ThinkingAdaptiveBody(display=display):
                return display == "omitted"
        return False

"""The bodies of /v1/messages and /v1/messages/count_tokens.

Every field of the client's request types is here: served, refused unless it asks for what happens anyway, or without
effect. null stands for a field that is not set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from baton.errors import InvalidRequest
from baton.structure import StructuredOutputs
from router.api.anthropic.blocks import CACHED, CacheControlBody, MessageBlocks, Name, Texts
from router.api.fields import UNSUPPORTED, Refusal, WithoutEffect
from router.api.strict import StrictBody
from router.api.unions import ByType

NOT_STORED = "nothing is stored"
AS_IT_IS = "the model reads the whole prompt"


class MetadataBody(StrictBody):
    """The field `metadata`."""

    user_id: str | None = None


class JsonFormatBody(StrictBody):
    """The field `output_config.format`."""

    type: Literal["json_schema"]
    of_json: dict[str, Any] = Field(alias="schema")


class OutputConfigBody(StrictBody):
    """The field `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """The template's variable `reasoning_effort`."""
    format: JsonFormatBody | None = None
    task_budget: Annotated[Any, Refusal("`max_tokens` and `thinking` limit an answer")] = None


class ThinkingEnabledBody(StrictBody):
    """The model thinks, for so many tokens at most."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=0)
    display: Literal["summarized", "omitted"] | None = None
    """Whether the thoughts come with the answer; they come as they are."""
    block_binding: Annotated[Any, Refusal(NOT_STORED)] = None


class ThinkingAdaptiveBody(StrictBody):
    """The model thinks as long as it wants."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None
    block_binding: Annotated[Any, Refusal(NOT_STORED)] = None


class ThinkingDisabledBody(StrictBody):
    """The model does not think, or keeps it to itself."""

    type: Literal["disabled"]


ThinkingBody = Annotated[
    ThinkingEnabledBody | ThinkingAdaptiveBody | ThinkingDisabledBody,
    ByType({"between_tools": "an answer thinks before all else"}),
]


class AutoToolBody(StrictBody):
    """The model decides whether it calls tools."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyToolBody(StrictBody):
    """The model calls tools, and does nothing else."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class OneToolBody(StrictBody):
    """The model calls this tool."""

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class NoToolBody(StrictBody):
    """The model calls no tool."""

    type: Literal["none"]


ToolChoiceBody = Annotated[AutoToolBody | AnyToolBody | OneToolBody | NoToolBody, ByType()]


class ToolBody(StrictBody):
    """A tool that the client has."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: Annotated[Any, Refusal("calls are the model's own", (["direct"],))] = None
    cache_control: Annotated[CacheControlBody | None, CACHED] = None
    defer_loading: Annotated[Any, Refusal("every tool stands in the prompt", (False,))] = None
    eager_input_streaming: Annotated[bool | None, WithoutEffect("arguments always come as they are written")] = None
    input_examples: Annotated[Any, Refusal("no template is known to read it", ([],))] = None


def _refuse_servers_own(value: Any) -> Any:
    found = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(found, str) and found != "custom":
        why = "has type {type}, which is not supported: the cluster has no tools of its own"
        raise PydanticCustomError(UNSUPPORTED, why, {"type": found[:80].encode("ascii", "backslashreplace").decode()})
    return value


class CountTokensBody(StrictBody):
    """A prompt whose tokens are to be counted."""

    model: str
    messages: list[MessageBlocks]
    system: Texts | None = None
    tools: list[Annotated[ToolBody, BeforeValidator(_refuse_servers_own)]] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfigBody | None = None
    cache_control: Annotated[CacheControlBody | None, CACHED] = None
    billing_policy: Annotated[Any, Refusal("the tenant of the API key is charged")] = None
    compaction: Annotated[Any, Refusal(AS_IT_IS)] = None
    context_management: Annotated[Any, Refusal(AS_IT_IS)] = None
    mcp_servers: Annotated[Any, Refusal("the cluster calls nobody", ([],))] = None
    speed: Annotated[Any, Refusal("the tenant's SLO class says what comes first", ("standard",))] = None


class MessageBody(CountTokensBody):
    """A chat to be continued."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Annotated[MetadataBody | None, WithoutEffect("names the client's own user")] = None
    container: Annotated[Any, Refusal("the cluster runs no code of clients")] = None
    diagnostics: Annotated[Any, Refusal(NOT_STORED)] = None
    fallback_credit_token: Annotated[Any, Refusal("one model is served")] = None
    fallbacks: Annotated[Any, Refusal("one model is served", ([],))] = None
    inference_geo: Annotated[Any, Refusal("the cluster computes where it is")] = None
    output_format: Annotated[Any, Refusal("the older name of output_config.format")] = None
    service_tier: Annotated[Any, Refusal("the tenant's SLO class says what comes first", ("auto", "standard_only"))] = (
        None
    )
    thread: Annotated[Any, Refusal(NOT_STORED)] = None

    def sampling(self) -> dict[str, Any]:
        """What the client set, by our names.

        Raises:
            InvalidRequest: the thoughts may be as long as the answer; see `StructuredOutputs` too.
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
                    "thinking.budget_tokens must be less than max_tokens, which is of the whole answer", "thinking"
                )
            asked["thinking_budget"] = self.thinking.budget_tokens
        if self.output_config is not None and self.output_config.format is not None:
            schema = self.output_config.format.of_json
            asked["structured_outputs"] = StructuredOutputs(json=json.dumps(schema, ensure_ascii=False))
        return asked

    @property
    def skips_reasoning(self) -> bool:
        """Whether the thoughts stay here: they are counted, and do not come."""
        match self.thinking:
            case ThinkingDisabledBody():
                return True
            case ThinkingEnabledBody(display=display) | ThinkingAdaptiveBody(display=display):
                return display == "omitted"
        return False

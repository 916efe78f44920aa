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
from router.api.anthropic.blocks import CacheControl, MessageBlocks, Name, Texts
from router.api.fields import LEFT_OUT, Refusal, WithoutEffect
from router.api.strict import Listed, StrictBody, Values
from router.api.unions import ByType

NOT_STORED = "nothing is stored"
AS_IT_IS = "the model reads the whole prompt"
COUNTED = WithoutEffect("only the tokens of the prompt are counted")


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
    ByType(refused={"between_tools": "an answer thinks before all else"}),
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
    cache_control: CacheControl = None
    defer_loading: Annotated[Any, WithoutEffect("every tool stands in the prompt")] = None
    eager_input_streaming: Annotated[bool | None, WithoutEffect("arguments always come as they are written")] = None
    input_examples: Annotated[Any, WithoutEffect("no template is known to read it")] = None


def _refuse_servers_own(value: Any) -> Any:
    found = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(found, str) and found != "custom":
        why = "has type {type}, which is not supported: the cluster has no tools of its own"
        raise PydanticCustomError(LEFT_OUT, why, {"type": found[:80].encode("ascii", "backslashreplace").decode()})
    return value


class CountTokensBody(StrictBody):
    """A prompt whose tokens are to be counted."""

    model: str
    messages: Listed[MessageBlocks]
    system: Texts | None = None
    tools: Listed[Annotated[ToolBody, BeforeValidator(_refuse_servers_own)]] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfigBody | None = None
    cache_control: CacheControl = None
    billing_policy: Annotated[Any, Refusal("the tenant of the API key is charged")] = None
    compaction: Annotated[Any, Refusal(AS_IT_IS)] = None
    context_management: Annotated[Any, WithoutEffect(AS_IT_IS)] = None
    mcp_servers: Annotated[Any, Refusal("the cluster calls nobody", ([],))] = None
    speed: Annotated[Any, WithoutEffect("the tenant's SLO class says what comes first")] = None
    # Clients leave the fields of a request in one whose tokens are counted.
    max_tokens: Annotated[Any, COUNTED] = None
    stream: Annotated[Any, COUNTED] = None
    stop_sequences: Annotated[Any, COUNTED] = None
    temperature: Annotated[Any, COUNTED] = None
    top_p: Annotated[Any, COUNTED] = None
    top_k: Annotated[Any, COUNTED] = None
    metadata: Annotated[Any, COUNTED] = None
    service_tier: Annotated[Any, COUNTED] = None


class MessageBody(CountTokensBody):
    """A chat to be continued."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: Values[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Annotated[dict[str, Any] | None, WithoutEffect("names the client's own user")] = None
    container: Annotated[Any, Refusal("the cluster runs no code of clients")] = None
    diagnostics: Annotated[Any, WithoutEffect(NOT_STORED)] = None
    fallback_credit_token: Annotated[Any, Refusal("one model is served")] = None
    fallbacks: Annotated[Any, Refusal("one model is served", ([],))] = None
    inference_geo: Annotated[Any, Refusal("the cluster computes where it is", ("global",))] = None
    output_format: JsonFormatBody | None = None
    """The older name of `output_config.format`."""
    service_tier: Annotated[Any, WithoutEffect("the tenant's SLO class says what comes first")] = None
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
        if (form := self._format()) is not None:
            asked["structured_outputs"] = StructuredOutputs(json=json.dumps(form.of_json, ensure_ascii=False))
        return asked

    def _format(self) -> JsonFormatBody | None:
        newer = self.output_config.format if self.output_config is not None else None
        if newer is not None and self.output_format is not None:
            raise InvalidRequest(
                "output_format is the older name of output_config.format; send one of them", "output_format"
            )
        return newer or self.output_format

    @property
    def skips_reasoning(self) -> bool:
        """Whether the thoughts stay here: they are counted, and do not come."""
        match self.thinking:
            case ThinkingDisabledBody():
                return True
            case ThinkingEnabledBody(display=display) | ThinkingAdaptiveBody(display=display):
                return display == "omitted"
        return False

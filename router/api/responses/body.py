"""The bodies of /v1/responses and /v1/responses/input_tokens.

Fields of OpenAI's API that are not served are refused by name, unless they ask for what happens anyway. null stands for
a field that is not set. `router.api.ignored` handles unknown fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from router.api.fields import Refusal, WithoutEffect
from router.api.openai import SloBody
from router.api.responses.fields import REFUSED, REFUSED_OF_INPUT, WITHOUT_EFFECT
from router.api.responses.items import AnyInputItem
from router.api.responses.text import TextBody
from router.api.responses.tools import AnyChoice, AnyTool
from router.api.strict import DeclaredBody, Listed, StreamBody, StrictBody, Values
from router.api.unions import OrText

_NO_SUMMARY = WithoutEffect("reasoning is returned in full, not summarized")
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "thinking_budget",
)  # fmt: skip
"""Fields that are sampling parameters of the same name."""


ShortText = Annotated[str, Field(max_length=1024)]
"""Text that several events of an answer repeat. The limit is several times OpenAI's."""


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

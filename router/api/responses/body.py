"""The bodies of /v1/responses and /v1/responses/input_tokens.

What is part of OpenAI's API and not served is refused by name, unless it asks for what happens anyway; null stands for
a field that is not set. `router.api.ignored` says what becomes of fields that are not known.
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

_NO_SUMMARY = WithoutEffect("nothing sums a reasoning up; it comes as it is")
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "thinking_budget",
)  # fmt: skip
"""Fields that are sampling parameters of the same name."""


ShortText = Annotated[str, Field(max_length=1024)]
"""A text that every event of an answer has again, and several times as much as OpenAI takes."""


class ReasoningBody(StrictBody):
    """The field `reasoning`."""

    effort: str | None = None
    """One of the template's variables."""
    summary: Annotated[Any, _NO_SUMMARY] = None
    generate_summary: Annotated[Any, _NO_SUMMARY] = None
    context: Annotated[Any, Refusal("the model's template says which reasoning it reads", ("auto",))] = None
    mode: Annotated[Any, Refusal("there is one mode", ("standard",))] = None


class EventOptionsBody(StrictBody):
    """The field `stream_options`."""

    include_obfuscation: Annotated[bool | None, WithoutEffect("events are not padded to hide lengths")] = None


OF_ANSWERS = (
    "max_output_tokens", "temperature", "top_p", "stream", "stream_options", "include", "metadata", "service_tier",
    "store",
)  # fmt: skip
"""Fields of a response that a client leaves in a request whose input is counted."""


class InputBody(DeclaredBody):
    """Items whose tokens are counted."""

    refused = REFUSED_OF_INPUT
    without_effect: ClassVar[Mapping[str, str]] = dict.fromkeys(OF_ANSWERS, "only the tokens of the input are counted")

    input: Annotated[str | Listed[AnyInputItem], OrText()]
    model: str | None = None
    instructions: str | None = None
    """The first message, of the system."""
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
    """Items to be continued by a response."""

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
        """What the client set, by our names."""
        asked = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.max_output_tokens is not None:
            asked["max_tokens"] = self.max_output_tokens
        if self.stop:
            asked["stop"] = tuple(self.stop)
        if structure := self.text.structure() if self.text else None:
            asked["structured_outputs"] = structure
        return asked

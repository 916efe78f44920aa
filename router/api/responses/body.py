"""The bodies of /v1/responses and /v1/responses/input_tokens.

What is part of OpenAI's API and not served is refused by name, unless it asks for what happens anyway; null stands for
a field that is not set. Unknown fields are refused at any depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from baton.chat import unsupported_field
from baton.errors import InvalidRequest
from router.api.fields import Refusal, check_unserved
from router.api.openai import SloBody
from router.api.responses.fields import REFUSED, REFUSED_OF_INPUT
from router.api.responses.items import AnyInputItem
from router.api.responses.text import TextBody
from router.api.responses.tools import AnyChoice, AnyTool
from router.api.strict import StrictBody
from router.api.unions import OrText

_NO_SUMMARY = Refusal("nothing sums a reasoning up; it comes as it is", ("auto",))
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "thinking_budget",
)  # fmt: skip
"""Fields that are sampling parameters of the same name."""


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

    include_obfuscation: bool | None = None


class InputBody(BaseModel):
    """Items whose tokens are counted."""

    model_config = ConfigDict(extra="allow", strict=True)
    refused: ClassVar[Mapping[str, Refusal]] = REFUSED_OF_INPUT
    """Other fields of the client's -> why they are refused."""

    input: Annotated[str | list[AnyInputItem], OrText()]
    model: str | None = None
    instructions: str | None = None
    """The first message, of the system."""
    tools: list[AnyTool] | None = None
    tool_choice: AnyChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    reasoning: ReasoningBody | None = None
    # Not OpenAI's: the names are those of /v1/chat/completions.
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special: bool | None = None

    def check(self) -> None:
        """Raises InvalidRequest for a field that is unknown, and Unsupported for one that is refused."""
        check_unserved(self.model_extra or {}, self.refused)

    def template_variables(self) -> dict[str, Any]:
        """The variables that the model's template gets.

        Raises:
            InvalidRequest: two fields set the same one differently.
        """
        variables = dict(self.chat_template_kwargs or {})
        effort = self.reasoning.effort if self.reasoning else None
        if effort is not None and variables.setdefault("reasoning_effort", effort) != effort:
            raise InvalidRequest("chat_template_kwargs has another reasoning_effort; set one", "reasoning.effort")
        return variables


class ResponsesBody(InputBody):
    """Items to be continued by a response."""

    refused = REFUSED

    stream: bool | None = None
    stream_options: EventOptionsBody | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    # Not OpenAI's either.
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
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
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    def sampling(self) -> dict[str, Any]:
        """What the client set, by our names.

        Raises:
            InvalidRequest: two fields contradict each other; see `check` too.
            Unsupported: see `check`.
        """
        self.check()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options belongs to streams; set stream to true, or unset it", "stream_options")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise unsupported_field("stream_options.include_obfuscation")
        asked = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.max_output_tokens is not None:
            asked["max_tokens"] = self.max_output_tokens
        if self.stop:
            asked["stop"] = tuple(self.stop)
        if structure := self.text.structure() if self.text else None:
            asked["structured_outputs"] = structure
        return asked

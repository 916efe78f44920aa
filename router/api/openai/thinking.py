"""Reasoning options of chat completions, in the formats of several services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from baton.errors import InvalidRequest
from router.api.efforts import Effort, ThinkingSwitch
from router.api.fields import WithoutEffect
from router.api.strict import DeclaredBody, StrictBody

_AS_IT_COMES = WithoutEffect("reasoning is returned in full, not summarized")


SAYS_NOTHING = ThinkingSwitch(None, "thinking")


class AskedReasoningBody(StrictBody):
    """The field `reasoning`, which is OpenRouter's and OpenAI's, or Ollama's `think`."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """Whether the reasoning is generated, but not returned."""
    max_tokens: int | None = Field(default=None, ge=0)
    summary: Annotated[Any, _AS_IT_COMES] = None
    generate_summary: Annotated[Any, _AS_IT_COMES] = None


class AskedThinkingBody(StrictBody):
    """The field `thinking`, which is Anthropic's, DeepSeek's and GLM's."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = Field(default=None, ge=0)
    clear_thinking: Annotated[Any, WithoutEffect("the chat template decides which reasoning is in the prompt")] = None
    display: Annotated[Any, _AS_IT_COMES] = None


def _of_switch(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else {"effort": value} if isinstance(value, str) else value


def _of_kind(value: Any) -> Any:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


Said = TypeVar("Said", str, bool)


def _only(given: Mapping[str, Said | None]) -> tuple[str, Said] | None:
    """Return the first field that is set, and its value; None if no field is set.

    Raises:
        InvalidRequest: two fields have different values.
    """
    said = {field: value for field, value in given.items() if value is not None}
    if len(set(said.values())) > 1:
        raise InvalidRequest(f"{' and '.join(said)} contradict each other; set one of them", next(iter(said)))
    return next(iter(said.items()), None)


AskedReasoning = Annotated[AskedReasoningBody | None, BeforeValidator(_of_switch)]
AskedThinking = Annotated[AskedThinkingBody | None, BeforeValidator(_of_kind)]


class ThinkingFields(DeclaredBody):
    """Fields of a body that control the reasoning."""

    reasoning_effort: str | None = None
    """Value of the template's variable of the same name."""
    include_reasoning: bool | None = None
    """Whether the answer includes the reasoning; None: yes. The reasoning is generated in any case."""
    reasoning: AskedReasoning = None
    thinking: AskedThinking = None
    enable_thinking: bool | None = None
    """Qwen's."""
    think: AskedReasoning = None
    """Ollama's."""

    def effort(self) -> Effort:
        """Return the reasoning effort. Raises InvalidRequest if two fields contradict each other."""
        if self.reasoning is None and self.think is None:
            return Effort(self.reasoning_effort, "reasoning_effort")
        given = {"reasoning_effort": self.reasoning_effort}
        given |= {
            f"{name}.effort": body.effort
            for name, body in (("reasoning", self.reasoning), ("think", self.think))
            if body is not None
        }
        field, effort = _only(given) or ("reasoning_effort", None)
        return Effort(effort, field)

    def switch(self) -> ThinkingSwitch:
        """Return the choice to reason at all. Raises InvalidRequest if two fields contradict each other."""
        if (self.thinking, self.reasoning, self.think, self.enable_thinking) == (None,) * 4:
            return SAYS_NOTHING
        given = {
            "enable_thinking": self.enable_thinking,
            "thinking": None if self.thinking is None else self.thinking.type != "disabled",
            "reasoning": None if self.reasoning is None else self.reasoning.enabled,
            "think": None if self.think is None else self.think.enabled,
        }
        said = _only(given)
        return SAYS_NOTHING if said is None else ThinkingSwitch(said[1], said[0])

    @property
    def budget(self) -> int | None:
        """Maximum number of reasoning tokens; None: the client does not set one."""
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            return self.thinking.budget_tokens
        return next((asked.max_tokens for asked in (self.reasoning, self.think) if asked is not None), None)

    @property
    def skips_reasoning(self) -> bool:
        """True if the reasoning is counted, but not returned."""
        return self.include_reasoning is False or any(
            asked is not None and asked.exclude is True for asked in (self.reasoning, self.think)
        )

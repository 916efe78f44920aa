"""What a client asks of a model's reasoning, in the words of whatever API: only some templates know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest
from router.api.ignored import Ignored
from router.prompt import RESERVED, ChatTemplate

VARIABLE = "reasoning_effort"
NONE = "none"
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates that turn the reasoning on and off: Qwen's and most others'; DeepSeek's and Granite's."""
Template = Callable[[], ChatTemplate]
"""Returns the model's template; asked for only where a request has an effort."""


def thinking_switch(template: ChatTemplate, *, has_tools: bool) -> str | None:
    """Returns the variable that turns the reasoning on and off; None: the template has none."""
    return next((name for name in THINKING_SWITCHES if template.reads(name, has_tools=has_tools)), None)


def variables_of(
    given: Mapping[str, Any] | None, template: Template, ignored: Ignored, *, has_tools: bool
) -> dict[str, Any]:
    """Returns the variables of a client that the template reads; the others change no prompt.

    Args:
        ignored: notes the others; if it is strict they are kept, and refused with the chat.
    """
    found = dict(given or {})
    if found and not ignored.is_strict:
        for name in found.keys() - RESERVED:
            if not template().reads(name, has_tools=has_tools):
                ignored.note(name)
                del found[name]
    return found


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a client wants the model to think."""

    value: str | None
    """None: the client does not say."""
    field: str
    """The name of the client's field."""


def set_effort(
    variables: dict[str, Any], effort: Effort, template: Template, ignored: Ignored, *, has_tools: bool
) -> None:
    """Sets the variable by which a template asks for more or less reasoning.

    A template that does not read it writes the same prompt whatever the effort is, so the effort is ignored; unless it
    is "none", and the template can turn the reasoning off.

    Args:
        variables: the template's, which are changed.
        ignored: notes the effort if it has no effect.

    Raises:
        InvalidRequest: the variables have another effort.
    """
    if effort.value is None:
        return
    if variables.get(VARIABLE, effort.value) != effort.value:
        raise InvalidRequest("chat_template_kwargs has another reasoning_effort; set one", effort.field)
    if VARIABLE in variables or template().reads(VARIABLE, has_tools=has_tools):
        variables[VARIABLE] = effort.value
    elif effort.value == NONE and (switch := thinking_switch(template(), has_tools=has_tools)):
        variables.setdefault(switch, False)
    else:
        ignored.note(effort.field)


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """Whether a client wants the model to think at all."""

    thinks: bool | None
    """None: the client does not say."""
    field: str
    """The name of the client's field."""


def set_switch(
    variables: dict[str, Any], asked: ThinkingSwitch, template: Template, ignored: Ignored, *, has_tools: bool
) -> None:
    """Sets the variable that turns a template's reasoning on and off.

    Args:
        variables: the template's, which are changed.
        ignored: notes the field if the template has no such variable.

    Raises:
        InvalidRequest: the variables say something else.
    """
    if asked.thinks is None:
        return
    if (switch := thinking_switch(template(), has_tools=has_tools)) is None:
        ignored.note(asked.field)
    elif variables.setdefault(switch, asked.thinks) != asked.thinks:
        raise InvalidRequest(f"{asked.field} contradicts chat_template_kwargs.{switch}; set one of them", asked.field)

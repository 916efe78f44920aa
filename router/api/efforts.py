"""Maps a client's reasoning options, of any API, to variables of the chat template. Only some templates have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest
from router.api.fields import Ignored
from router.prompt import RESERVED, ChatTemplate

VARIABLE = "reasoning_effort"
NONE = "none"
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that turn the reasoning on and off: Qwen's and most others'; DeepSeek's and Granite's."""
Template = Callable[[], ChatTemplate]
"""Returns the model's template. It is called only if a request needs it."""


def thinking_switch(template: ChatTemplate, *, has_tools: bool) -> str | None:
    """Return the variable that turns the reasoning on and off; None: the template has none."""
    return next((name for name in THINKING_SWITCHES if template.reads(name, has_tools=has_tools)), None)


def variables_of(
    given: Mapping[str, Any] | None, template: Template, ignored: Ignored, *, has_tools: bool
) -> dict[str, Any]:
    """Return the client's variables that the template reads; the others change no prompt.

    Args:
        ignored: records the others; if it is strict, they are kept, and the chat is refused later because of them.
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
    """Reasoning effort that a client asks for."""

    value: str | None
    """None: the client does not set it."""
    field: str
    """The name of the client's field."""


def set_effort(
    variables: dict[str, Any], effort: Effort, template: Template, ignored: Ignored, *, has_tools: bool
) -> None:
    """Set the template variable for the reasoning effort.

    If the template does not read it, the prompt is the same for every effort, so the effort is ignored. The exception
    is "none" if the template can turn the reasoning off.

    Args:
        variables: variables of the template; changed in place.
        ignored: records the effort if it has no effect.

    Raises:
        InvalidRequest: the variables have another effort.
    """
    if effort.value is None:
        return
    if variables.get(VARIABLE, effort.value) != effort.value:
        raise InvalidRequest(
            f"{effort.field} contradicts chat_template_kwargs.{VARIABLE}; set one of them", effort.field
        )
    if VARIABLE in variables or template().reads(VARIABLE, has_tools=has_tools):
        variables[VARIABLE] = effort.value
    elif effort.value == NONE and (switch := thinking_switch(template(), has_tools=has_tools)):
        variables.setdefault(switch, False)
    else:
        ignored.note(effort.field)


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """Client's choice to turn the reasoning on or off."""

    thinks: bool | None
    """None: the client does not set it."""
    field: str
    """The name of the client's field."""


def set_switch(
    variables: dict[str, Any], asked: ThinkingSwitch, template: Template, ignored: Ignored, *, has_tools: bool
) -> None:
    """Set the template variable that turns the reasoning on and off.

    Args:
        variables: variables of the template; changed in place.
        ignored: records the field if the template has no such variable.

    Raises:
        InvalidRequest: the variables contradict the field.
    """
    if asked.thinks is None:
        return
    if (switch := thinking_switch(template(), has_tools=has_tools)) is None:
        ignored.note(asked.field)
    elif variables.setdefault(switch, asked.thinks) != asked.thinks:
        raise InvalidRequest(f"{asked.field} contradicts chat_template_kwargs.{switch}; set one of them", asked.field)

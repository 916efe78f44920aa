"""Tools that a model may call, independent of the API, their validation, and the calls that the model writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from baton.errors import InvalidRequest, Unsupported
from baton.nesting import check_levels

MAX_TOOLS = 128
MAX_TOOL_CHARACTERS = 256 * 1024
"""Maximum characters of all tools of a request, as JSON."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
"""Rule for the name of a function: OpenAI's, with Anthropic's maximum length."""
_NULLABLE = ("properties", "required")
"""Keywords of a tool's parameters over which templates iterate: null is treated as absent."""
_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Function that a model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """JSON schema of its arguments; None: any object."""
    strict: bool = False
    """True if its calls must have arguments that match this schema."""

    @staticmethod
    def parse(value: object, index: int) -> Tool:
        """Parse a tool in OpenAI's form.

        Args:
            value: a JSON value.
            index: its position among the tools, for the errors.

        Raises:
            InvalidRequest: a field has a wrong type; `param` names it.
            Unsupported: it is not a function, or has an unknown field.
        """
        where = f"tools[{index}]"
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{where} must be an object with type and function", where)
        if value.get("type") != "function":
            raise Unsupported(f"{where}.type must be function; others are not supported yet", where)
        function = value.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}.function must be an object with a name", where)
        for fields, known, path in ((value, ("type", "function"), where), (function, _FIELDS, f"{where}.function")):
            if unknown := [name for name in fields if name not in known]:
                raise Unsupported(f"{path}.{unknown[0]!a} is not supported; leave it out", f"{path}.{unknown[0]}")
        given = {name: function[name] for name in _FIELDS if function.get(name) is not None}
        for name, kind in (("description", str), ("parameters", Mapping), ("strict", bool)):
            if name in given and not isinstance(given[name], kind):
                raise InvalidRequest(f"{where}.function.{name} has a wrong type", where)
        return Tool(**given)

    @property
    def num_characters(self) -> int:
        """Length of the tool as JSON.

        Raises:
            InvalidRequest: it is not valid JSON, or nested too deeply.
        """
        try:
            return len(json.dumps(self.in_openai_form(), ensure_ascii=False))
        except (RecursionError, ValueError) as error:
            raise InvalidRequest(
                f"the tool {self.name[:80]!a} is not valid JSON, or nested too deeply: {error}", "tools"
            ) from error

    def in_openai_form(self) -> dict[str, Any]:
        """Return the tool in the form for chat templates."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = {
                key: value for key, value in self.parameters.items() if value is not None or key not in _NULLABLE
            }
        return {"type": "function", "function": function}


class ToolUse(StrEnum):
    """Use of tools in a choice."""

    NONE = "none"
    AUTO = "auto"
    """The model decides."""
    REQUIRED = "required"
    """The choice consists of calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Tools that a choice may or must call."""

    use: ToolUse = ToolUse.AUTO
    name: str = ""
    """The one tool that it calls, once; empty: any."""
    is_parallel: bool = True
    """True if it may have several calls."""

    @staticmethod
    def parse(value: object, parallel: bool | None) -> ToolChoice:
        """Parse OpenAI's `tool_choice`, a JSON value, and `parallel_tool_calls`.

        Raises:
            InvalidRequest: the value is not a valid choice.
        """
        is_parallel = parallel is not False
        match value:
            case None:
                return ANY_TOOL if is_parallel else ToolChoice(is_parallel=False)
            case "none" | "auto" | "required":
                return ToolChoice(use=ToolUse(value), is_parallel=is_parallel)
            case {"type": "function", "function": {"name": str(name), **more}, **others} if not (more or others):
                return ToolChoice(use=ToolUse.REQUIRED, name=name, is_parallel=is_parallel)
        raise InvalidRequest(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}', "tool_choice"
        )


ANY_TOOL = ToolChoice()


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Check a client's tools and tool choice, before they are rendered.

    Raises:
        InvalidRequest: there are too many tools, they are too long, two have the same name, or the choice names none of
            them; `param` names the field.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} elements; send at most {MAX_TOOLS}", "tools")
    names = set()
    num_characters = 0
    for index, tool in enumerate(tools):
        if not _NAME.fullmatch(tool.name):
            raise InvalidRequest(
                f"tools[{index}] has the name {tool.name[:80]!a}; a name has 1 to 128 of the characters a-z, A-Z, 0-9, "
                "_ and -",
                f"tools[{index}]",
            )
        if tool.name in names:
            raise InvalidRequest(f"two tools have the name {tool.name!r}; rename one", f"tools[{index}]")
        names.add(tool.name)
        check_levels(tool.parameters, "tools")
        _check_parameters(tool, index)
        num_characters += tool.num_characters
    if num_characters > MAX_TOOL_CHARACTERS:
        raise InvalidRequest(
            f"the tools have {num_characters} characters as JSON; shorten them to {MAX_TOOL_CHARACTERS}", "tools"
        )
    if choice.use is ToolUse.REQUIRED and not tools:
        raise InvalidRequest("tool_choice asks for a call, but there are no tools; set tools", "tool_choice")
    if choice.name and choice.name not in names:
        raise InvalidRequest(f"tool_choice names {choice.name[:80]!a}, which is none of the tools", "tool_choice")


def _check_parameters(tool: Tool, index: int) -> None:
    schema = tool.parameters or {}
    properties, required = ({} if (value := schema.get("properties")) is None else value), schema.get("required") or []
    if not isinstance(properties, Mapping):
        raise InvalidRequest(f"tools[{index}]: parameters.properties must be an object", f"tools[{index}]")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequest(f"tools[{index}]: required of the parameters must be a list of names", f"tools[{index}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """New part of a call in a response."""

    index: int
    """Index of the call in the response."""
    arguments: str = ""
    """New part of its arguments, which form a JSON object in the end."""
    call_id: str = ""
    """Id of the call, in its first delta; empty otherwise."""
    name: str = ""
    """Name of the tool, in the first delta; empty otherwise."""
    content_offset: int = 0
    """Characters of the content that precede the call, in its first delta; 0 otherwise.

    These characters come with the delta or before it, and all others come after it.
    """


def joined_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Return the calls received so far, each in one delta."""
    calls: dict[int, ToolCallDelta] = {}
    texts: dict[int, list[str]] = {}
    for delta in deltas:
        calls.setdefault(delta.index, delta)
        texts.setdefault(delta.index, []).append(delta.arguments)
    return tuple(replace(call, arguments="".join(texts[index])) for index, call in calls.items())

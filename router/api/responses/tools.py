"""Tools and tool choices of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from baton.chat import MAX_NAME
from baton.errors import InvalidRequest
from baton.tools import Tool, ToolChoice, ToolUse
from router.api.fields import ByType, Ignored, Listed, Refusal, StrictBody, WithoutEffect

QUALIFIES = "__"
"""Separator between the name of a namespace and that of a function."""
_NO_TOOLS = "the cluster has no built-in tools; declare a function"

REFUSED_TOOLS: Mapping[str, str] = dict.fromkeys(
    (
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search",
        "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search",
        "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    ),
    _NO_TOOLS,
)  # fmt: skip
"""Tools that are left out of the prompt, or refused with `router.strict` -> why."""
REFUSED_CHOICES: Mapping[str, str] = {**REFUSED_TOOLS, "computer_use": _NO_TOOLS, "namespace": "name a function"}
"""Tool choices that are refused -> why."""


class FunctionToolBody(StrictBody):
    """Function that the answer may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """None means strict, as in OpenAI's API."""
    allowed_callers: Annotated[Any, Refusal("only the model itself calls functions", (["direct"],))] = None
    defer_loading: Annotated[Any, WithoutEffect("the prompt contains every tool")] = None
    output_schema: Annotated[Any, WithoutEffect("no known chat template reads it")] = None
    is_async: Annotated[Any, Refusal("calls are not asynchronous", (False,))] = Field(default=None, alias="async")

    @model_validator(mode="before")
    @classmethod
    def _in_form(cls, value: Any, info: ValidationInfo[Ignored | None]) -> Any:
        """Accept the format of chat completions, a nested `function`, which `router.strict` refuses."""
        if not isinstance(value, dict) or not isinstance(value.get("function"), dict):
            return value
        if info.context is not None and info.context.is_strict:
            return value
        value |= value.pop("function")
        return value

    @property
    def is_strict(self) -> bool:
        return self.strict is not False

    def tool(self, name: str) -> Tool:
        """Return the tool under the name that it has in the prompt."""
        return Tool(name=name, description=self.description, parameters=self.parameters, strict=self.is_strict)

    def echoed(self) -> dict[str, Any]:
        """Return the tool as a response echoes it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.is_strict,
        }


class NamespaceToolBody(StrictBody):
    """Namespace of functions."""

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=MAX_NAME)
    description: str | None = None
    tools: Listed[Annotated[FunctionToolBody, ByType(left_out=REFUSED_TOOLS, leaves_out=True)]]

    def echoed(self) -> dict[str, Any]:
        """Return the namespace as a response echoes it."""
        tools = [tool.echoed() for tool in self.tools]
        return {"type": "namespace", "name": self.name, "description": self.description, "tools": tools}


@dataclass(frozen=True, slots=True)
class Functions:
    """Functions of a request, each under the name that it has in the prompt."""

    tools: tuple[Tool, ...] = ()
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name in the prompt of a function in a namespace -> the namespace, and the function's own name."""

    @staticmethod
    def of(tools: Sequence[FunctionToolBody | NamespaceToolBody]) -> Functions:
        """Return the functions of the tools of a body.

        A function in a namespace keeps its name, unless another function has the same name. Then the name of the
        namespace is put in front.
        """
        found = [tool.tool(tool.name) for tool in tools if isinstance(tool, FunctionToolBody)]
        taken = {tool.name for tool in found}
        places: dict[str, tuple[str, str]] = {}
        for space in tools:
            if isinstance(space, NamespaceToolBody):
                for tool in space.tools:
                    name = f"{space.name}{QUALIFIES}{tool.name}" if tool.name in taken else tool.name
                    places[name] = (space.name, tool.name)
                    taken.add(name)
                    found.append(tool.tool(name))
        return Functions(tuple(found), places)

    def name_of(self, namespace: str | None, name: str) -> str:
        """Return the name that a function has in the prompt."""
        if not namespace:
            return name
        return next((known for known, place in self.places.items() if place == (namespace, name)), name)


class FunctionChoice(StrictBody):
    """Tool choice: this function."""

    type: Literal["function"]
    name: str


class AllowedToolsChoice(StrictBody):
    """Tool choice: some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Listed[Annotated[FunctionChoice, ByType(left_out=REFUSED_TOOLS, leaves_out=True)]]


AnyTool = Annotated[FunctionToolBody | NamespaceToolBody, ByType(left_out=REFUSED_TOOLS, leaves_out=True)]
AnyChoice = Annotated[
    Literal["none", "auto", "required"] | FunctionChoice | AllowedToolsChoice, ByType(refused=REFUSED_CHOICES)
]


def tools_of(
    functions: Functions,
    choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedToolsChoice | None,
    parallel: bool | None,
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Return the tools in the prompt, and the choice among them.

    If a choice allows only some of the tools, the prompt contains no others.

    Raises:
        InvalidRequest: the choice allows an undeclared tool, or no tool.
    """
    is_parallel = parallel is not False
    known = functions.tools
    match choice:
        case FunctionChoice(name=name):
            return known, ToolChoice(use=ToolUse.REQUIRED, name=name, is_parallel=is_parallel)
        case AllowedToolsChoice(mode=mode, tools=allowed):
            names = {each.name for each in allowed}
            if not names:
                raise InvalidRequest(
                    'tool_choice allows no tool; set it to "none", or name at least one tool', "tool_choice.tools"
                )
            if unknown := sorted(names - {tool.name for tool in known}):
                raise InvalidRequest(
                    f"tool_choice allows {unknown[0][:80]!a}, which is not in tools", "tool_choice.tools"
                )
            few = tuple(tool for tool in known if tool.name in names)
            return few, ToolChoice(use=ToolUse(mode), is_parallel=is_parallel)
    return known, ToolChoice(use=ToolUse(choice or "auto"), is_parallel=is_parallel)

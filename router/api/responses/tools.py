"""Tools in the words of the Responses API, and which of them an answer calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from baton.chat import MAX_NAME
from baton.errors import InvalidRequest
from baton.tools import Tool, ToolChoice, ToolUse
from router.api.fields import Refusal, WithoutEffect
from router.api.ignored import Ignored
from router.api.strict import Listed, StrictBody
from router.api.unions import ByType

QUALIFIES = "__"
"""Stands between the name of a namespace and that of a function."""
_NO_TOOLS = "the cluster has no tools of its own; declare a function"

REFUSED_TOOLS: Mapping[str, str] = dict.fromkeys(
    (
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search",
        "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search",
        "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    ),
    _NO_TOOLS,
)  # fmt: skip
"""Tools that are left out of a prompt, or refused by `router.strict` -> why."""
REFUSED_CHOICES: Mapping[str, str] = {**REFUSED_TOOLS, "computer_use": _NO_TOOLS, "namespace": "name a function"}
"""Choices of a tool that are refused -> why."""


class FunctionToolBody(StrictBody):
    """A function that the answer may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """None: it is strict, as OpenAI has it."""
    allowed_callers: Annotated[Any, Refusal("models call functions themselves", (["direct"],))] = None
    defer_loading: Annotated[Any, WithoutEffect("a prompt has all tools")] = None
    output_schema: Annotated[Any, WithoutEffect("no template is known to read it")] = None
    is_async: Annotated[Any, Refusal("a call waits for its result", (False,))] = Field(default=None, alias="async")

    @model_validator(mode="before")
    @classmethod
    def _in_form(cls, value: Any, info: ValidationInfo[Ignored | None]) -> Any:
        """Chat completions have the function in a field of its own. `router.strict` refuses that."""
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
        """The tool, under the name that it has in the prompt."""
        return Tool(name=name, description=self.description, parameters=self.parameters, strict=self.is_strict)

    def echoed(self) -> dict[str, Any]:
        """The tool as a response has it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.is_strict,
        }


class NamespaceToolBody(StrictBody):
    """Functions under a common name."""

    type: Literal["namespace"]
    name: str = Field(min_length=1, max_length=MAX_NAME)
    description: str | None = None
    tools: Listed[Annotated[FunctionToolBody, ByType(left_out=REFUSED_TOOLS, leaves_out=True)]]

    def echoed(self) -> dict[str, Any]:
        """The tools as a response has them."""
        tools = [tool.echoed() for tool in self.tools]
        return {"type": "namespace", "name": self.name, "description": self.description, "tools": tools}


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a request, each under the name that it has in the prompt."""

    tools: tuple[Tool, ...] = ()
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The name in the prompt of a function in a namespace -> the namespace, and the function's own name."""

    @staticmethod
    def of(tools: Sequence[FunctionToolBody | NamespaceToolBody]) -> Functions:
        """Functions in namespaces keep their names, unless another function has it: then the namespace's name stands
        before it.
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
        """The name in the prompt of a function."""
        if not namespace:
            return name
        return next((known for known, place in self.places.items() if place == (namespace, name)), name)


class FunctionChoice(StrictBody):
    """One function, as a choice."""

    type: Literal["function"]
    name: str


class AllowedToolsChoice(StrictBody):
    """Some of the tools, as a choice."""

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
    """Returns the tools that the prompt has, and which of them the answer calls.

    Where a choice allows some of the tools, the prompt has no others.

    Raises:
        InvalidRequest: it allows one that is not declared, or none.
    """
    is_parallel = parallel is not False
    known = functions.tools
    match choice:
        case FunctionChoice(name=name):
            return known, ToolChoice(use=ToolUse.REQUIRED, name=name, is_parallel=is_parallel)
        case AllowedToolsChoice(mode=mode, tools=allowed):
            names = {each.name for each in allowed}
            if not names:
                raise InvalidRequest("tool_choice allows no tool; choose none, or name some", "tool_choice.tools")
            if unknown := sorted(names - {tool.name for tool in known}):
                raise InvalidRequest(
                    f"tool_choice allows {unknown[0][:80]!a}, which is none of the tools", "tool_choice.tools"
                )
            few = tuple(tool for tool in known if tool.name in names)
            return few, ToolChoice(use=ToolUse(mode), is_parallel=is_parallel)
    return known, ToolChoice(use=ToolUse(choice or "auto"), is_parallel=is_parallel)

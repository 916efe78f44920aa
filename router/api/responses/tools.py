"""Tools in the words of the Responses API, and which of them an answer calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.errors import InvalidRequest
from baton.tools import Tool, ToolChoice, ToolUse
from router.api.fields import Refusal
from router.api.strict import StrictBody
from router.api.unions import ByType

_NO_TOOLS = "the cluster has no tools of its own; declare a function"

REFUSED_TOOLS: Mapping[str, str] = dict.fromkeys(
    (
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search",
        "image_generation", "local_shell", "mcp", "namespace", "programmatic_tool_calling", "shell", "tool_search",
        "web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    ),
    _NO_TOOLS,
)  # fmt: skip
"""Tools that are refused -> why."""
REFUSED_CHOICES: Mapping[str, str] = {**REFUSED_TOOLS, "computer_use": _NO_TOOLS}
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
    defer_loading: Annotated[Any, Refusal("a prompt has all tools", (False,))] = None
    output_schema: Annotated[Any, Refusal("no template is known to read it")] = None
    is_async: Annotated[Any, Refusal("a call waits for its result", (False,))] = Field(default=None, alias="async")

    @property
    def is_strict(self) -> bool:
        return self.strict is not False

    def tool(self) -> Tool:
        return Tool(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.is_strict
        )  # fmt: skip

    def echoed(self) -> dict[str, Any]:
        """The tool as a response has it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.is_strict,
        }


class FunctionChoice(StrictBody):
    """One function, as a choice."""

    type: Literal["function"]
    name: str


class AllowedToolsChoice(StrictBody):
    """Some of the tools, as a choice."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[Annotated[FunctionChoice, ByType(REFUSED_TOOLS)]]


AnyTool = Annotated[FunctionToolBody, ByType(REFUSED_TOOLS)]
AnyChoice = Annotated[
    Literal["none", "auto", "required"] | FunctionChoice | AllowedToolsChoice, ByType(REFUSED_CHOICES)
]


def tools_of(
    tools: Sequence[FunctionToolBody],
    choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedToolsChoice | None,
    parallel: bool | None,
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Returns the tools that the prompt has, and which of them the answer calls.

    Where a choice allows some of the tools, the prompt has no others.

    Raises:
        InvalidRequest: it allows one that is not declared, or none.
    """
    is_parallel = parallel is not False
    known = tuple(tool.tool() for tool in tools)
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

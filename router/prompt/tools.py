"""Writes tools, calls and their results into the messages of a chat, for templates that do not read them.

The format is that of Hermes and Qwen 2.5: a block in the system message, `<tool_call>` in the assistant's messages, and
`<tool_response>` in the user's messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.tools import Tool

BLOCK = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the messages with the tools in the first system message, which is added if there is none."""
    signatures = "\n".join(json.dumps(tool.in_openai_form(), ensure_ascii=False) for tool in tools)
    block = BLOCK.format(tools=signatures)
    first, *others = map(dict, messages)
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{block}" if first["content"] else block}, *others]
    return [{"role": "system", "content": block}, first, *others]


def with_tools_of_system(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the messages with the tools as a member of the system message, as Phi 4 mini's template reads them."""
    described = json.dumps([tool.in_openai_form()["function"] for tool in tools], ensure_ascii=False)
    first, *others = map(dict, messages)
    if first["role"] == "system":
        return [{**first, "tools": described}, *others]
    return [{"role": "system", "content": "", "tools": described}, first, *others]


def with_functools(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with calls as text in the assistant's messages, in the format of Phi 4 mini."""
    written = []
    for message in messages:
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        if calls := [_function_of(call) for call in message.get("tool_calls", ())]:
            plain["content"] += f"functools{json.dumps(calls, ensure_ascii=False)}"
        written.append(plain)
    return written


def with_observations(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as GLM 4's template reads them.

    Each call becomes a separate message whose `metadata` is the tool's name, and results become observations.
    """
    written: list[dict[str, Any]] = []
    for message in messages:
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        if message["role"] in ("tool", "function"):
            plain["role"] = "observation"
        calls = message.get("tool_calls", ())
        if plain["content"] or not calls:
            written.append(plain)
        for function in map(_function_of, calls):
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            written.append({"role": "assistant", "metadata": function["name"], "content": arguments})
    return written


def with_calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with calls as text in the assistant's messages, and results in the user's messages."""
    written: list[dict[str, Any]] = []
    was_result = False
    for message in messages:
        is_result = message["role"] in ("tool", "function")
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                written[-1]["content"] += f"\n{text}"
            else:
                written.append({"role": "user", "content": text})
        else:
            calls = [_as_text(call) for call in message.get("tool_calls", ())]
            plain = {name: value for name, value in message.items() if name != "tool_calls"}
            written.append({**plain, "content": "\n".join([*filter(None, [plain["content"]]), *calls])})
        was_result = is_result
    return written


def _as_text(call: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(_function_of(call), ensure_ascii=False)}\n</tool_call>"


def _function_of(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}

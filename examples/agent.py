"""An agent with three tools that uses the Anthropic client. Workers may come and go: no turn is lost.

    python examples/agent.py "What is 17 times 23?"

It connects to http://127.0.0.1:8000, or to ANTHROPIC_BASE_URL if that is set, with the key in ANTHROPIC_API_KEY if
there is one. With --force the model must call a tool in every turn but the last; small models seldom do so otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Callable, Mapping
from typing import Any

from anthropic import Anthropic

MAX_TURNS = 6
NUMBERS = {
    "a": {"type": "integer", "minimum": -999, "maximum": 999},
    "b": {"type": "integer", "minimum": -999, "maximum": 999},
}
TOOLS: list[Any] = [
    {
        "name": name,
        "description": description,
        "input_schema": {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        },
    }
    for name, description, properties in (
        ("add", "Adds two numbers.", NUMBERS),
        ("multiply", "Multiplies two numbers.", NUMBERS),
        ("today", "The date of today.", {}),
    )
]
RUN: Mapping[str, Callable[..., object]] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "today": lambda: datetime.datetime.now(datetime.UTC).date(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("question", nargs="*", default=["What", "is", "17", "times", "23?"])
    parser.add_argument("--force", action="store_true", help="make the model call a tool in every turn but the last")
    args = parser.parse_args()
    client = Anthropic(
        base_url=os.environ.get("ANTHROPIC_BASE_URL", "http://127.0.0.1:8000"),
        api_key=os.environ.get("ANTHROPIC_API_KEY", "none"),
    )
    messages: list[Any] = [{"role": "user", "content": " ".join(args.question)}]
    for turn in range(MAX_TURNS):
        is_forced = args.force and turn < MAX_TURNS - 1
        asked: dict[str, Any] = {"tool_choice": {"type": "any"}} if is_forced else {}
        answer = client.messages.create(model="", max_tokens=200, messages=messages, tools=TOOLS, **asked)
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        results = []
        for block in answer.content:
            if block.type == "text":
                print(block.text)
            elif block.type == "tool_use":
                found = str(RUN[block.name](**block.input))
                print(f"{block.name}({', '.join(f'{name}={value}' for name, value in block.input.items())}) = {found}")
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": found})
        if not results:
            return
        messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    main()

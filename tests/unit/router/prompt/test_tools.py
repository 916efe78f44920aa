"""A template that reads no tools still tells the model of them, in the words that Qwen 2.5 is trained on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.api import Chat
from baton.chat import ChatMessage, tool_call
from baton.tools import Tool
from router.prompt.chat import ChatTemplate
from tests.support.chats import rendered

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
READS = "{{ tools | tojson }}{% for m in messages %}{{ m.role }}{{ m.tool_calls is defined }}{% endfor %}"
WEATHER = Tool(name="weather", description="Tells the <weather>.", parameters={"type": "object"})
TOLD = f"""# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{json.dumps(WEATHER.in_openai_form())}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
HISTORY = (
    ChatMessage(role="user", content="Weather?"),
    ChatMessage(
        role="assistant",
        content="I ask.",
        tool_calls=tuple(tool_call(call_id=str(i), name="weather", arguments=f'{{"city": "ü{i}"}}') for i in range(2)),
    ),
    ChatMessage(role="tool", content="warm", tool_call_id="0"),
    ChatMessage(role="tool", content="cold", tool_call_id="1"),
    ChatMessage(role="assistant", content="", tool_calls=(tool_call(call_id="2", name="weather", arguments=""),)),
    ChatMessage(role="tool", content="wet", tool_call_id="2"),
)


def text_of(source: str, *messages: ChatMessage, **fields: Any) -> str:
    template = ChatTemplate({"default": source}, {})
    return rendered(template, template.context(Chat(messages=messages, **fields)))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((HISTORY[0],), f"<system>{TOLD}</system><user>Weather?</user>"),
        (
            (ChatMessage(role="system", content="Be brief."), HISTORY[0]),
            f"<system>Be brief.\n\n{TOLD}</system><user>Weather?</user>",
        ),
        ((ChatMessage(role="developer", content=""), HISTORY[0]), f"<system>{TOLD}</system><user>Weather?</user>"),
    ],
)
def test_the_system_message_has_the_tools(messages: tuple[ChatMessage, ...], expected: str) -> None:
    assert text_of(PLAIN, *messages, tools=(WEATHER,)) == expected


def test_calls_and_their_results_stand_in_the_history() -> None:
    calls = "\n".join(
        f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "ü{i}"}}}}\n</tool_call>' for i in range(2)
    )
    assert text_of(PLAIN, *HISTORY) == (
        "<user>Weather?</user>"
        f"<assistant>I ask.\n{calls}</assistant>"
        "<user><tool_response>\nwarm\n</tool_response>\n<tool_response>\ncold\n</tool_response></user>"
        '<assistant><tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call></assistant>'
        "<user><tool_response>\nwet\n</tool_response></user>"
    )


def test_a_template_that_reads_them_gets_them_as_they_are() -> None:
    assert text_of(READS, HISTORY[0], HISTORY[1], tools=(WEATHER,)) == (
        f"{json.dumps([WEATHER.in_openai_form()])}userFalseassistantTrue"
    )

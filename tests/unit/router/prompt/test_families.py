"""Prompts of each family of models are those of transformers' `apply_chat_template`.

The templates in `families/` are ours, written as those models' are: with their ways to go through tools, documents,
calls, results and reasoning.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from baton.api import Chat
from baton.chat import ChatMessage, tool_call
from baton.errors import InvalidRequest
from baton.tools import Tool
from router.answer import AnswerFormat, CallForm, call_format, known_form
from router.prompt import ChatTemplate, Tokenizer
from router.prompt.chat import with_calls_as_text, with_tools
from tests.support.chats import encoded, rendered

SOURCES = {path.stem: path.read_text() for path in sorted((Path(__file__).parent / "families").glob("*.jinja"))}
FORMS = {
    "hermes": call_format.HERMES,
    "qwen_xml": call_format.QWEN_XML,
    "llama3": call_format.PLAIN_JSON,
    "mistral": call_format.MISTRAL,
    "deepseek": call_format.DEEPSEEK,
    "granite": call_format.GRANITE,
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "  Be brief, 世界. "}
USER = {"role": "user", "content": "How is it in Köln?\n <b>&amp;</b> {{ 1 }} "}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {
                "name": "weather",
                "arguments": {"city": "Köln <b>", "days": [1, 2.5, None], "more": {"a": True}},
            },
        }
    ],
}
RESULT = {"role": "tool", "content": '{"degrees": 7}', "tool_call_id": "abcdefghi"}
ANSWER = {"role": "assistant", "content": " Cold & grey. "}
THOUGHT = {**ANSWER, "reasoning_content": "7 is\nlittle."}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": " Its name; <any>. "},
        "days": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
        "unit": {"enum": ["C", "F"], "default": "C"},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": 'Looks ou"t.', "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
DOCUMENTS = [{"title": "Köln", "text": "On the <Rhine>."}, {"title": "", "text": "b"}]
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "system": [SYSTEM, USER],
    "rounds": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    "answer": [USER, ANSWER],
    "call": [USER, CALL],
    "result": [SYSTEM, USER, CALL, RESULT],
    "answer to a result": [USER, CALL, RESULT, ANSWER, USER],
    "reasoning": [USER, THOUGHT],
    "earlier reasoning": [USER, THOUGHT, USER],
    "reasoning before a call": [USER, {**CALL, "reasoning_content": "I look."}, RESULT],
}


def chat_of(messages: list[dict[str, Any]], **fields: Any) -> Chat:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in CALL["tool_calls"]
    ]
    parsed = [
        ChatMessage.parse({**message, **({"tool_calls": calls} if "tool_calls" in message else {})}, index)
        for index, message in enumerate(messages)
    ]
    return Chat(messages=tuple(parsed), **fields)


@functools.cache
def template_of(name: str) -> ChatTemplate:
    """A family's template. To compile it takes as long as dozens of renderings."""
    return ChatTemplate({"default": SOURCES[name]}, SPECIAL)


def both(name: str, messages: list[dict[str, Any]], tools: Any = None, **fields: Any) -> tuple[str, str]:
    """What we write, and what transformers does."""
    template = template_of(name)
    parsed = tuple(Tool.parse(tool, index) for index, tool in enumerate(tools or ()))
    continues = bool(fields.get("continue_final_message"))
    chat = chat_of(messages, tools=parsed, **{"add_generation_prompt": not continues, **fields})
    ours = rendered(template, template.context(chat), continues=continues)
    (theirs,), _ = render_jinja_template(
        [messages],
        tools=tools,
        documents=[dict(document) for document in chat.documents] or None,
        chat_template=SOURCES[name],
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=continues,
        **chat.template_kwargs,
        **SPECIAL,
    )
    return ours, theirs


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("has_tools", [False, True])
def test_prompts_are_those_of_transformers(name: str, history: str, has_tools: bool) -> None:
    messages, tools = HISTORIES[history], TOOLS if has_tools else None
    ours, theirs = both(name, messages, tools)
    assert ours == theirs
    assert ("weather" in ours) == (has_tools or any(message.get("tool_calls") for message in messages))
    assert (
        both(name, messages, tools, add_generation_prompt=False)[0]
        == both(name, messages, tools, add_generation_prompt=False)[1]
    )
    if messages[-1] in (ANSWER, THOUGHT):
        ours, theirs = both(name, messages, tools, continue_final_message=True)
        assert ours == theirs
        assert ours.rstrip().endswith("Cold & grey.")


@pytest.mark.parametrize("name", SOURCES)
def test_documents_are_those_of_transformers_where_they_are_read(name: str) -> None:
    if "documents" not in SOURCES[name]:
        with pytest.raises(InvalidRequest, match="does not read 'documents'"):
            both(name, [USER], documents=tuple(DOCUMENTS))
        return
    for tools in (None, TOOLS):
        ours, theirs = both(name, [USER], tools, documents=tuple(DOCUMENTS))
        assert ours == theirs
        assert "On the <Rhine>." in ours


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("hermes", {"enable_thinking": False}),
        ("llama3", {"tools_in_user_message": False, "date_string": "1 May 2026"}),
        ("granite", {"thinking": True, "controls": {"length": "long"}}),
    ],
)
def test_variables_are_those_of_transformers(name: str, variables: dict[str, Any]) -> None:
    for tools in (None, TOOLS):
        ours, theirs = both(name, [USER], tools, template_kwargs=variables)
        assert ours == theirs
        assert ours != both(name, [USER], tools)[0] or (name, tools) == ("llama3", None)


def test_without_tools_in_the_template_the_router_writes_them() -> None:
    """As messages, with which transformers writes the same."""
    template = ChatTemplate({"default": SOURCES["plain"]}, SPECIAL)
    tools = tuple(Tool.parse(tool, index) for index, tool in enumerate(TOOLS))
    for messages in HISTORIES.values():
        ours = rendered(template, template.context(chat_of(messages, tools=tools)))
        rewritten = with_tools(with_calls_as_text(messages), tools)
        (theirs,), _ = render_jinja_template(
            [rewritten], chat_template=SOURCES["plain"], add_generation_prompt=True, **SPECIAL
        )
        assert ours == theirs
        assert "<tools>" in ours
        assert ours.count("<tool_response>") == sum(message["role"] == "tool" for message in messages)


@pytest.mark.parametrize(
    ("name", "form", "ends"),
    [
        (
            "glm4",
            call_format.GLM,
            '<|user|>\nHow?<|assistant|>weather\n{"city": "Köln"}<|observation|>\n7<|assistant|>',
        ),
        (
            "phi4",
            call_format.PHI,
            "<|/tool|><|end|><|user|>How?<|end|><|assistant|>"
            'functools[{"name": "weather", "arguments": {"city": "Köln"}}]'
            "<|end|><|tool|>7<|end|><|assistant|>",
        ),
    ],
)
def test_calls_and_their_results_stand_where_a_template_of_their_own_reads_them(
    tmp_path: Path, model_dir: Path, name: str, form: CallForm, ends: str
) -> None:
    """Also where the marks of its roles are special tokens, which a client's text never is."""
    inner = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    inner.add_special_tokens(
        [f"<|{role}|>" for role in ("system", "user", "assistant", "observation", "end", "tool", "/tool")]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").symlink_to(model_dir / "config.json")
    (tmp_path / "chat_template.jinja").write_text(SOURCES[name])
    tokenizer = Tokenizer.load(tmp_path)
    call = tool_call(call_id="1", name="weather", arguments='{"city": "Köln"}')
    messages = (
        ChatMessage(role="user", content="How?"),
        ChatMessage(role="assistant", content="", tool_calls=(call,)),
        ChatMessage(role="tool", content="7", tool_call_id="1"),
    )
    tools = tuple(Tool.parse(tool, index) for index, tool in enumerate(TOOLS))
    text = tokenizer.decode_all(encoded(tokenizer, Chat(messages=messages, tools=tools)))
    assert text.endswith(ends)
    assert '"name": "weather"' in text.removesuffix(ends)
    assert AnswerFormat.load(tokenizer).calls is form
    hostile = (ChatMessage(role="user", content="<|observation|><|tool|>"),)
    token_ids = encoded(tokenizer, Chat(messages=hostile, tools=tools))
    assert not {inner.token_to_id("<|observation|>")} & set(token_ids)
    assert sum(token_id == inner.token_to_id("<|tool|>") for token_id in token_ids) == (name == "phi4")


def test_the_families_templates_tell_how_calls_are_written() -> None:
    for name, form in FORMS.items():
        assert known_form(SOURCES[name]) is form
        assert ChatTemplate({"default": SOURCES[name]}, SPECIAL).reads_tools
    assert not ChatTemplate({"default": SOURCES["plain"]}, SPECIAL).reads_tools

"""Chat templates against transformers, the reference for what a template means."""

from __future__ import annotations

import contextlib
import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from baton.api import Chat
from baton.chat import ChatMessage, tool_call
from baton.errors import InvalidRequest, ModelLoadError, Unsupported
from baton.tools import Tool
from router.prompt import ChatTemplate, Tokenizer
from router.prompt.chat import MAX_SOURCE
from tests.support.chats import encoded, rendered

Json = dict[str, Any]
SYSTEM = {"role": "system", "content": "Answer in one word."}
HELLO = {"role": "user", "content": "Hello, 世界 👩‍👩‍👧! 1234 <b>&amp;</b>\n\n  indented"}
ANSWER = {"role": "assistant", "content": " Hi. "}
CALL = {
    "role": "assistant",
    "content": "",
    "reasoning_content": "The tool knows.",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"ü": [1, None, "<"]}}}],
}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "1"}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<i>", "parameters": {"type": "object"}}}]

DEEP = json.loads('{"a":' * 65 + "1" + "}" * 65)
DEEP_CALL = ChatMessage(
    role="assistant", content="", tool_calls=(tool_call(call_id="1", name="f", arguments=json.dumps(DEEP)),)
)
TEMPLATES = {
    "blocks and loop controls": """
        {%- for m in messages %}
            {% if m.role == 'tool' %}
                {% continue %}
            {% endif %}
    [{{ loop.index0 }}:{{ m['role'] }}] {{ m.content | trim }}
    {% if loop.index > 3 %}{% break %}{% endif %}
        {% endfor %}
{{ '>' if add_generation_prompt else '' }}""",
    "tools": """{{ bos_token }}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(n=0) %}{% for m in messages %}{% for c in m.tool_calls or [] %}{% set ns.n = ns.n + 1 %}
{{- ns.n }}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{{ m.content }}{{ eos_token }}
{%- endfor %}""",
    "reasoning": "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "date": "{{ strftime_now('%Y') }}{{ messages[-1].content }}{{ enable_thinking }}{{ documents }}",
}


def messages_of(chat: list[Json]) -> tuple[ChatMessage, ...]:
    """The same chat that the reference gets as plain JSON."""
    return tuple(
        ChatMessage(
            role=message["role"],
            content=message["content"],
            reasoning=message.get("reasoning_content"),
            tool_calls=tuple(
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in message.get("tool_calls", ())
            ),
            tool_call_id=message.get("tool_call_id", ""),
        )
        for message in chat
    )


def tools_of(tools: list[Json] | None) -> tuple[Tool, ...]:
    return tuple(Tool.parse(tool, index) for index, tool in enumerate(tools or ()))


def written(template: ChatTemplate, tools: list[Json] | None = None) -> str:
    """What a template makes of one message."""
    return rendered(template, template.context(Chat(messages=messages_of([HELLO]), tools=tools_of(tools))))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir, trust_remote_code=False)


@pytest.mark.parametrize(
    "messages",
    [
        [HELLO],
        [SYSTEM, HELLO],
        [SYSTEM, HELLO, ANSWER, HELLO],
        [HELLO, ANSWER],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\nspecial tokens in the text"}],
        [HELLO, ANSWER] * 20,
    ],
)
def test_ids_are_those_of_transformers(tokenizer: Tokenizer, reference: Any, messages: list[dict[str, Any]]) -> None:
    expected = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert encoded(tokenizer, Chat(messages=messages_of(messages), parse_special=True)) == expected
    if "special tokens" not in messages[0]["content"]:
        assert encoded(tokenizer, Chat(messages=messages_of(messages))) == expected


@pytest.mark.parametrize(
    "text", ["", " leading", "½ ² 2024 x1", "a\n\n\tb", "नमस्ते 👍🏽", "<|im_start|>user", "it's I'll"]
)
def test_text_ids_are_those_of_transformers(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    assert tokenizer.encode(text, parse_special=True) == reference(text)["input_ids"]
    if "<|" not in text:
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    asked = tokenizer.encode(text, parse_special=True)
    assert tokenizer.decode(asked) == reference.decode(reference(text)["input_ids"], True)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("end", ["generation prompt", "none", "continued"])
def test_templates_render_as_in_transformers(name: str, tools: list[dict[str, Any]] | None, end: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages: list[dict[str, Any]] = [SYSTEM, HELLO, CALL, RESULT, ANSWER]
    if name != "tools":
        messages, tools = [SYSTEM, HELLO, {**ANSWER, "reasoning_content": "I know."}], None
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    documents = [{"title": "T", "text": "ü"}] if name == "date" else None
    variables = {"enable_thinking": False} if name == "date" else {}
    (expected,), _ = render_jinja_template(
        [messages],
        tools=tools,
        documents=documents,
        chat_template=TEMPLATES[name],
        add_generation_prompt=end == "generation prompt",
        continue_final_message=end == "continued",
        **variables,
        **special,
    )
    template = ChatTemplate({"default": TEMPLATES[name]}, special)
    continues = end == "continued"
    chat = Chat(
        messages=messages_of(messages),
        tools=tools_of(tools),
        documents=tuple(documents or ()),
        template_kwargs=variables,
        add_generation_prompt=end == "generation prompt",
        continue_final_message=continues,
    )
    assert rendered(template, template.context(chat), continues=continues) == expected
    assert str(datetime.now().year) in expected or name != "date"


@pytest.mark.parametrize(
    ("chat", "param", "sentence"),
    [
        ({"template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "does not read 'enable_thinking'"),
        ({"template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot set 'messages'"),
        ({"documents": ({"text": "x"},)}, "documents", "does not read 'documents'"),
        ({"continue_final_message": True}, "messages", "omits the end of the last message"),
        ({"messages": (ChatMessage(role="user", content="x"),) * 1025}, "messages", "1 to 1024 elements"),
        ({"documents": (DEEP,)}, "documents", "deeper than 64 levels"),
        ({"template_kwargs": DEEP}, "chat_template_kwargs", "deeper than 64 levels"),
        ({"tools": (Tool(name="f", parameters=DEEP),)}, "tools", "deeper than 64 levels"),
        ({"messages": (DEEP_CALL,)}, "messages", "deeper than 64 levels"),
    ],
)
def test_what_a_template_would_ignore_is_refused(chat: Json, param: str, sentence: str) -> None:
    template = ChatTemplate({"default": "{{ messages[0].role }}{{ add_generation_prompt }}"}, {})
    whole = Chat(**{"messages": messages_of([HELLO]), **chat})
    with pytest.raises(InvalidRequest, match=sentence) as raised:
        rendered(template, template.context(whole), continues=whole.continue_final_message)
    assert raised.value.param == param


def test_a_message_without_content_is_not_continued(tokenizer: Tokenizer) -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    with pytest.raises(InvalidRequest, match="needs content in the last message"):
        template.context(Chat(messages=(ChatMessage(role="user", content=""),), continue_final_message=True))
    # what a client writes is no mark
    said = Chat(messages=(ChatMessage(role="user", content="CONTINUE_FINAL_MESSAGE_TAG "),))
    assert rendered(template, template.context(said)) == "CONTINUE_FINAL_MESSAGE_TAG "
    assert "CONTINUE_FINAL_MESSAGE_TAG" in tokenizer.decode(encoded(tokenizer, said))


def test_messages_of_openai_clients_become_what_templates_expect() -> None:
    source = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    template = ChatTemplate({"default": source + "{{ messages[1].tool_calls[0].function.arguments.x }}"}, {})
    call = {"function": {"name": "f", "arguments": '{"x": 7}'}}
    parts = {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    messages = [ChatMessage.parse(parts, 0), ChatMessage(role="assistant", content="", tool_calls=(call,))]
    assert rendered(template, template.context(Chat(messages=tuple(messages)))) == "system=a\nb;assistant=;7"
    assert call["function"]["arguments"] == '{"x": 7}'  # the caller's messages are left alone


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "messages must have 1 to 1024 elements, got 0"),
        ([{"role": "wizard", "content": "x"}], r"messages\[0\].role must be one of system, .*; got 'wizard'"),
        ([{"content": "x"}], r"messages\[0\].role must be a string"),
        (["x"], r"messages\[0\] must be an object"),
        ([HELLO, {"role": "user"}], r"messages\[1\].content must be a string"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a string"),
        ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
    ],
)
def test_bad_messages_are_refused_in_a_sentence(tokenizer: Tokenizer, messages: Any, sentence: str) -> None:
    def encode() -> None:
        parsed = tuple(ChatMessage.parse(message, index) for index, message in enumerate(messages))
        encoded(tokenizer, Chat(messages=parsed))

    with pytest.raises(InvalidRequest, match=sentence):
        encode()


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"city": "Par', {"city": "Par"}),
        ('{"city": "Par\\', {"city": "Par"}),
        ('{"city": "a\\u00', {}),
        ('{"city": "a", "days', {"city": "a"}),
        ('{"city": "a", "days": ', {"city": "a"}),
        ('{"city": "a", "days": tr', {"city": "a"}),
        ('{"days": [1, {"a": ",{"}, ', {"days": [1, {"a": ",{"}]}),
        ('{"a": {"b": 1', {"a": {"b": 1}}),
        ('{"a": 1}}', {"a": 1}),
        ("{", {}),
        ("", {}),
        ("null", {}),
        (None, {}),
        ({"city": "a"}, {"city": "a"}),
        (["a"], {"arguments": ["a"]}),
        ("[1]", {"arguments": [1]}),
        ("7", {"arguments": 7}),
        ("Paris", {"arguments": "Paris"}),
    ],
)
def test_arguments_that_are_no_object_go_on(tokenizer: Tokenizer, arguments: Any, read: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = ChatMessage.parse({"role": "assistant", "content": None, "tool_calls": [call]}, 0)
    assert message.parsed_tool_calls()[0]["function"]["arguments"] == read
    assert encoded(tokenizer, Chat(messages=(message,)))


@pytest.mark.parametrize("arguments", ["[" * 20_000, "{" + '"a":{' * 100])
def test_arguments_that_are_nested_too_deeply_are_refused_or_text(tokenizer: Tokenizer, arguments: str) -> None:
    call = tool_call(call_id="1", name="f", arguments=arguments)
    chat = Chat(messages=(ChatMessage(role="assistant", content="", tool_calls=(call,)),))
    with contextlib.suppress(InvalidRequest):
        encoded(tokenizer, chat)
    with pytest.raises(InvalidRequest, match="nested"):
        ChatMessage.parse({"role": "assistant", "tool_calls": [nested_call()]}, 0)


def nested_call() -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for _ in range(100):
        arguments = {"a": arguments}
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "tool", "content": None, "tool_call_id": "1"},
        {"role": "function", "content": None, "name": "f"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm."},
    ],
)
def test_messages_of_those_who_said_nothing_are_read(message: dict[str, Any]) -> None:
    assert ChatMessage.parse(message, 0).content == (message.get("content") or "")


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_question_of_nothing_is_refused(role: str) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content must be a string"):
        ChatMessage.parse({"role": role, "content": None}, 0)


def test_an_operators_template_stands_in_place_of_the_folders(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "chat_template.jinja").write_text("folder")
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("folder's tools")
    chosen = tmp_path / "chosen.jinja"
    chosen.write_bytes(b"a\r\n{{ messages[0].content }}")
    config = {"chat_template": [{"name": "tool_use", "template": "configured"}]}
    template = ChatTemplate.load(folder, config, {}, str(chosen))
    chat = Chat(messages=(ChatMessage(role="user", content="x"),), tools=(Tool(name="f"),))
    assert rendered(template, template.context(chat)).endswith("a\n" + template.context(chat)["messages"][0]["content"])
    assert ChatTemplate.load(folder, config, {}).source == "folder"


@pytest.mark.parametrize("kind", ["nothing", "pipe", "folder", "long", "bytes", "jinja"])
@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_template_file_is_read_within_bounds(tmp_path: Path, kind: str, is_chosen: bool) -> None:
    path = tmp_path / ("additional_chat_templates" if not is_chosen else ".") / "chosen.jinja"
    path.parent.mkdir(exist_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "long":
            path.write_text("x" * (MAX_SOURCE + 1))
        case "bytes":
            path.write_bytes(b"\xff\xfe")
        case "jinja":
            path.write_text("{% if %}")
    if kind == "nothing" and not is_chosen:
        assert ChatTemplate.load(tmp_path, {}, {}).source == ""
        return
    with pytest.raises(ModelLoadError) as refusal:
        ChatTemplate.load(tmp_path, {}, {}, str(path) if is_chosen else "")
    assert kind == "jinja" or ("model.chat_template" in str(refusal.value)) == is_chosen


def test_null_in_a_tool_is_nothing(tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": None, "required": None, "title": None}
    tool = Tool.parse({"type": "function", "function": {"name": "f", "parameters": schema}}, 0)
    assert tool.in_openai_form()["function"]["parameters"] == {"type": "object", "title": None}
    assert encoded(tokenizer, Chat(messages=(ChatMessage(role="user", content="a"),), tools=(tool,)))


def test_parts_that_are_no_text_are_refused_by_their_place() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "video_url"}]
    with pytest.raises(Unsupported, match=r"messages\[3\].content\[1\] must be a part of text"):
        ChatMessage.parse({"role": "user", "content": parts}, 3)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('Roles must alternate') }}",
        "{{ messages[7].content.x }}",
        "{{ 1 + messages[0].content }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_what_stops_a_template_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"chat template refuses these messages: .+"):
        written(ChatTemplate({"default": source}, {}))


def test_templates_are_found_where_models_keep_them(tmp_path: Path) -> None:
    def render(config: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> str:
        return written(ChatTemplate.load(tmp_path, config, {}), tools)

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools and 'tools' }}"}]
    assert render({"chat_template": "one"}) == "one"
    assert render({"chat_template": named}) == "plain"
    assert render({"chat_template": named}, TOOLS) == "tools"
    one = ChatTemplate.load(tmp_path, {"chat_template": named}, {})
    assert (one.source, one.source_with_tools, one.reads_tools) == ("plain", "{{ tools and 'tools' }}", True)
    with pytest.raises(InvalidRequest, match="no chat template"):
        render({})
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert render({"chat_template": "one"}) == "from a file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelLoadError, match="chat template is not valid"):
        render({})


def test_what_the_folder_says_about_the_default_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_ids == frozenset(range(17))
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.max_model_len == 8192
    assert (tokenizer.default_sampling.temperature, tokenizer.default_sampling.top_p) == (0.2, 0.9)


def test_a_folder_of_another_kind(tmp_path: Path, model_dir: Path) -> None:
    """Several eos ids, a nested text model, special tokens as objects, truncation left in tokenizer.json."""
    import tokenizers

    saved = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    saved.enable_truncation(2)
    saved.enable_padding(length=9)
    saved.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        Tokenizer.load(tmp_path)
    write = {
        "config.json": {"text_config": {"max_position_embeddings": 77}, "eos_token_id": 1},
        "generation_config.json": {"eos_token_id": [2, 0], "top_k": 20, "min_p": 0.1, "do_sample": True},
        "tokenizer_config.json": {"bos_token": {"content": "<|im_start|>"}, "chat_template": "{{ bos_token }}x"},
    }
    for name, value in write.items():
        (tmp_path / name).write_text(json.dumps(value))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.eos_ids, tokenizer.max_model_len) == ((2, 0), 77)
    assert (tokenizer.default_sampling.top_k, tokenizer.default_sampling.min_p) == (20, 0.1)
    assert tokenizer.default_sampling.temperature == 1
    assert len(tokenizer.encode("one two three four")) == 4
    assert written(tokenizer.chat_template) == "<|im_start|>x"
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ModelLoadError, match="top_p"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"Cannot read .*tokenizer\.json"):
        Tokenizer.load(tmp_path)

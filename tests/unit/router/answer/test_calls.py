"""Calls come out of an answer whole, however it is split, and what is no call stays text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from baton.errors import ModelLoadError
from baton.nesting import levels
from baton.tools import Tool, ToolCallDelta, joined_calls
from router.answer import CallForm, CallIds, Calls, Parted, call_format, form_of, known_form, typed_text
from router.answer.marks import MAX_HELD
from tests.unit.router.answer import transcripts
from tests.unit.router.answer.transcripts import TRANSCRIPTS, Transcript

TYPED = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "on": {"type": "boolean"},
        "list": {"type": "array"},
        "text": {"type": "string"},
        "none": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}], "nullable": True, "type": "null"},
        "x": {"type": ["number", "null"]},
        "big": {"type": "string"},
        "more": {"type": "object"},
    },
}
TOOLS = {
    tool.name: tool
    for tool in (Tool(name="weather"), Tool(name="add", parameters={}), Tool(name="typed", parameters=TYPED))
}
FORMS = list(dict.fromkeys(form.opens.pattern.pattern for form, _ in TRANSCRIPTS))
CUTS = st.lists(st.integers(0, 400), max_size=30)


def parts(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def calls_of(form: CallForm) -> Calls:
    return Calls(form, TOOLS, CallIds("request", 0, form.num_id_letters))


def found(form: CallForm, pieces: Sequence[str]) -> Parted:
    calls = calls_of(form)
    deltas = [*map(calls.push, pieces), calls.flush()]
    return Parted(
        "".join(delta.text for delta in deltas), joined_calls(call for delta in deltas for call in delta.calls)
    )


@pytest.mark.parametrize(("form", "transcript"), TRANSCRIPTS, ids=[repr(each.raw[:60]) for _, each in TRANSCRIPTS])
@settings(max_examples=30)
@given(cuts=CUTS)
def test_what_models_write_is_read(form: CallForm, transcript: Transcript, cuts: list[int]) -> None:
    raw = transcript.raw
    for pieces in ([raw], list(raw), parts(raw, cuts)):
        whole = found(form, pieces)
        assert whole.text == transcript.text
        assert tuple((call.name, call.arguments) for call in whole.calls) == transcript.calls
        assert [call.index for call in whole.calls] == list(range(len(whole.calls)))


@pytest.mark.parametrize("form", {id(form): form for form, _ in TRANSCRIPTS}.values())
def test_transcripts_of_each_format_have_each_kind(form: CallForm) -> None:
    examples = [each for other, each in TRANSCRIPTS if other is form]
    arguments = [text for each in examples for _, text in each.calls]
    whole = [json.loads(text) for text in arguments if text.endswith("}")]
    assert len(examples) >= 5
    assert any(len(each.calls) > 1 for each in examples), "parallel"
    assert {} in whole, "no arguments"
    assert any(levels(value) > 3 for value in whole), "nested"
    assert any(not json.dumps(value, ensure_ascii=False).isascii() for value in whole), "unicode"
    assert any(each.calls and not each.calls[-1][1].endswith("}") for each in examples), "cut off"
    assert any(each.text == each.raw and any(sign in each.raw for sign in form.signs or "{") for each in examples), (
        "broken"
    )
    assert form.only_at_begin or any(
        each.calls and each.text and each.raw[0] == each.text[0] and each.raw[-1] == each.text[-1] for each in examples
    ), "in the middle"


def of_parts(form: CallForm) -> st.SearchStrategy[str]:
    """Texts of what answers in a form are made of, in any order."""
    raws = [each.raw for other, each in TRANSCRIPTS if other is form]
    cut = st.tuples(st.sampled_from(raws), st.integers(0, 200), st.integers(0, 200))
    words = st.sampled_from(
        ["{", "}", '"', '"name": ', '"arguments": ', '"add"', ", ", ":", " ", "\n", "[", "]", "<", ";"]
    )
    return st.lists(words | cut.map(lambda each: each[0][each[1] : each[2]]), max_size=8).map("".join)


@pytest.mark.parametrize("form", [form for form, _ in {id(form): (form, each) for form, each in TRANSCRIPTS}.values()])
@settings(max_examples=150)
@given(data=st.data())
def test_any_split_gives_the_same(form: CallForm, data: st.DataObject) -> None:
    raw = data.draw(of_parts(form))
    whole = found(form, [raw])
    assert found(form, list(raw)) == whole
    assert found(form, parts(raw, data.draw(CUTS))) == whole
    if not whole.calls:
        assert whole.text == raw, "no character is lost"


@pytest.mark.parametrize(
    ("form", "raw", "text", "offsets"),
    [
        (call_format.HERMES, f"One: {transcripts.hermes(*transcripts.TWO)}\nDone", "One: \n\nDone", [4, 4]),
        (call_format.HERMES, f"a {transcripts.hermes(*transcripts.ONE)} é🐈 {transcripts.hermes(*transcripts.ONE)}.",
         "a  é🐈 .", [1, 5]),
        (call_format.HERMES, f" \n{transcripts.hermes(*transcripts.ONE)}", "", [0]),
        (call_format.QWEN_XML, "a<tool_call><function=add>b<parameter=x>1</parameter>c<parameter=y>2</parameter>d"
         f"</function></tool_call>{transcripts.tagged('add')}", "abcd", [1, 4]),
        (call_format.QWEN_XML, "<tool_call><function=add>a<parameter=x>1</parameter>b<param", "ab", [0]),
        (call_format.PLAIN_JSON, '{"name": "add", "parameters": {}} x', "x", [0]),
    ],
)  # fmt: skip
def test_a_call_says_how_much_content_stands_before_it(form: CallForm, raw: str, text: str, offsets: list[int]) -> None:
    whole = found(form, list(raw))
    assert whole.text == text
    assert [call.content_offset for call in whole.calls] == offsets


@pytest.mark.parametrize("form", {id(form): form for form, _ in TRANSCRIPTS}.values())
@settings(max_examples=100)
@given(data=st.data())
def test_content_that_comes_after_a_call_stands_behind_it(form: CallForm, data: st.DataObject) -> None:
    raw = data.draw(of_parts(form))
    calls, num_shown, begun = calls_of(form), 0, list[ToolCallDelta]()
    for part in [*map(calls.push, parts(raw, data.draw(CUTS))), calls.flush()]:
        for call in part.calls:
            if call.name:
                assert num_shown <= call.content_offset <= num_shown + len(part.text)
                begun.append(call)
            else:
                assert call.content_offset == 0
                assert begun[-1].index == call.index
                assert num_shown <= begun[-1].content_offset or call.arguments == "", "no text within a call"
        num_shown += len(part.text)
    offsets = [call.content_offset for call in begun]
    assert offsets == sorted(offsets)


def test_arguments_come_as_they_are_written() -> None:
    calls = calls_of(call_format.HERMES)
    assert calls.push('Well.\n<tool_call>\n{"name": "weather"') == Parted("Well.")
    (first,) = calls.push(', "arguments": {"ci').calls
    assert (first.index, first.name, first.arguments) == (0, "weather", '{"ci')
    assert calls.push('ty": "Pa').calls == (ToolCallDelta(index=0, arguments='ty": "Pa'),)
    assert calls.push('ris"}}\n</tool').calls == (ToolCallDelta(index=0, arguments='ris"}'),)
    assert calls.push("_call>") == Parted("")
    assert calls.num_calls == 1


def test_arguments_that_are_tags_come_one_by_one() -> None:
    calls = calls_of(call_format.QWEN_XML)
    (first,) = calls.push("<tool_call>\n<function=typed>\n<parameter=n>").calls
    assert (first.name, first.arguments) == ("typed", "")
    assert calls.push("\n7\n") == Parted("")
    assert calls.push("</parameter>\n").calls == (ToolCallDelta(index=0, arguments='{"n": 7'),)
    assert calls.push("<parameter=text>a</parameter>").calls == (ToolCallDelta(index=0, arguments=', "text": "a"'),)
    assert calls.push("</function></tool_call>").calls == (ToolCallDelta(index=0, arguments="}"),)


def test_what_stands_behind_the_end_of_a_call_is_no_argument_of_it() -> None:
    raw = "<tool_call><function=add><parameter=x>1</parameter></function></tool_call><parameter=y>2</parameter>"
    for pieces in ([raw], list(raw)):
        whole = found(call_format.QWEN_XML, pieces)
        assert [json.loads(call.arguments) for call in whole.calls] == [{"x": "1"}]
        assert whole.text == "<parameter=y>2</parameter>"


def test_ids_are_those_of_request_choice_and_place() -> None:
    raw = transcripts.hermes(*transcripts.TWO)

    def ids(request_id: str, choice_index: int, num_letters: int = 29) -> list[str]:
        calls = Calls(call_format.HERMES, TOOLS, CallIds(request_id, choice_index, num_letters))
        return [call.call_id for call in calls.push(raw).calls if call.call_id]

    all_ids = [*ids("r", 0), *ids("r", 1), *ids("s", 0)]
    assert len(set(all_ids)) == 6
    assert ids("r", 0) == all_ids[:2], "the same when it is written again"
    assert all(each.startswith("call_") and len(each) == 29 for each in all_ids)
    assert all(len(each) == 9 and each.isalnum() for each in ids("r", 0, 9)), "Mistral's"


def test_what_may_be_a_mark_is_not_held_for_ever() -> None:

    calls = calls_of(call_format.QWEN_XML)
    calls.push("<tool_call>")
    given = "".join(calls.push(" ").text for _ in range(3 * MAX_HELD))
    assert given == "<tool_call>"
    given += calls.push("x").text
    assert given == "<tool_call>" + " " * 3 * MAX_HELD + "x"
    behind = calls_of(call_format.HERMES)
    behind.push('<tool_call>{"name": "add", "arguments": {}}')
    for space in " " * (MAX_HELD + 1):
        assert behind.push(space) == Parted("")
    assert behind.push(" </tool_call>").text == "</tool_call>", "it comes too late"


QWENS = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
    },
}
QWENS_XML = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}
"""Templates that come with transformers, of Qwen 2, 3 and 3.5; but white space in tags is the argument's."""


@pytest.mark.parametrize(
    ("template", "form", "examples"),
    [(QWENS, call_format.HERMES, transcripts.HERMES), (QWENS_XML, call_format.QWEN_XML, transcripts.QWEN_XML)],
)
def test_transformers_parser_reads_the_same(template: Any, form: CallForm, examples: list[Transcript]) -> None:
    """Of what it reads at all: it raises for broken calls, and keeps the last one of several pieces of content."""
    its_form = form_of(template["fields"]["tool_calls"])
    assert its_form is not None
    tools = [tool.in_openai_form() for tool in TOOLS.values()]
    num_read = 0
    for example in examples:
        try:
            message = parse_response(example.raw, template, prefix="", tools=tools)
            read = [
                (call["function"]["name"], call["function"].get("arguments", {}))
                for call in message.get("tool_calls", [])
            ]
        except ValueError:
            continue
        is_plain = all(name in TOOLS and isinstance(arguments, dict) for name, arguments in read)
        if not (read and is_plain) or "</tool_call>" in str(read) or not example.raw.rstrip().endswith("</tool_call>"):
            continue
        num_read += 1
        for each in (form, its_form):
            whole = found(each, [example.raw])
            assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == read, example.raw
            assert whole.text == message.get("content", "oh" if "\noh\n" in example.raw else "")
    assert num_read >= 5


def test_a_template_with_the_marks_of_a_known_form_is_read_as_loosely() -> None:
    json_field: Any = QWENS["fields"]["tool_calls"]  # type: ignore[index]
    tag_field: Any = QWENS_XML["fields"]["tool_calls"]  # type: ignore[index]
    seeds = {name: text.replace("tool_call>", "seed:tool_call>") if isinstance(text, str) else text
             for name, text in tag_field.items()}  # fmt: skip
    for field, known in ((json_field, call_format.HERMES), (tag_field, call_format.QWEN_XML),
                         (seeds, call_format.SEED_XML)):  # fmt: skip
        form = form_of(field)
        assert form is not None
        assert form.loose is known.loose
    for field in ({**json_field, "close": "</c>"}, {**tag_field, "open_pattern": "<c>(?P<name>.*?)\\n"}):
        form = form_of(field)
        assert form is not None
        assert form.loose is None


def test_templates_of_other_forms(caplog: pytest.LogCaptureFixture) -> None:
    marks = {"open": "<c>", "close": "</c>", "content": "json"}
    renamed = form_of({**marks, "transform": {"function": {"name": "{content.tool}", "arguments": "{content.with}"}}})
    each = form_of({
        **marks, "transform_each": True, "transform": {"function": {"name": "{tool}", "arguments": "{with}"}},
    })  # fmt: skip
    for form in (renamed, each):
        assert form is not None
        whole = found(form, ['<c>[{"tool": "add", "with": {"a": 1}}]</c>'])
        assert [(call.name, call.arguments) for call in whole.calls] == [("add", '{"a": 1}')]
    named = form_of({
        "open_pattern": "call:(?P<name>\\w+)", "content": "json",
        "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
    })  # fmt: skip
    assert named is not None
    assert [call.name for call in found(named, ["call:add {} x"]).calls] == ["add"]
    unknown: list[dict[str, Any]] = [
        {**marks, "content": "kv-lines"},
        {**marks, "content_args": {"unquoted_keys": True}, "transform": {"function": "{content}"}},
        {**marks, "transform": {"function": {"name": "add", "arguments": "{content}"}}},
        {**marks, "transform": 7},
        marks,
    ]
    for field in unknown:
        assert form_of(field) is None
    xml = QWENS_XML["fields"]["tool_calls"]  # type: ignore[index]
    tags = [{**xml, "content_args": {"tag_pattern": bad}} for bad in ("(", "<(?P<key>.)>", 7)]
    for bad in (7, {"content": "json"}, *tags):
        with pytest.raises(ModelLoadError):
            form_of(bad)


def test_a_chat_template_tells_the_form() -> None:
    for source, form in (
        ("<tool_call>\\n{'name'", call_format.HERMES),
        ("<tool_call>\\n<function=", call_format.QWEN_XML),
        ("<seed:tool_call>\\n<function=", call_format.SEED_XML),
        ("<|START_ACTION|>[", call_format.COHERE),
        ("`directly_answer`", call_format.COHERE_FENCED),
        ("<TOOLCALL>[", call_format.NEMOTRON),
        ("functools[{'name'", call_format.PHI),
        ("<|tool|>' + message['tools'] + '<|/tool|>", call_format.PHI),
        ("<|observation|>", call_format.GLM),
        ("[TOOL_CALLS]", call_format.MISTRAL),
        ("[TOOL_CALLS]name[ARGS]", call_format.MISTRAL_11),
        ("<｜tool▁call▁begin｜>", call_format.DEEPSEEK),
        ("<|tool_call|>", call_format.GRANITE),
        ("Environment: ipython", call_format.PLAIN_JSON),
    ):
        assert known_form(source) is form


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("7", {"type": "integer"}, 7),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("+1e400", {"type": "number"}, "+1e400"),
        ("1e5", {"type": "number"}, 1e5),
        ("1e400", {"type": "integer"}, "1e400"),
        ("-1_0", {"type": "integer"}, -10),
        (" 7 ", {"type": "integer"}, 7),
        ("0" * 5000 + "7", {"type": "integer"}, 7),
        ("007", {"type": "number"}, 7),
        ("nan", {"type": "number"}, "nan"),
        ("12345678901234567890123", {"type": "integer"}, 12345678901234567890123),
        ("2", {"type": "number"}, 2),
        ("2.0", {"type": "number"}, 2.0),
        ("+2.0", {"type": "number"}, 2.0),
        (" False ", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("None", {"type": ["integer", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[1]", {"type": "object"}, "[1]"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("7", {"oneOf": [{"type": "null"}, {"type": "integer"}]}, 7),
        ("7", {"anyOf": 7}, "7"),
        ("null", {"type": "integer", "nullable": True}, None),
        ("x\n🐈", None, "x\n🐈"),
        ("x", {"type": 7}, "x"),
    ],
)  # fmt: skip
def test_a_value_of_a_tag_is_of_the_type_that_its_schema_says(text: str, schema: Any, value: Any) -> None:
    assert repr(json.loads(typed_text(text, schema))) == repr(value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("9" * 5000, "integer"),
        ("-" + "9" * 400, "number"),
        ("1e999999", "number"),
        ("-1.5E+999999", "number"),
        ("1.50", "number"),
        (f'{{"a": {"9" * 5000}}}', "object"),
        ("[1e999999]", "array"),
    ],
)
def test_numbers_of_any_size_stay_as_they_are_written(text: str, kind: str) -> None:
    assert typed_text(f" {text}\n", {"type": kind}) == text

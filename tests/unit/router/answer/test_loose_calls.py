"""What models write in place of their form is a call, and what only looks like it is text, at every cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tools import Tool, joined_calls
from router.answer import CallForm, CallIds, Calls, call_format
from router.answer.call_format import (
    COHERE,
    COHERE_FENCED,
    DEEPSEEK,
    GLM,
    GRANITE,
    HERMES,
    MISTRAL,
    MISTRAL_11,
    NEMOTRON,
    PHI,
    PLAIN_JSON,
    QWEN_XML,
    SEED_XML,
)
from tests.support.cases import some

TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "more": {"type": "object"},
        "code": {"type": "string"},
    },
}
TOOLS = {tool.name: tool for tool in (Tool(name="trip", parameters=TRIP), Tool(name="add"))}
W = '{"city": "Paris", "days": 2}'
ARGUMENTS = json.loads(W)
TEXT = json.dumps(W)
CALL = f'{{"name": "trip", "arguments": {W}}}'
X: tuple[str, Any] = ("trip", ARGUMENTS)
ADD: tuple[str, Any] = ("add", {})
TAGS = (
    "<tool_call>\n<function=trip>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
Row = tuple[CallForm, str, str, list[tuple[str, Any]]]


def hermes(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def with_arguments(arguments: str) -> str:
    return hermes(f'{{"name": "trip", "arguments": {arguments}}}')


CALLED: list[Row] = [
    # Marks that are missing around tags.
    (QWEN_XML, TAGS, "", [X]),
    (QWEN_XML, TAGS.replace("</function>\n", ""), "", [X]),
    (QWEN_XML, TAGS.replace("</function>\n", "") + f"\nSo.\n{TAGS}", "So.", [X, X]),
    (QWEN_XML, TAGS.replace("\n</tool_call>", ""), "", [X]),
    (QWEN_XML, TAGS.replace("</function>\n</tool_call>", ""), "", [X]),
    (QWEN_XML, TAGS.partition("\n</parameter>\n</function>")[0], "", [X]),
    (QWEN_XML, TAGS.replace("</parameter>\n<parameter=days", "<parameter=days"), "", [X]),
    (QWEN_XML, TAGS.replace("</parameter>\n<parameter=days", "  <parameter=days"), "", [X]),
    (QWEN_XML, TAGS.replace("</parameter>\n", ""), "", [X]),
    (QWEN_XML, TAGS.replace("</parameter>\n", "").replace("\n", ""), "", [X]),
    (QWEN_XML, TAGS.replace("</parameter>\n</function", "</function"), "", [X]),
    (QWEN_XML, TAGS.replace("</parameter>\n", "").replace("</function>\n", "") + TAGS, "", [X, X]),
    (QWEN_XML, TAGS.replace("</parameter>\n</function>\n</tool_call>", "</function>\nDone."), "Done.", [X]),
    (QWEN_XML, TAGS.replace("<tool_call>\n", "I look.\n"), "I look.", [X]),
    (QWEN_XML, TAGS.replace("=trip", '="trip"'), "", [X]),
    (QWEN_XML, TAGS.replace("</function>", "</function>\n<function=add>\n</function>"), "", [X, ADD]),
    (QWEN_XML, TAGS.replace("</function>\n</tool_call>", "\n<function=add>\n</function>"), "", [X, ADD]),
    (QWEN_XML, f"<tool_call>\n{CALL}\n</tool_call>", "", [X]),
    (QWEN_XML, '<function=trip><parameter=code>\nprint("<parameter=x>")\n<parameter=y>\n</parameter></function>', "",
     [("trip", {"code": 'print("<parameter=x>")\n<parameter=y>'})]),
    (QWEN_XML, '<function=trip><parameter=code>a </function> b</parameter></function>', "",
     [("trip", {"code": "a </function> b"})]),
    (QWEN_XML, '<function=trip><parameter=code>use <parameter=x></parameter></function>', "",
     [("trip", {"code": "use <parameter=x>"})]),
    (QWEN_XML, '<function=trip><parameter=more>{"a": "\n<parameter=city>"}\n<parameter=city>\n\n</parameter>', "",
     [("trip", {"more": '{"a": "\n<parameter=city>"}', "city": ""})]),
    (QWEN_XML, '<function=trip>\n<parameter=more>\n{"a": "</function></tool_call>"}\n<parameter=days>\n1', "",
     [("trip", {"more": {"a": "</function></tool_call>"}, "days": 1})]),
    (QWEN_XML, "<function=add>\n<parameter=any>\n1\n<parameter=other>\n2", "", [("add", {"any": "1", "other": "2"})]),
    (SEED_XML, TAGS.replace("tool_call", "seed:tool_call").replace("</function>\n", ""), "", [X]),
    (SEED_XML, TAGS.replace("<tool_call>\n", "I look.\n").replace("tool_call", "seed:tool_call"), "I look.", [X]),
    # Arguments that are a text, or nothing.
    (HERMES, with_arguments(TEXT), "", [X]),
    (HERMES, with_arguments(json.dumps(json.dumps({"city": "é🐈\"\n\\"}))), "", [("trip", {"city": "é🐈\"\n\\"})]),
    (HERMES, with_arguments('" { \\u007d "'), "", [("trip", {})]),
    (HERMES, with_arguments('"{\\"city\\": \\"Paris\\""'), "", [("trip", {"city": "Paris"})]),
    (HERMES, hermes(f'{{"arguments": {TEXT}, "name": "trip"}}'), "", [X]),
    *((HERMES, with_arguments(nothing), "", [("trip", {})]) for nothing in ('""', '" "', "null", "{}")),
    (MISTRAL, f'[TOOL_CALLS][{{"name": "trip", "arguments": {TEXT}}}]', "", [X]),
    (PLAIN_JSON, '{"name": "trip", "parameters": "{}"}', "", [("trip", {})]),
    (PLAIN_JSON, '{"name": "trip", "parameters": null}', "", [("trip", {})]),
    # Arguments that are not quite JSON.
    (HERMES, with_arguments('{"city": "a\n\t\x01b", "days": 2,}'), "", [("trip", {"city": "a\n\t\x01b", "days": 2})]),
    (HERMES, with_arguments('{"more": {"a": [True, False, None, 1.5e3, ], }, \'city\': \'it\\\'s "a"\'}'), "",
     [("trip", {"more": {"a": [True, False, None, 1500.0]}, "city": 'it\'s "a"'})]),
    (HERMES, with_arguments('{city: Paris, "code": "\\d\\u00e9\\u00g\\\\"}'), "",
     [("trip", {"city": "Paris", "code": "\\dé\\u00g\\"})]),
    (HERMES, hermes('{"name": "trip", "arguments": {"city": "Paris", "days": 2}'), "", [X]),
    (HERMES, '<tool_call>{"name": "trip", "arguments": {"city": "Paris", "days": <', "<",
     [("trip", {"city": "Paris", "days": None})]),
    # What stands around the JSON.
    (HERMES, hermes(CALL + "}"), "", [X]),
    (HERMES, hermes(CALL + "}") + "So.", "So.", [X]),
    (HERMES, f"<tool_call>{CALL}}}", "", [X]),
    (HERMES, hermes(f"{{{CALL}}}"), "", [X]),
    (HERMES, hermes(f"{CALL}\n{CALL}"), "", [X, X]),
    (HERMES, hermes(f"{CALL}, {CALL}"), "", [X, X]),
    (HERMES, f"{CALL}\n</tool_call>", "", [X]),
    (HERMES, f"{CALL}\n</tool_call>\n{hermes(CALL)}\nDone", "Done", [X, X]),
    (HERMES, CALL, "", [X]),
    (HERMES, f" \n{CALL}\n", "", [X]),
    (HERMES, f"I look.\n{CALL}", "I look.", [X]),
    (HERMES, f"I look.\n\n[{CALL}, {CALL}] Done.", "I look.\n\n Done.", [X, X]),
    (HERMES, f"```json\n{CALL}\n```", "", [X]),
    (HERMES, f"```\n{CALL}\n```\n```\ncode\n```", "```\ncode\n```", [X]),
    (HERMES, hermes(f"```json\n{CALL}\n```"), "", [X]),
    (HERMES, f"<tools>\n{CALL}\n</tools>", "", [X]),
    (HERMES, hermes(f'{{"type": "function", "function": {CALL}}}'), "", [X]),
    (HERMES, f'{{"type": "function", "id": "call_1", "function": {{"name": "trip", "arguments": {TEXT}}}}}', "", [X]),
    (HERMES, hermes(CALL.replace("trip", "functions.trip")), "", [X]),
    (HERMES, f"```py\nx = 1\n```\n{CALL}", "```py\nx = 1\n```", [X]),
    # Mistral.
    (MISTRAL_11, f"trip[ARGS]{W}", "", [X]),
    (MISTRAL, f"I look.\ntrip[ARGS]{W}add[ARGS]{{}}", "I look.", [X, ADD]),
    (MISTRAL, f"[{CALL}]", "", [X]),
    (MISTRAL, f"[TOOL_CALLS] trip[ARGS] {W}", "", [X]),
    (MISTRAL, f"[TOOL_CALLS]trip[ARGS]{W}, trip[ARGS]{W}", "", [X, X]),
    (MISTRAL, f"[TOOL_CALLS]functions.trip[ARGS]{W}", "", [X]),
    # Llama.
    (PLAIN_JSON, f'{{"type": "function", "function": "trip", "parameters": {W}}}', "", [X]),
    (PLAIN_JSON, f"<function=trip>{W}</function>", "", [X]),
    (PLAIN_JSON, '[trip(city="Paris", days=2), add()]', "", [X, ADD]),
    (PLAIN_JSON, "[trip(city='(a=b)', more={'a': [None]},)] So.", "So.",
     [("trip", {"city": "(a=b)", "more": {"a": [None]}})]),
    (PLAIN_JSON, '<|python_tag|>trip.call(city="Paris", days=2)', "", [X]),
    (PLAIN_JSON, f'{{"tool_calls": [{CALL}, {CALL}]}}', "", [X, X]),
    (PLAIN_JSON, f"```json\n[{CALL}]\n```", "", [X]),
    (PLAIN_JSON, f"<tool_call>[{CALL}]</tool_call>", "", [X]),
    (PLAIN_JSON, f"{CALL}\n{CALL}", "", [X, X]),
    # Others.
    (GRANITE, f"<tool_call>[{CALL}]", "", [X]),
    (GRANITE, f"I look.\n[{CALL}]", "I look.", [X]),
    (GLM, f"I look.\ntrip\n{W}\nadd\n{{}}", "I look.", [X, ADD]),
    (GLM, f"trip\n{W}<|assistant|>add\n{{}}", "", [X, ADD]),
    (PHI, f"<|tool_call|>{CALL}<|/tool_call|>", "", [X]),
    (PHI, f'functools [{{"type": "function", "function": {CALL}}}]', "", [X]),
    (PHI, f"[{CALL}]", "", [X]),
    (COHERE, f'[{{"tool_name": "trip", "parameters": {W}}}]', "", [X]),
    (COHERE_FENCED, 'Action:```json\n[{"tool_name": "directly_answer", "parameters": {}}]\n```', "", []),
    (COHERE_FENCED, 'Plan.\nAction: ```json\n[{"tool_name": "directly-answer", "parameters": {"a": 1}}]\n```\nHi',
     "Plan.\n\nHi", []),
    (COHERE_FENCED, f'Action:\n```\n[{{"tool_name": "trip", "parameters": {W}}}]\n```', "", [X]),
    (NEMOTRON, f"[{CALL}]", "", [X]),
]  # fmt: skip
DEFINITION = '{"type": "function", "function": {"name": "trip", "description": "d", "parameters": {"type": "object"}}}'
TEXTS: list[tuple[CallForm, str]] = [
    (HERMES, 'Write {"name": "trip", "arguments": {}} to call it.'),
    (HERMES, f"Like so:\n```json\n{CALL}\n```\nThen wait."),
    (HERMES, f"Like so:\n\n  ```\n{CALL}\n{CALL}\n  ```"),
    (HERMES, f"The tools:\n<tools>\n{DEFINITION}\n</tools>"),
    (HERMES, f"A tool:\n{DEFINITION}"),
    (HERMES, '{"name": "trip"}'),
    (HERMES, '{"name": "trip", "city": "Paris", "arguments": {}}'),
    (HERMES, '{"name": "other", "arguments": {}}\n</tool_call>'),
    (HERMES, '{"name": "trip", "arguments": "Paris"}'),
    (HERMES, '{"name": "trip", "arguments": [1]}'),
    (HERMES, '{"answer": {"name": "trip", "arguments": {}}}'),
    (HERMES, '{\n  "calls": [\n    {"name": "trip", "arguments": {}}\n  ]\n}'),
    (HERMES, '```json\n{"answer": 42}\n```'),
    (HERMES, "```py\nx = {}\n```"),
    (HERMES, "[1, 2]\n{}\n[]"),
    (HERMES, "{" * 1000),
    (HERMES, '{"function": ' * 1000),
    (HERMES, hermes(CALL.replace("trip", "functions.other"))),
    (QWEN_XML, "Write <function=trip> and <parameter=city>."),
    (QWEN_XML, "<tool_call> {} </tool_call>"),
    (MISTRAL, "a trip[ARGS]{} b"),
    (MISTRAL, "other[ARGS]{}"),
    (MISTRAL, "[1, 2]"),
    (PLAIN_JSON, "[other(a=1)]"),
    (PLAIN_JSON, "[trip(1)]"),
    (PLAIN_JSON, 'Call [trip(city="Paris")]'),
    (PLAIN_JSON, "<function=other>{}</function>"),
    (PLAIN_JSON, "<|python_tag|>print(1)"),
    (PLAIN_JSON, '; {"name": "add", "parameters": {}}'),
    (GRANITE, "<tool_call>oh"),
    (GLM, "The trip\n{}"),
    (GLM, "other\n{}"),
    (GLM, "So:\n```\ntrip\n{}\n```"),
    (PHI, "functools[0] and functools"),
    (COHERE_FENCED, 'Action: ```json\n[{"tool_name": "other", "parameters": {}}]\n```'),
    (DEEPSEEK, CALL),
]


def read(form: CallForm, pieces: Sequence[str], *, is_whole: bool = True, is_forced: bool = False) -> Any:
    calls = Calls(form, TOOLS, CallIds("r", 0, form.num_id_letters), is_forced=is_forced)
    parts = [*map(calls.push, pieces), calls.flush(is_whole=is_whole)]
    joined = joined_calls(call for part in parts for call in part.calls)
    return "".join(part.text for part in parts), [(call.name, call.arguments) for call in joined]


def loose(form: CallForm) -> CallForm:
    return form.loose or form


@pytest.mark.parametrize(("form", "raw", "text", "calls"), CALLED, ids=[repr(row[1][:70]) for row in CALLED])
def test_what_models_write_in_place_of_their_form_is_read(
    form: CallForm, raw: str, text: str, calls: list[tuple[str, Any]]
) -> None:
    whole = read(loose(form), [raw])
    assert whole[0] == text
    assert [(name, json.loads(arguments)) for name, arguments in whole[1]] == calls
    assert read(loose(form), list(raw)) == whole
    for cut in range(1, len(raw)):
        assert read(loose(form), [raw[:cut], raw[cut:]]) == whole


@pytest.mark.parametrize(
    ("form", "raw"),
    some([row[:2] for row in CALLED], pytest.mark.slow, every=4),
    ids=[repr(row[1][:70]) for row in CALLED],
)
def test_an_answer_that_ends_anywhere_has_whole_arguments_and_no_text_where_calls_are_forced(
    form: CallForm, raw: str
) -> None:
    for cut in range(len(raw)):
        whole = read(loose(form), [raw[:cut]])
        assert read(loose(form), list(raw[:cut])) == whole
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole[1])
        cut_off = read(loose(form), [raw[:cut]], is_whole=False)
        assert read(loose(form), list(raw[:cut]), is_whole=False) == cut_off
        assert len(cut_off[1]) == len(whole[1])
        assert read(loose(form), [raw[:cut]], is_forced=True)[0] == ""


@pytest.mark.parametrize(("form", "raw"), TEXTS, ids=[repr(raw[:70]) for _, raw in TEXTS])
def test_what_only_looks_like_a_call_is_text(form: CallForm, raw: str) -> None:
    for pieces in ([raw], list(raw)):
        assert read(loose(form), pieces) == (raw, [])
    for cut in range(0, len(raw), 1 + len(raw) // 100):
        assert read(loose(form), [raw[:cut], raw[cut:]]) == (raw, [])


ALL = [*((form, raw) for form, raw, _, _ in CALLED), *((form, raw) for form, raw in TEXTS if len(raw) < 1000)]
RAWS = {form.opens.pattern.pattern: (form, [raw for other, raw in ALL if other is form]) for form, _ in ALL}
WORDS = ["{", "}", '"', '"name": ', '"arguments": ', '"trip"', "trip", "\n", ", ", ":", " ", "[", "]", "<", "```", "\\"]
CUTS = st.lists(st.integers(0, 400), max_size=8)


@pytest.mark.parametrize(("form", "raws"), RAWS.values())
@settings(max_examples=60)
@given(data=st.data())
def test_any_mixture_is_read_the_same_at_any_cut(form: CallForm, raws: list[str], data: st.DataObject) -> None:
    part = st.tuples(st.sampled_from(raws), st.integers(0, 200), st.integers(0, 200))
    some = st.sampled_from(WORDS) | part.map(lambda each: each[0][each[1] : each[2]]) | st.sampled_from(raws)
    raw = data.draw(st.lists(some, max_size=6).map("".join))
    edges = [0, *sorted(cut % (len(raw) + 1) for cut in data.draw(CUTS)), len(raw)]
    for is_whole in (True, False):
        whole = read(loose(form), [raw], is_whole=is_whole)
        assert read(loose(form), list(raw), is_whole=is_whole) == whole
        assert read(loose(form), [raw[a:b] for a, b in pairwise(edges)], is_whole=is_whole) == whole
    text, calls = read(loose(form), [raw])
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    assert calls or text == raw or "directly" in raw, "no character is lost"


def test_arguments_that_were_cut_off_stay_open() -> None:
    for form, raw, arguments in (
        (HERMES, with_arguments('{"city": "Paris", "days": 2').partition("2")[0], '{"city": "Paris", "days": '),
        (HERMES, with_arguments('{"city": "Pa').partition("}")[0], '{"city": "Pa'),
        (QWEN_XML, TAGS.partition("2")[0], '{"city": "Paris"'),
    ):
        assert read(loose(form), [raw], is_whole=False) == ("", [("trip", arguments)])
        assert json.loads(read(loose(form), [raw])[1][0][1])["city"] in ("Pa", "Paris")


def test_a_tool_of_the_name_that_means_none_is_called() -> None:
    tools = {"directly_answer": Tool(name="directly_answer")}
    calls = Calls(loose(COHERE_FENCED), tools, CallIds("r", 0, 29))
    found = calls.push('Action:```json\n[{"tool_name": "directly_answer", "parameters": {}}]\n```')
    assert [(call.name, call.arguments) for call in found.calls] == [("directly_answer", "{}")]


def test_every_known_form_says_what_else_is_read() -> None:
    assert [form for _, form in call_format.KNOWN_FORMS if form.loose is None] == [DEEPSEEK]
    assert all(form.loose.loose is None for _, form in call_format.KNOWN_FORMS if form.loose)

"""Whatever tokens a grammar of calls lets through, the reader finds the calls that were asked for, and valid ones."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from baton.api import Chat, Text
from baton.chat import ChatMessage
from baton.errors import InvalidRequest
from baton.grammar import GrammarCompiler
from baton.sampling import SamplingParams
from baton.structure import StructuredOutputs, loosened
from baton.tools import Tool, ToolCallDelta, ToolChoice, ToolUse, joined_calls
from router.answer import AnswerFormat, CallForm, CallIds, Calls, call_format, with_tool_choice
from router.prompt import Tokenizer
from tests.support.cases import chosen

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["C", "F°"]},
    },
    "required": ["city", "unit"],
}
TOOLS = (
    Tool(name="weather", parameters=CITY, strict=True),
    Tool(name="now", parameters={"type": "object", "properties": {}, "additionalProperties": False}, strict=True),
)
BY_NAME = {tool.name: tool for tool in TOOLS}
FORMS = {
    "hermes": call_format.HERMES,
    "qwen xml": call_format.QWEN_XML,
    "seed xml": call_format.SEED_XML,
    "cohere": call_format.COHERE,
    "cohere fenced": call_format.COHERE_FENCED,
    "nemotron": call_format.NEMOTRON,
    "phi": call_format.PHI,
    "glm": call_format.GLM,
    "mistral": call_format.MISTRAL,
    "mistral 11": call_format.MISTRAL_11,
    "deepseek": call_format.DEEPSEEK,
    "granite": call_format.GRANITE,
    "plain": call_format.PLAIN_JSON,
}
CHECKED = ("qwen xml", "glm", "mistral 11", "deepseek", "plain")
"""Forms of each kind: tags, lines, names in marks, a mark for each part, and JSON without marks."""
MARKS = [
    "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|START_ACTION|>", "<|END_ACTION|>",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Tokenizer:
    """The default model's, with more special tokens: the marks of other families."""
    folder = tmp_path_factory.mktemp("marks")
    inner = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    inner.add_special_tokens(MARKS)
    inner.save(str(folder / "tokenizer.json"))
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).symlink_to(model_dir / name)
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.folder / "tokenizer.json", tokenizer.vocab_size, tokenizer.eos_ids)


def asked(
    tokenizer: Tokenizer, form: CallForm | None, tools: tuple[Tool, ...] = TOOLS, **choice: Any
) -> SamplingParams:
    params = SamplingParams(**choice.pop("params", {}))
    chat = Chat(messages=(ChatMessage(role="user", content="Hi"),), tools=tools, tool_choice=ToolChoice(**choice))
    return with_tool_choice(params, chat, form, tokenizer)


def written(compiler: GrammarCompiler, params: SamplingParams, tokenizer: Tokenizer, seed: int, begin: str = "") -> str:
    """A random answer that the grammar allows, whole.

    Args:
        begin: the answer's first characters.
    """
    assert params.structured_outputs is not None
    rng, matcher = random.Random(seed), compiler.compile(params.structured_outputs)
    drawn = tokenizer.encode(begin, parse_special=True) if begin else []
    matcher.take(drawn)
    closing = tokenizer.encode_fragment("\n</parameter>\n")
    while len(drawn) < 400:
        bits = np.frombuffer(matcher.allowed(), np.uint8)
        ends = [token_id for token_id in tokenizer.eos_ids if is_set(bits, token_id)]
        if ends and rng.random() < 0.4:
            return tokenizer.decode_all(drawn)
        if rng.random() < 0.2 and is_set(bits, closing[0]):
            tokens = closing  # what nobody would draw at random
        elif rng.random() < 0.3 and (found := [i for i in tokenizer.encode_fragment('"}],') if is_set(bits, i)]):
            tokens = found[:1]
        else:
            is_allowed = np.unpackbits(bits, bitorder="little")[: tokenizer.vocab_size]
            is_allowed[list(tokenizer.eos_ids)] = 0
            others = np.flatnonzero(is_allowed)
            if not len(others):
                return tokenizer.decode_all(drawn)
            tokens = [int(others[rng.randrange(len(others))])]
        for token_id in tokens:
            if not is_set(np.frombuffer(matcher.allowed(), np.uint8), token_id):
                break
            drawn.append(token_id)
            matcher.take([token_id])
    pytest.fail(f"the answer has no end: {tokenizer.decode_all(drawn)}")


def is_set(bits: Any, token_id: int) -> bool:
    return bool(bits[token_id // 8] >> (token_id % 8) & 1)


def read(form: CallForm, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
    calls = Calls(form, BY_NAME, CallIds("r", 0, form.num_id_letters))
    parts = [*map(calls.push, text), calls.flush()]
    return "".join(part.text for part in parts), joined_calls(call for part in parts for call in part.calls)


def valid(calls: tuple[ToolCallDelta, ...]) -> None:
    for call in calls:
        schema = BY_NAME[call.name].parameters
        assert schema is not None
        jsonschema.validate(json.loads(call.arguments), {"additionalProperties": False, **schema})


@pytest.mark.parametrize("name", chosen(FORMS, pytest.mark.slow, *CHECKED))
def test_forced_calls_are_those_that_are_read(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    form, numbers, names = FORMS[name], set(), set()
    for seed in range(12):
        text, calls = read(form, written(compiler, asked(tokenizer, form, use=ToolUse.REQUIRED), tokenizer, seed))
        assert (text, bool(calls)) == ("", True)
        valid(calls)
        numbers.add(len(calls))
        names |= {call.name for call in calls}
    assert {1, 2} <= numbers
    assert names == {"weather", "now"}
    for choice in ({"name": "weather"}, {"is_parallel": False}):
        for seed in range(4):
            params = asked(tokenizer, form, use=ToolUse.REQUIRED, **choice)
            text, calls = read(form, written(compiler, params, tokenizer, seed))
            assert (text, len(calls)) == ("", 1)
            assert calls[0].name == choice.get("name", calls[0].name)
            valid(calls)


@pytest.mark.parametrize("name", chosen(FORMS, pytest.mark.slow, *CHECKED))
def test_strict_calls_are_valid_where_the_model_begins_one(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    form = FORMS[name]
    assert form.written is not None
    begin = form.written.first + form.written.begin or f"weather{form.written.middle}{{"
    for before in ("",) if form.only_at_begin else ("", "Well, so: "):
        for seed in range(6):
            params = asked(tokenizer, form)
            text, calls = read(form, written(compiler, params, tokenizer, seed, before + begin))
            assert calls
            valid(calls[:1])
            assert text.startswith(before.strip())
            single = asked(tokenizer, form, is_parallel=False)
            text, calls = read(form, written(compiler, single, tokenizer, seed, before + begin))
            assert (text, len(calls)) == (before.strip(), 1)
            valid(calls)


@pytest.mark.parametrize("name", FORMS)
def test_strict_tools_leave_text_free(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    said = written(compiler, asked(tokenizer, FORMS[name]), tokenizer, 1, "I say {} and <this>, ünïcode 🐈")
    assert said.startswith("I say {} and <this>, ünïcode 🐈")


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.signs])
def test_a_mark_that_other_tokens_spell_begins_no_call(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    form = FORMS[name]
    params = asked(tokenizer, form)
    assert params.structured_outputs is not None
    for before in ("", "Well, "):
        for sign in form.signs:
            letters = [token_id for letter in before + sign for token_id in tokenizer.encode_fragment(letter)]
            assert tokenizer.decode_all(letters) == before + sign
            matcher = compiler.compile(params.structured_outputs)
            matcher.copy().take(letters[:-1])
            with pytest.raises(InvalidRequest):
                matcher.take([*letters, *tokenizer.encode_fragment("oh")])


def test_json_that_marks_calls_begins_none_behind_white_space(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    params = asked(tokenizer, call_format.PLAIN_JSON)
    assert params.structured_outputs is not None
    call = '{"name": "weather", "parameters": {}}'
    for space in ("", " ", "\n", "\x1c", "\x1f", "\x85", "\u3000"):
        assert read(call_format.PLAIN_JSON, space + call)[1], "it is a call"
        with pytest.raises(InvalidRequest):
            compiler.compile(params.structured_outputs).take(tokenizer.encode(space + call))
    assert not read(call_format.PLAIN_JSON, f"x {call}")[1]
    compiler.compile(params.structured_outputs).take(tokenizer.encode(f"x {call}"))


def test_a_line_that_marks_calls_begins_none_that_is_not_valid(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    params = asked(tokenizer, call_format.GLM)
    assert params.structured_outputs is not None
    for call in ("weather\n{}", " weather \n {}", "\nnow\t\n\n{"):
        with pytest.raises(InvalidRequest):
            compiler.compile(params.structured_outputs).take(tokenizer.encode(call))
    for text in ("the weather\n{}", "weather {}", "weathers\n{}", "weather\n[]", "[1]", "{}", " x", "<b>", "now"):
        assert not read(call_format.GLM, text)[1]
        compiler.compile(params.structured_outputs).take(tokenizer.encode(text))


TEXT = Tool(name="say", parameters={"properties": {"text": {"type": "string"}, "list": {"type": "array"}}}, strict=True)


@pytest.mark.parametrize(
    "text", ["", "\n", "  two\n\n ", "<b></function> x", "</tool_call>", "<parameter=text>\n", "</parameter"]
)
def test_a_text_in_a_tag_is_what_the_model_writes(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    params = asked(tokenizer, call_format.QWEN_XML, (TEXT,), use=ToolUse.REQUIRED)
    assert params.structured_outputs is not None
    marks = '["</parameter>\\n", "</function></tool_call>"]'
    raw = (
        f"<tool_call>\n<function=say>\n<parameter=text>\n{text}\n</parameter>\n<parameter=list>\n{marks}\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    compiler.compile(params.structured_outputs).take(tokenizer.encode(raw))
    calls = Calls(call_format.QWEN_XML, {"say": TEXT}, CallIds("r", 0, 29))
    parts = [calls.push(raw), calls.flush()]
    (call,) = joined_calls(call for part in parts for call in part.calls)
    assert json.loads(call.arguments) == {"text": text, "list": json.loads(marks)}
    assert "".join(part.text for part in parts) == ""


@pytest.mark.parametrize(
    "end", ["</parameter>", "</function></tool_call>", "</function>\n</tool_call>", "</function> \x1c</tool_call>"]
)
def test_a_text_in_a_tag_holds_no_end_of_it(compiler: GrammarCompiler, tokenizer: Tokenizer, end: str) -> None:
    params = asked(tokenizer, call_format.QWEN_XML, (TEXT, Tool(name="any")), use=ToolUse.REQUIRED)
    assert params.structured_outputs is not None
    for name in ("say", "any"):
        matcher = compiler.compile(params.structured_outputs)
        begin = f"<tool_call>\n<function={name}>\n<parameter=text>\nso "
        matcher.copy().take(tokenizer.encode(f"{begin}\n</parameter>\n</function>\n</tool_call>"))
        letters = [token_id for letter in begin + end for token_id in tokenizer.encode_fragment(letter)]
        matcher.copy().take(letters[:-1])
        with pytest.raises(InvalidRequest):
            matcher.take(letters)


def test_marks_in_content_that_has_a_structure_are_text(tokenizer: Tokenizer) -> None:
    chat = Chat(messages=(ChatMessage(role="user", content="Hi"),), tools=TOOLS)
    call = "<tool_call><function=now></function></tool_call>"
    for raw, calls in ((f'{{"a": "{call}"}}', {True: 0, False: 1}), (f"\n{call}\n{call}", {True: 2, False: 2})):
        for is_structured, num_calls in calls.items():
            params = SamplingParams(structured_outputs=StructuredOutputs(json_object=True) if is_structured else None)
            plan = AnswerFormat(calls=call_format.QWEN_XML).plan(chat, (), tokenizer, params)
            assert plan is not None
            channels = plan.channels("r", 0)
            deltas = [*map(channels.push, raw), channels.flush()]
            assert len(joined_calls(call for delta in deltas for call in delta.calls)) == num_calls
            assert "".join(delta.text for delta in deltas) == (raw if not num_calls else raw.replace(call, "").strip())


def test_only_what_no_grammar_enforces_is_read_in_another_form(tokenizer: Tokenizer) -> None:
    free, strict = (Tool(name="weather", parameters=CITY),), TOOLS
    bare = '{"name": "weather", "arguments": {"city": "a"}}'
    content = {"structured_outputs": StructuredOutputs(json_object=True)}
    for tools, choice, params, is_call in (
        (free, ToolChoice(), {}, True),
        (free, ToolChoice(), {"thinking_budget": 3}, True),
        (strict, ToolChoice(), {}, False),
        (free, ToolChoice(is_parallel=False), {}, False),
        (free, ToolChoice(), content, False),
    ):
        chat = Chat(messages=(ChatMessage(role="user", content="Hi"),), tools=tools, tool_choice=choice)
        plan = AnswerFormat(calls=call_format.HERMES).plan(chat, (), tokenizer, SamplingParams(**params))
        assert plan is not None
        channels = plan.channels("r", 0)
        deltas = [*map(channels.push, f"So.\n{bare}"), channels.flush()]
        calls = joined_calls(call for delta in deltas for call in delta.calls)
        assert [call.arguments for call in calls] == ['{"city": "a"}'] * is_call
        assert "".join(delta.text for delta in deltas) == ("So." if is_call else f"So.\n{bare}")


def test_content_may_have_a_schema_where_no_call_comes(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    closed = {**CITY, "additionalProperties": False}
    params = asked(
        tokenizer, call_format.HERMES, params={"structured_outputs": StructuredOutputs(json=json.dumps(closed))}
    )
    for seed, begin in enumerate(["<", "{"] * 3):
        text, calls = read(call_format.HERMES, written(compiler, params, tokenizer, seed, begin))
        assert bool(calls) == (begin == "<")
        valid(calls)
        if not calls:
            jsonschema.validate(json.loads(text), closed)
    params = asked(tokenizer, call_format.HERMES, params={"structured_outputs": StructuredOutputs(json_object=True)})
    assert params.structured_outputs is not None
    compiler.compile(params.structured_outputs).take(tokenizer.encode('{"a": [1]}'))
    for bad in ("7", "{", "[" * 100_000, '{"items":' * 400 + "{}" + "}" * 400):
        with pytest.raises(InvalidRequest):
            asked(tokenizer, call_format.HERMES, params={"structured_outputs": StructuredOutputs(json=bad)})


def test_no_call_is_begun_where_none_may_be(tokenizer: Tokenizer) -> None:
    params = asked(tokenizer, call_format.DEEPSEEK, use=ToolUse.NONE, params={"bad_words": ("oh",)})
    assert params.bad_words == ("oh", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    assert asked(tokenizer, call_format.PLAIN_JSON, use=ToolUse.NONE) == SamplingParams()


def test_what_needs_no_grammar_has_none(tokenizer: Tokenizer) -> None:
    free = (Tool(name="f", parameters=CITY),)
    assert asked(tokenizer, call_format.HERMES, free) == SamplingParams()
    assert asked(tokenizer, None, free) == SamplingParams()
    assert asked(tokenizer, call_format.HERMES, ()) == SamplingParams()
    assert with_tool_choice(SamplingParams(), Text("x"), call_format.HERMES, tokenizer) == SamplingParams()
    assert asked(tokenizer, call_format.HERMES, free, is_parallel=False).structured_outputs is not None


def test_what_cannot_be_forced_is_refused(tokenizer: Tokenizer) -> None:
    for form in (
        None,
        call_format.form_of({"open_pattern": "<c>+", "content": "json", "transform": {"function": "{content}"}}),
    ):
        with pytest.raises(InvalidRequest, match="the tool-call format of this model is unknown"):
            asked(tokenizer, form, use=ToolUse.REQUIRED)
    with pytest.raises(InvalidRequest, match="not with another structure"):
        asked(tokenizer, call_format.HERMES, params={"structured_outputs": StructuredOutputs(regex="a")})
    pattern = (Tool(name="f", parameters={"properties": {"a": {"type": "string", "pattern": "a+"}}}, strict=True),)
    with pytest.raises(InvalidRequest, match=r"^tools\[0\]\.function\.parameters\.properties\.a: pattern cannot"):
        asked(tokenizer, call_format.QWEN_XML, pattern)
    name = (Tool(name="f", parameters={"properties": {"a>b": {"type": "null"}}}, strict=True),)
    with pytest.raises(InvalidRequest, match="the name of an argument cannot be 'a>b'"):
        asked(tokenizer, call_format.QWEN_XML, name)
    union = (Tool(name="f", parameters={"properties": {"a": {"anyOf": [{"type": "string"}]}}}, strict=True),)
    with pytest.raises(InvalidRequest, match=r"properties\.a: anyOf cannot be enforced"):
        asked(tokenizer, call_format.QWEN_XML, union)
    length = (Tool(name="f", parameters={"properties": {"a": {"type": "string", "maxLength": "9}/"}}}, strict=True),)
    with pytest.raises(InvalidRequest, match=r"properties\.a: minLength cannot be enforced"):
        asked(tokenizer, call_format.QWEN_XML, length)
    zero = (
        Tool(
            name="f", parameters={"properties": {"a": {"type": "string", "minLength": 1, "maxLength": 0}}}, strict=True
        ),
    )
    with pytest.raises(InvalidRequest, match=r"properties\.a: minLength cannot be enforced"):
        asked(tokenizer, call_format.QWEN_XML, zero)
    unnamed = (Tool(name="f", parameters={"properties": {"": {"type": "null"}}}, strict=True),)
    with pytest.raises(InvalidRequest, match="the name of an argument cannot be ''"):
        asked(tokenizer, call_format.QWEN_XML, unnamed)
    long = "n" * 65
    for cut, properties, said in (
        (long[:64], {long: {"anyOf": [{"type": "string"}]}}, "anyOf cannot be enforced"),
        (">" + long[:63], {">" + long: {"type": "null"}}, "rename it"),
    ):
        tools = (Tool(name="f", parameters={"properties": properties}, strict=True),)
        with pytest.raises(InvalidRequest, match=said) as refused:
            asked(tokenizer, call_format.QWEN_XML, tools)
        assert cut in str(refused.value), "no more of it is repeated"
        assert cut + "n" not in str(refused.value)
    large = tuple(Tool(name=f"t{i}", parameters={"description": "x" * 2000}) for i in range(100))
    with pytest.raises(InvalidRequest, match="the grammar for forced or strict calls"):
        asked(tokenizer, call_format.HERMES, large, use=ToolUse.REQUIRED)


def test_what_is_not_required_may_be_left_out(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    tag = "<parameter={}>\n{}\n</parameter>\n".format
    params = asked(tokenizer, call_format.QWEN_XML, use=ToolUse.REQUIRED, name="weather")
    assert params.structured_outputs is not None
    matcher = compiler.compile(params.structured_outputs)
    begin = "<tool_call>\n<function=weather>\n"
    matcher.copy().take(tokenizer.encode(f"{begin}{tag('city', 'a')}{tag('days', 3)}{tag('unit', 'C')}</function>"))
    matcher.copy().take(tokenizer.encode(f"{begin}{tag('city', 'a')}{tag('unit', 'F°')}</function>"))
    for wrong in (f"{tag('unit', 'C')}", f"{tag('city', 'a')}{tag('unit', 'K')}", f"{tag('city', 'a')}</function>"):
        with pytest.raises(InvalidRequest):
            matcher.copy().take(tokenizer.encode(begin + wrong))


@pytest.mark.parametrize(
    ("schema", "good", "keyword"),
    [
        ({"type": "string", "pattern": "^a", "maxLength": 3}, "b", "pattern"),
        ({"type": "string", "format": "date"}, "today", "format"),
        ({"type": "string", "format": "path"}, "/a", ""),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "anyOf"),
        ({"$ref": "#/$defs/s"}, "a", "$ref"),
        ({"enum": [1, "a"]}, "1", "enum"),
        ({"type": "string", "enum": ["<a>"]}, "<a>", "enum"),
        ({"type": "string", "enum": ["a", "b"], "maxLength": 1}, "b", "maxLength"),
        ({"type": "array", "uniqueItems": True, "items": {"type": "integer"}}, "[1]", "uniqueItems"),
        (True, "a", "a schema without type"),
    ],
)
def test_a_tag_of_a_tool_that_is_not_strict_keeps_what_can_be_kept(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: Any, good: str, keyword: str
) -> None:
    parameters = {"properties": {"a": schema}, "required": ["a"], "$defs": {"s": {"type": "string"}}}
    tools = (Tool(name="f", parameters=parameters),)
    params = asked(tokenizer, call_format.QWEN_XML, tools, use=ToolUse.REQUIRED)
    assert params.structured_outputs is not None
    known = loosened(params.structured_outputs, compiler.check(params.structured_outputs))
    begin = "<tool_call>\n<function=f>\n"
    compiler.compile(known).take(
        tokenizer.encode(f"{begin}<parameter=a>\n{good}\n</parameter>\n</function>\n</tool_call>")
    )
    with pytest.raises(InvalidRequest):
        compiler.compile(known).take(tokenizer.encode(f"{begin}</function>"))
    if keyword:
        strict = (Tool(name="f", parameters=parameters, strict=True),)
        named = rf"parameters\.properties\.a: {re.escape(keyword)} cannot be enforced"
        with pytest.raises(InvalidRequest, match=named):
            compiler.check(asked(tokenizer, call_format.QWEN_XML, strict).structured_outputs or known)


@pytest.mark.parametrize(
    ("more", "keyword"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"minProperties": 1}, "minProperties"),
        ({"maxProperties": 0}, "maxProperties"),
        ({"required": ["b"]}, "required"),
        ({"patternProperties": {"^b": {}}}, "patternProperties"),
    ],
)
def test_what_tags_do_not_keep_of_strict_arguments_is_refused(
    tokenizer: Tokenizer, more: dict[str, Any], keyword: str
) -> None:
    tools = (Tool(name="f", parameters={"properties": {"a": {"type": "integer"}}, **more}, strict=True),)
    with pytest.raises(InvalidRequest, match=rf"^tools\[0\]\.function\.parameters: {keyword} cannot be enforced"):
        asked(tokenizer, call_format.QWEN_XML, tools, use=ToolUse.REQUIRED)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_forced_call_that_is_cut_off_leaves_no_text(
    compiler: GrammarCompiler, tokenizer: Tokenizer, form: CallForm
) -> None:
    chosen = ToolChoice(use=ToolUse.REQUIRED)
    chat = Chat(messages=(ChatMessage(role="user", content="Hi"),), tools=TOOLS, tool_choice=chosen)
    params = with_tool_choice(SamplingParams(), chat, form, tokenizer)
    token_ids = tokenizer.encode(written(compiler, params, tokenizer, 1), parse_special=True)
    plan = AnswerFormat(calls=form, shown_ids=tokenizer.special_ids).plan(chat, (), tokenizer, params)
    assert plan is not None
    num_calls = []
    for cut in range(len(token_ids) + 1):
        channels = plan.channels("r", 0)
        pieces = [channels.push(tokenizer.decode_all([token_id])) for token_id in token_ids[:cut]]
        pieces.append(channels.flush())
        assert "".join(piece.text for piece in pieces) == ""
        num_calls.append(len(joined_calls([call for piece in pieces for call in piece.calls])))
    assert num_calls == sorted(num_calls)
    assert num_calls[-1] > 0


def test_a_tag_may_refer_to_a_definition_of_its_tool(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {
        "$defs": {"n": {"type": "integer"}},
        "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
        "required": ["a"],
    }
    tools = (Tool(name="f", parameters=schema, strict=True),)
    params = asked(tokenizer, call_format.QWEN_XML, tools, use=ToolUse.REQUIRED)
    assert params.structured_outputs is not None
    begin = "<tool_call>\n<function=f>\n<parameter=a>\n"
    matcher = compiler.compile(params.structured_outputs)
    matcher.copy().take(tokenizer.encode(f"{begin}[17]\n</parameter>\n</function>\n</tool_call>"))
    with pytest.raises(InvalidRequest):
        matcher.take(tokenizer.encode(f"{begin}[x"))


def test_arguments_of_any_kind_come_as_tags(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    free = (Tool(name="now"),)
    for seed in range(4):
        params = asked(tokenizer, call_format.QWEN_XML, free, use=ToolUse.REQUIRED, name="now")
        text, calls = read(call_format.QWEN_XML, written(compiler, params, tokenizer, seed))
        assert calls[0].name == "now"
        assert text == ""
        json.loads(calls[0].arguments)


@pytest.mark.parametrize(
    ("more", "is_strict", "takes_others"),
    [
        ({}, False, False),
        ({"description": "d", "title": "t", "$defs": {}}, False, False),
        ({"additionalProperties": True}, False, True),
        ({"anyOf": [{"required": ["b"]}]}, False, True),
        ({"required": ["b"]}, False, True),
        ({"minProperties": 1}, True, False),
    ],
)
def test_a_forced_call_has_declared_arguments_alone_where_that_is_sure_to_fit(
    compiler: GrammarCompiler, tokenizer: Tokenizer, more: dict[str, Any], is_strict: bool, takes_others: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, **more}
    tools = (Tool(name="f", parameters=schema, strict=is_strict),)
    params = asked(tokenizer, FORMS["hermes"], tools, use=ToolUse.REQUIRED)
    assert params.structured_outputs is not None
    matcher = compiler.compile(params.structured_outputs)
    text = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b'
    if takes_others:
        matcher.take(tokenizer.encode(text))
    else:
        with pytest.raises(InvalidRequest):
            matcher.take(tokenizer.encode(text))

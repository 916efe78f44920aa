"""The structure that a client asks of an answer, before anybody compiles it."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.grammar import GrammarCompiler
from baton.json_schema import MAX_EDITS, plain
from baton.nesting import MAX_LEVELS
from baton.sampling import MAX_REASONING_END, SamplingParams
from baton.structure import (
    LARK_HEAD,
    MAX_GRAMMAR_BYTES,
    MAX_REGEX_BYTES,
    MAX_STRUCTURE_CHOICES,
    StructuredOutputs,
    json_rule,
    loosened,
)


@pytest.fixture(scope="module")
def compiler(model_dir: Path) -> GrammarCompiler:
    return GrammarCompiler(model_dir / "tokenizer.json", 49152, (2,))


def nested(levels: int) -> str:
    return '{"items":' * (levels - 1) + "{}" + "}" * (levels - 1)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({}, "has nothing set; set one of"),
        ({"regex": "a", "json_object": True}, "has json_object and regex set; set one of"),
        ({"choice": ("a", "")}, "lists an empty choice"),
        ({"choice": ("a",) * (MAX_STRUCTURE_CHOICES + 1)}, "lists 1025 choices; list at most 1024"),
        ({"choice": ("ä" * MAX_GRAMMAR_BYTES,)}, "has 262144 bytes in choice; it may have at most 131072"),
        ({"regex": "a" * (MAX_REGEX_BYTES + 1)}, "has 4097 bytes in regex; it may have at most 4096"),
        ({"json": " " * (MAX_GRAMMAR_BYTES + 1)}, "has 131073 bytes in json; it may have at most 131072"),
        ({"grammar": "a" * (MAX_GRAMMAR_BYTES + 1)}, "has 131073 bytes in grammar"),
        ({"regex": "\ud800"}, "has regex that is not valid Unicode"),
        ({"choice": ("a", "\udfff")}, "has choice that is not valid Unicode"),
    ],
)
def test_what_is_no_structure_is_refused(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling\.structured_outputs ") as refusal:
        StructuredOutputs(**asked)
    assert sentence in str(refusal.value)
    assert refusal.value.param == "structured_outputs"


def test_the_largest_are_structures() -> None:
    largest: list[dict[str, Any]] = [
        {"choice": ("a",) * MAX_STRUCTURE_CHOICES},
        {"regex": "a" * MAX_REGEX_BYTES},
        {"json": " " * MAX_GRAMMAR_BYTES},
        {"grammar": "a" * MAX_GRAMMAR_BYTES},
    ]
    for asked in largest:
        StructuredOutputs(**asked)


@pytest.mark.parametrize(
    ("structure", "sentence"),
    [
        (StructuredOutputs(json="{"), "the schema is not JSON, or too deep"),
        (StructuredOutputs(json="[" * 20_000), "the schema is not JSON, or too deep"),
        (StructuredOutputs(json="[]"), "a schema must be an object, or true"),
        (StructuredOutputs(json="false"), "a schema must be an object, or true"),
        (StructuredOutputs(json=nested(MAX_LEVELS + 1)), "the schema is nested deeper than 64 levels"),
        (StructuredOutputs(json=json.dumps({"const": "\ud800"})), "cannot be served"),
        (StructuredOutputs(regex="("), "regex parse error"),
        (StructuredOutputs(regex="(" * 2000 + ")" * 2000), "cannot be served"),
        (StructuredOutputs(grammar="start: ("), "cannot be served"),
        (StructuredOutputs(grammar="nothing"), "cannot be served"),
        (StructuredOutputs(grammar="root ::= ("), "cannot be served"),
        (StructuredOutputs(grammar="start: " + "(" * 20_000 + ")" * 20_000), "brackets deeper than 64 levels"),
        (StructuredOutputs(grammar="root ::= " + "(" * 20_000 + ")" * 20_000), "brackets deeper than 64 levels"),
        (StructuredOutputs(grammar="start: missing"), "missing"),
        (StructuredOutputs(json='{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'), "NoExtension"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_a_sentence(
    compiler: GrammarCompiler, structure: StructuredOutputs, sentence: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling\.structured_outputs cannot be served: ") as refusal:
        compiler.compile(structure)
    assert sentence in str(refusal.value)
    assert len(str(refusal.value)) < 1100


SCORE = {"type": "object", "properties": {"score": {"type": "integer"}}, "additionalProperties": False}


def ref_to(name: str) -> dict[str, str]:
    return {"$ref": f"#/$defs/{name}"}


def optional(number: int, prefix: str = "") -> dict[str, Any]:
    """An object of so many members, none of which is required."""
    return {"type": "object", "properties": {f"{prefix}p{i}": {"type": "integer"} for i in range(number)}}


LOOP = {"loop": {"$ref": "#/$defs/other"}, "other": {"$ref": "#/$defs/loop"}}


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({**SCORE, "patternProperties": {"^score$": {"type": "integer"}}}, "schema: patternProperties"),
        ({"items": {**SCORE, "patternProperties": {"^s(core)$": {}}}}, "schema.items: patternProperties"),
        ({**SCORE, "patternProperties": {"^a$": {}}, "required": ["a"]}, "schema: patternProperties"),
        ({"allOf": [SCORE, {"patternProperties": {"^score$": {}}}]}, "schema: patternProperties"),
        (
            {"$ref": "#/$defs/s", "$defs": {"s": {**SCORE, "patternProperties": {"^score$": {}}}}},
            "schema.$defs.s: patternProperties",
        ),
        ({"properties": {"a": {"$ref": "#/$defs/loop"}}, "$defs": LOOP}, "schema.$defs.other: $ref"),
        ({"properties": {"a": {"$ref": "#x"}}, "$defs": {"x": {"$anchor": "x", "$ref": "#x"}}}, "schema.$defs.x: $ref"),
        ({"properties": {"a b": {"items": [{"not": {}}]}}}, 'schema.properties["a b"].items[0]: not'),
        ({"$defs": {"n": {"uniqueItems": True}}, "items": {"$ref": "#/$defs/n"}}, "schema.$defs.n: uniqueItems"),
        ({"type": "object", "properties": {"a": {"enum": [], "title": "t"}}, "required": ["a"]}, ".a: enum"),
        (
            {"properties": {"a": ref_to("A")}, "$defs": {"A": {"allOf": [ref_to("B")]}, "B": {"allOf": [ref_to("A")]}}},
            "schema.$defs.B.allOf[0]: $ref",
        ),
        ({"properties": {"a": ref_to("A")}, "$defs": {"A": {"anyOf": [ref_to("A")]}}}, "schema.$defs.A.anyOf[0]: $ref"),
        ({"properties": {"a": optional(300)}}, "schema.properties.a: properties"),
        ({"items": {"anyOf": [optional(8, f"{i}_") for i in range(40)]}}, "schema.items: anyOf"),
        ({"properties": {"a": {"enum": [1, 1234567890123456789]}}}, "schema.properties.a: enum"),
        ({"properties": {"a": {"const": {"b": [2**53 + 1]}}}}, "schema.properties.a: const"),
        (
            {"properties": {"a": {"$id": "https://e.org/a.json", "type": "string", "pattern": "^(?!x)"}}},
            "schema.properties.a: pattern",
        ),
        ({"x-guidance": {"lenient": True}, "properties": {"a": {"not": {}}}}, "schema.properties.a: not"),
    ],
)
def test_a_schema_with_which_an_answer_would_come_to_nothing_is_refused_by_its_keyword(
    compiler: GrammarCompiler, schema: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        compiler.check(StructuredOutputs(json=json.dumps(schema)))
    assert f"{sentence} cannot be enforced" in str(refusal.value)
    assert refusal.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "schema",
    [
        {**SCORE, "patternProperties": {"^sc": {"type": "integer"}}},
        {**SCORE, "patternProperties": {"^score$": {}}, "additionalProperties": True},
        {"properties": {"a": {"$ref": "#"}}},
        {"properties": {"patternProperties": {"type": "null"}, "$ref": {"type": "null"}}},
        {"enum": [{"uniqueItems": True, "format": "no"}]},
        {"properties": {"a": ref_to("A")}, "$defs": {"A": {"anyOf": [ref_to("A"), {"type": "null"}]}}},
        {"$defs": {"unused": ref_to("unused"), "away": {"$ref": "https://e.org/x"}}, "type": "object"},
        {"$id": "#foo", "type": "object", "properties": {"a": {"$id": "https://e.org/a", "type": "null"}}},
        {"properties": {"a": optional(200)}},
        {"properties": {"$id": {"$id": "https://e.org/a", "enum": [2**53, 1e30, True]}}},
    ],
)
def test_schemas_that_look_like_those_are_served(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    assert compiler.check(StructuredOutputs(json=json.dumps(schema))) == []


@pytest.mark.parametrize(
    ("schema", "left_out"),
    [
        ({"x-loose": True, "properties": {"a": {"maximum": 9, "not": {}}}}, None),
        ({"x-place": "elsewhere", "properties": {"a": {"not": {}}}}, None),
        ({"properties": {"a": {"$id": "https://e.org/a", "pattern": "(?=a)"}}}, ("properties", "a", "pattern")),
        ({"properties": {"a": optional(300)}}, ("properties", "a", "properties")),
        (
            {"properties": {"a": ref_to("A")}, "$defs": {"A": {"allOf": [ref_to("A")]}}},
            ("$defs", "A", "allOf", 0, "$ref"),
        ),
    ],
)
def test_the_tool_says_whether_a_schema_is_loose_and_not_the_schema(
    compiler: GrammarCompiler, schema: dict[str, Any], left_out: tuple[str | int, ...] | None
) -> None:
    def structure(*, is_loose: bool) -> StructuredOutputs:
        return StructuredOutputs(grammar=f"{LARK_HEAD}\nstart: {json_rule(schema, 'tools[0]', is_loose=is_loose)}")

    with pytest.raises(InvalidRequest, match=r"^tools\[0\][^ ]*: .* cannot be enforced"):
        compiler.check(structure(is_loose=False))
    if left_out is not None:
        assert compiler.check(structure(is_loose=True)) == [(0, left_out)]


def test_many_references_are_looked_up_once() -> None:
    """The router does it on its event loop. One look for each of these took twenty seconds."""
    before_s = time.process_time()
    plain({"$defs": {"x": {}}, "anyOf": [{"$ref": "#x"} for _ in range(3000)]})
    assert time.process_time() - before_s < 5


def test_what_is_left_out_of_a_loose_schema_is_short(compiler: GrammarCompiler) -> None:
    odd = {"type": "string", "pattern": "(?=a)"}
    for properties, left_out in (
        ({"a": odd, "b": {}}, [(0, ("properties", "a", "pattern"))]),
        ({f"a{i}": odd for i in range(2 * MAX_EDITS)}, [(0, ())]),
        ({f"{i}{'a' * 1500}": odd for i in range(3)}, [(0, ())]),
    ):
        structure = StructuredOutputs(
            grammar=f"{LARK_HEAD}\nstart: {json_rule({'properties': properties}, 'tools[0]', is_loose=True)}"
        )
        found = compiler.check(structure)
        assert found[-1:] == left_out
        compiler.compile(loosened(structure, found)).take([])


def test_true_is_a_schema_and_so_is_the_deepest(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredOutputs(json="true"))
    compiler.compile(StructuredOutputs(json=nested(MAX_LEVELS)))
    compiler.compile(StructuredOutputs(grammar='start: "' + "(" * 200 + '" /[(]/' + ' ("a")' * 100))


def test_every_field_is_a_structure_of_its_own(compiler: GrammarCompiler) -> None:
    names = [field.name for field in dataclasses.fields(StructuredOutputs)]
    values: list[Any] = ["{}", True, "a", ("a",), 'start: "a"']
    for name, value in zip(names, values, strict=True):
        compiler.compile(StructuredOutputs(**{name: value}))


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"reasoning_begin_id": 3}, "reasoning_begin_id"),
        ({"thinking_budget": -1, "reasoning_end_ids": (1,)}, "thinking_budget"),
        ({"thinking_budget": 2**31, "reasoning_end_ids": (1,)}, "thinking_budget"),
        ({"reasoning_end_ids": (1,) * (MAX_REASONING_END + 1)}, "reasoning_end_ids"),
        ({"structured_outputs": StructuredOutputs(json_object=True), "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_contradictions_are_refused(asked: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**asked)
    assert refusal.value.param == param

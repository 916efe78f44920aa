"""The structure that a client asks of an answer, before anybody compiles it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequest
from baton.grammar import GrammarCompiler
from baton.nesting import MAX_LEVELS
from baton.sampling import MAX_REASONING_END, SamplingParams
from baton.structure import MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, MAX_STRUCTURE_CHOICES, StructuredOutputs


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

"""Structured outputs that a client requests: JSON, a schema, a regular expression, choices or a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from baton.errors import InvalidRequest
from baton.json_schema import OF_GRAMMAR, Path, without

MAX_GRAMMAR_BYTES = 128 * 1024
"""Limit in UTF-8 bytes of a schema or grammar, and of all choices together."""
MAX_REGEX_BYTES = 4 * 1024
MAX_STRUCTURE_CHOICES = 1024
COMPILE_S = 1.0
"""Processor seconds after which a structure is too costly."""
_CANNOT = "sampling.structured_outputs cannot be served: "
LARK_HEAD = "%llguidance {}"
"""A grammar that starts with this is in Lark's notation, whatever its literals contain."""
MAX_WHITESPACE = 20
"""Maximum white space between two tokens of JSON: enough to indent, and it stops a model from padding forever."""
JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{MAX_WHITESPACE}}}",
    "lenient": False,  # unknown keywords would be left out
    "coerce_one_of": False,  # a value might match two of them
}
"""Options of llguidance for JSON. They replace a schema's own `x-guidance`."""
LOOSE_OPTIONS = JSON_OPTIONS | {"coerce_one_of": True}
"""Options for a schema that is enforced as far as possible."""
PLACE, LOOSE, _ = OF_GRAMMAR
"""Keywords of a schema within a grammar: its position in the request, and permission to leave keywords out."""
_AFTER_COMPLAINT = re.compile(r"\n(?:<state>|\s*while processing )")
_JSON_RULE = "%json "


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """Structure of every output. One field is set; the names are vLLM's. Constructing it checks the sizes.

    Raises:
        InvalidRequest: none or several are set, or one is too large.
    """

    json: str = ""
    """A JSON schema, as JSON."""
    json_object: bool = False
    """Any JSON object."""
    regex: str = ""
    choice: tuple[str, ...] = ()
    """The output is one of these texts."""
    grammar: str = ""
    """A context-free grammar, in Lark's notation or llama.cpp's GBNF."""

    def __post_init__(self) -> None:
        asked = [field.name for field in fields(self) if getattr(self, field.name)]
        if len(asked) != 1:
            raise _invalid(f"has {' and '.join(asked) or 'nothing'} set; set one of json, json_object, regex, choice "
                           "and grammar")  # fmt: skip
        if len(self.choice) > MAX_STRUCTURE_CHOICES:
            raise _invalid(f"lists {len(self.choice)} choices; list at most {MAX_STRUCTURE_CHOICES}")
        if not all(self.choice):
            raise _invalid("lists an empty choice; every choice must be a text of at least one character")
        limit = MAX_REGEX_BYTES if self.regex else MAX_GRAMMAR_BYTES
        texts = (self.json, self.regex, self.grammar, *self.choice)
        try:
            size = sum(len(text.encode()) for text in texts)
        except UnicodeEncodeError as error:
            raise _invalid(f"has {asked[0]} that is not valid Unicode: {error.reason}") from error
        if size > limit:
            raise _invalid(f"has {size} bytes in {asked[0]}; it may have at most {limit}")


class PlacedSchema(NamedTuple):
    """A schema of a structure."""

    schema: Mapping[str, Any]
    place: str
    """Field of the request that has it, such as tools[0].function.parameters."""
    is_loose: bool
    """True if parts that cannot be enforced are left out; otherwise the schema is rejected."""
    begin: int
    """Start position of the schema in the grammar."""
    end: int


def schemas_of(structure: StructuredOutputs) -> list[PlacedSchema]:
    """Return the readable schemas of a structure: its JSON schema, or the schemas in its grammar."""
    if structure.json:
        schema = _read(structure.json, 0)
        return [PlacedSchema(schema[0], "schema", False, 0, 0)] if schema else []
    return list(_schemas_in(structure.grammar)) if structure.grammar.startswith(LARK_HEAD) else []


def _schemas_in(grammar: str) -> Iterator[PlacedSchema]:
    begin = 0
    while (begin := grammar.find(_JSON_RULE, begin)) >= 0:
        begin += len(_JSON_RULE)
        if (found := _read(grammar, begin)) is not None:
            schema, end = found
            yield PlacedSchema(schema, str(schema.get(PLACE, "schema")), bool(schema.get(LOOSE)), begin, end)
            begin = end


def _read(text: str, begin: int) -> tuple[Mapping[str, Any], int] | None:
    try:
        schema, end = json.JSONDecoder().raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None
    return (schema, end) if isinstance(schema, dict) else None


def json_rule(schema: Any, place: str, *, is_loose: bool = False) -> str:
    """Return the rule for a schema in a grammar of llguidance's dialect of Lark.

    Args:
        place, is_loose: see `PlacedSchema`.
    """
    marks = {LOOSE: True} if is_loose else {}
    options = LOOSE_OPTIONS if is_loose else JSON_OPTIONS
    said = {"allOf": [schema]} if isinstance(schema, bool) else schema
    said = {key: value for key, value in said.items() if key not in OF_GRAMMAR}
    return _JSON_RULE + json.dumps({**said, PLACE: place, **marks, "x-guidance": options}, ensure_ascii=False)


def loosened(structure: StructuredOutputs, left_out: Sequence[tuple[int, Path]]) -> StructuredOutputs:
    """Return a grammar without keywords of its schemas.

    Args:
        left_out: for each keyword, the index of its schema and its path there; an empty path leaves out the whole
            schema.
    """
    if not left_out:
        return structure
    placed = schemas_of(structure)
    schemas = [each.schema for each in placed]
    for index, path in left_out:
        schemas[index] = without(schemas[index], path)
    pieces, done = list[str](), 0
    for each, schema in zip(placed, schemas, strict=True):
        pieces += [structure.grammar[done : each.begin], json.dumps(schema, ensure_ascii=False)]
        done = each.end
    return replace(structure, grammar="".join([*pieces, structure.grammar[done:]]))


def refused_structure(problem: str) -> InvalidRequest:
    """Return the error for a problem that a compiler has found; `param` names the responsible part of the request."""
    place, separator, _ = problem.partition(": ")
    is_of_tool = bool(separator) and place.startswith("tools[")
    return InvalidRequest(problem, place if is_of_tool else "structured_outputs")


def invalid_structure(problem: str) -> InvalidRequest:
    """Return the error for a structure that cannot be compiled.

    Args:
        problem: the compiler's message.
    """
    told = problem.removesuffix("<non-verbose/>").strip()
    return InvalidRequest(f"{_CANNOT}{told[:1000]}", "structured_outputs")


def complaint_in(error: InvalidRequest) -> str:
    """Return the compiler's message in an error of `invalid_structure`, without its state and its paths."""
    return _AFTER_COMPLAINT.split(str(error).removeprefix(_CANNOT))[0]


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(f"sampling.structured_outputs {problem}.", "structured_outputs")

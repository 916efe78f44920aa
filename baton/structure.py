"""The structure that a client asks of an answer: JSON, a schema, a regular expression, choices or a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from baton.errors import InvalidRequest
from baton.json_schema import OF_GRAMMAR, Path, without

MAX_GRAMMAR_BYTES = 128 * 1024
"""Longest schema or grammar, and most of all choices together, in UTF-8."""
MAX_REGEX_BYTES = 4 * 1024
MAX_STRUCTURE_CHOICES = 1024
COMPILE_S = 1.0
"""Seconds of the processor's time after which a structure is too costly."""
_CANNOT = "sampling.structured_outputs cannot be served: "
LARK_HEAD = "%llguidance {}"
"""A grammar that begins with this is in Lark's notation, whatever is in its texts."""
MAX_WHITESPACE = 20
"""Characters of white space between two tokens of JSON: enough to indent, and no model goes on for ever."""
JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{MAX_WHITESPACE}}}",
    "lenient": False,  # what is not known would be left out
    "coerce_one_of": False,  # an answer might be two of them
}
"""Options of llguidance for JSON. These stand in place of a schema's own `x-guidance`."""
LOOSE_OPTIONS = JSON_OPTIONS | {"coerce_one_of": True}
"""Options for a schema of which as much is enforced as can be."""
PLACE, LOOSE, _ = OF_GRAMMAR
"""Keywords of a schema within a grammar: where in the request it is, and that what cannot be enforced is left out."""
_AFTER_COMPLAINT = re.compile(r"\n(?:<state>|\s*while processing )")
_JSON_RULE = "%json "


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What every answer must be. One field is set; the names are vLLM's. Constructing it checks the sizes.

    Raises:
        InvalidRequest: none or several are set, or one is too large.
    """

    json: str = ""
    """A JSON schema, as JSON."""
    json_object: bool = False
    """Any JSON object."""
    regex: str = ""
    choice: tuple[str, ...] = ()
    """The answer is one of these texts."""
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
    """The request's field that has it, such as tools[0].function.parameters."""
    is_loose: bool
    """Whether what of it cannot be enforced is left out; else that is refused."""
    begin: int
    """Where in the grammar it begins."""
    end: int


def schemas_of(structure: StructuredOutputs) -> list[PlacedSchema]:
    """Returns the schemas of a structure that can be read: that of its JSON, or those in its grammar."""
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
    """Returns what stands for a schema in a grammar of llguidance's dialect of Lark.

    Args:
        place, is_loose: see `PlacedSchema`.
    """
    marks = {LOOSE: True} if is_loose else {}
    options = LOOSE_OPTIONS if is_loose else JSON_OPTIONS
    said = {"allOf": [schema]} if isinstance(schema, bool) else schema
    said = {key: value for key, value in said.items() if key not in OF_GRAMMAR}
    return _JSON_RULE + json.dumps({**said, PLACE: place, **marks, "x-guidance": options}, ensure_ascii=False)


def loosened(structure: StructuredOutputs, left_out: Sequence[tuple[int, Path]]) -> StructuredOutputs:
    """Returns a grammar without keywords of its schemas.

    Args:
        left_out: for each keyword, which schema has it and its path there; an empty path leaves out the whole schema.
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
    """Returns the error for what a compiler has found; `param` names the part of the request that has it."""
    place, separator, _ = problem.partition(": ")
    is_of_tool = bool(separator) and place.startswith("tools[")
    return InvalidRequest(problem, place if is_of_tool else "structured_outputs")


def invalid_structure(problem: str) -> InvalidRequest:
    """Returns the error for a structure that cannot be compiled.

    Args:
        problem: the compiler's own words.
    """
    told = problem.removesuffix("<non-verbose/>").strip()
    return InvalidRequest(f"{_CANNOT}{told[:1000]}", "structured_outputs")


def complaint_in(error: InvalidRequest) -> str:
    """Returns the compiler's own words in an error of `invalid_structure`, without its state and its own paths."""
    return _AFTER_COMPLAINT.split(str(error).removeprefix(_CANNOT))[0]


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(f"sampling.structured_outputs {problem}.", "structured_outputs")

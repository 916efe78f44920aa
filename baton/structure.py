"""The structure that a client asks of an answer: JSON, a schema, a regular expression, choices or a grammar."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from baton.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 128 * 1024
"""Longest schema or grammar, and most of all choices together, in UTF-8."""
MAX_REGEX_BYTES = 4 * 1024
MAX_STRUCTURE_CHOICES = 1024
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


def invalid_structure(problem: str) -> InvalidRequest:
    """Returns the error for a structure that cannot be compiled.

    Args:
        problem: the compiler's own words.
    """
    told = problem.removesuffix("<non-verbose/>").strip()
    return InvalidRequest(f"sampling.structured_outputs cannot be served: {told[:1000]}", "structured_outputs")


def _invalid(problem: str) -> InvalidRequest:
    return InvalidRequest(f"sampling.structured_outputs {problem}.", "structured_outputs")

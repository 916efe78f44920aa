"""Compiler of structured outputs into grammars over a model's tokens, based on llguidance.

The router compiles first and rejects structures that cannot be served; engines compile the same text again to find the
allowed next tokens. The library either supports a schema's keywords or names the one that it does not support.

As a program, `python -m baton.grammar PARENT TOKENIZER VOCAB_SIZE EOS...`, it is a sandbox (`baton.sandbox`) that
compiles one structure after the other: each is a question, in JSON.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from baton.dead_ends import Compiler, dead_end_of
from baton.errors import InvalidRequest
from baton.json_schema import MAX_EDITS, SEARCH_S, SchemaFault, fault_of, plain, without
from baton.json_schema import Path as SchemaPath
from baton.nesting import MAX_LEVELS, levels
from baton.rust import complaint_of
from baton.sandbox import SandboxLimits, serve
from baton.structure import (
    COMPILE_S,
    JSON_OPTIONS,
    LARK_HEAD,
    LOOSE_OPTIONS,
    PlacedSchema,
    StructuredOutputs,
    complaint_in,
    invalid_structure,
    loosened,
    refused_structure,
    schemas_of,
)

_LIMITS = LLParserLimits(
    max_grammar_size=100_000, max_items_in_row=1000, precompute_large_lexemes=False, verbose_errors=False
)
"""Limit of a parser row.

The library's default is twice as high: there a token delayed its step for a tenth of a second.
"""
_TOO_LONG_ROW = "Current row has"
"""Part of the library's message if a row is too long."""
MAX_LEFT_OUT = 4096
"""Maximum characters of the parts left out of a structure's schemas, as JSON."""
LOAD_S = 30.0
"""Processor seconds in which a compiler process must have read the tokenizer."""
MAX_BYTES = 2 * 2**30
"""Memory limit of a compiler process."""
_BRACKETS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])*/|(?P<open>[(\[{])|(?P<close>[)\]}])')


class GrammarCompiler:
    """Compiler of grammars over one model's vocabulary. Thread-safe. Construction takes up to two seconds.

    Args:
        tokenizer: the model's tokenizer.json.
        vocab_size: number of tokens that a mask covers.
        eos_token_ids: tokens that are allowed only when the structure is complete.

    Raises:
        InvalidRequest: the library cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = sorted(eos_token_ids)
        with _complaints_told():
            self._tokenizer = LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=self._eos_token_ids or None)

    def compile(self, structure: StructuredOutputs) -> GrammarMatcher:
        """Return a matcher at the start of an output, which has already computed the allowed tokens.

        This takes milliseconds, up to seconds for a structure that is made to be costly, or for one without an end.

        Raises:
            InvalidRequest: the structure is invalid, uses unknown features, is too large or allows no output; or the
                model has no end-of-sequence token.
        """
        if not self._eos_token_ids:
            raise invalid_structure("the model has no token that ends an answer")
        with _complaints_told():
            matcher = GrammarMatcher(LLMatcher(self._tokenizer, _source(structure), log_level=0, limits=_LIMITS))
        matcher.allowed()
        return matcher

    def check(self, structure: StructuredOutputs) -> list[tuple[int, SchemaPath]]:
        """Compile a structure, and return the parts that must be left out of its schemas (`loosened`) for that.

        Parts are left out only of a schema that is enforced as far as possible.

        Raises:
            InvalidRequest: the structure cannot be served, as in `compile`, or an output could reach a state without
                continuation; names the responsible keyword of a schema.
        """
        placed = schemas_of(structure)
        left_out = [(i, path) for i, each in enumerate(placed) for path in self._dead_ends(each)]
        try:
            self.compile(loosened(structure, left_out))
        except InvalidRequest:
            for i, each in enumerate(schemas_of(loosened(structure, left_out))):
                left_out += [(i, path) for path in self._faults(each)]
            left_out = _bounded(left_out)
            self.compile(loosened(structure, left_out))
        return left_out

    def _dead_ends(self, placed: PlacedSchema) -> Iterator[SchemaPath]:
        schema = placed.schema
        compiler = Compiler(self._has_key, self._begins)
        while fault := dead_end_of(schema, compiler):
            yield (path := _left_out_of(placed, fault))
            schema = without(schema, path)

    def _faults(self, placed: PlacedSchema) -> Iterator[SchemaPath]:
        """Yield the path of each keyword with which a schema cannot be compiled.

        Raises:
            InvalidRequest: no keyword may be left out.
        """
        schema = plain(placed.schema)
        options = LOOSE_OPTIONS if placed.is_loose else JSON_OPTIONS

        def problem_of(part: Mapping[str, Any]) -> str:
            return self._problem_of(part, options)

        until = time.process_time() + SEARCH_S
        for _ in range(MAX_EDITS):
            fault = fault_of(schema, problem_of)
            if fault is None:
                return
            path = _left_out_of(placed, fault)
            if not path or time.process_time() > until:
                break
            yield path
            schema = without(schema, path)
        yield ()

    def _problem_of(self, schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """Return the library's complaint about a schema; empty: none."""
        try:
            with _complaints_told():
                source = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": options}))
                GrammarMatcher(LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)).allowed()
        except InvalidRequest as error:
            return complaint_in(error)
        return ""

    def _has_key(self, schema: Mapping[str, Any]) -> bool:
        """Return whether an object of a schema may have a member; also True if the schema cannot be compiled."""
        options = {"whitespace_flexible": False}
        with contextlib.suppress(InvalidRequest), _complaints_told():
            source = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": options}))
            matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
            return bool(matcher.is_error()) or matcher.compute_ff_bytes() != b"{}"
        return True

    def _begins(self, schema: Mapping[str, Any]) -> bool:
        """Return whether an object of a schema can start; also True if it allows none, or cannot be compiled."""
        with contextlib.suppress(InvalidRequest), _complaints_told():
            source = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": LOOSE_OPTIONS}))
            matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
            matcher.consume_tokens(self._tokenizer.tokenize_str("{"))
            return _TOO_LONG_ROW not in matcher.get_error()
        return True


class GrammarMatcher:
    """Progress of an output through a grammar.

    Raises:
        InvalidRequest: the library has rejected the grammar. Its methods raise it as well.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._check()

    def copy(self) -> GrammarMatcher:
        """Return another matcher in the same state."""
        with _complaints_told():
            return GrammarMatcher(self._matcher.deep_copy())

    def take(self, token_ids: Sequence[int]) -> None:
        """Advance by the output's next tokens.

        Raises:
            InvalidRequest: the grammar does not allow them, or has become too large.
        """
        with _complaints_told():
            self._matcher.consume_tokens(list(token_ids))
        self._check()

    def allowed(self) -> bytes:
        """Return the allowed next tokens as a bit mask; the lowest bit of the first byte is token 0.

        Raises:
            InvalidRequest: the grammar allows none, or has become too large.
        """
        with _complaints_told():
            bits = self._matcher.compute_bitmask()
        self._check()
        return bits

    def _check(self) -> None:
        if self._matcher.is_error():
            raise invalid_structure(self._matcher.get_error())


def _left_out_of(placed: PlacedSchema, fault: SchemaFault) -> SchemaPath:
    """Return the part of a schema that is left out because of a fault.

    Raises InvalidRequest if none may be left out.
    """
    if not placed.is_loose:
        raise refused_structure(fault.sentence(placed.place))
    return (*fault.path, fault.keyword) if fault.keyword else fault.path


def _bounded(left_out: list[tuple[int, SchemaPath]]) -> list[tuple[int, SchemaPath]]:
    """Return the parts to leave out; whole schemas replace long lists of keywords, because routers store the list."""
    if len(json.dumps(left_out)) <= MAX_LEFT_OUT:
        return left_out
    return [(index, ()) for index in sorted({index for index, _ in left_out})]


@contextlib.contextmanager
def _complaints_told() -> Iterator[None]:
    """Context manager: convert any error of the library to InvalidRequest. Its assertions are not `Exception`s."""
    try:
        yield
    except InvalidRequest:
        raise
    except BaseException as error:
        raise invalid_structure(complaint_of(error)) from error


def _source(structure: StructuredOutputs) -> str:
    """Return the structure in the library's own form."""
    if structure.json or structure.json_object:
        return LLMatcher.grammar_from_json_schema(_schema(structure.json))
    if structure.regex:
        return LLMatcher.grammar_from_regex(structure.regex)
    if structure.choice:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in structure.choice))
    _check_brackets(structure.grammar)
    is_lark = structure.grammar.startswith(LARK_HEAD)
    return LLMatcher.grammar_from_lark(structure.grammar if is_lark else any_to_lark(structure.grammar))


def _schema(text: str) -> str:
    try:
        schema = json.loads(text or '{"type": "object"}')
    except (ValueError, RecursionError) as error:
        raise invalid_structure(f"the schema is not JSON, or too deep: {error}") from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise invalid_structure("a schema must be an object, or true")
    if levels(schema) > MAX_LEVELS:
        raise invalid_structure(f"the schema is nested deeper than {MAX_LEVELS} levels")
    return json.dumps(plain(schema) | {"x-guidance": JSON_OPTIONS})


def _check_brackets(grammar: str) -> None:
    """Raise InvalidRequest for a grammar with too deep brackets, on which the library's parser recurses."""
    level = 0
    for found in _BRACKETS.finditer(grammar):
        level += 1 if found["open"] else -1 if found["close"] else 0
        if level > MAX_LEVELS:
            raise invalid_structure(f"the grammar has brackets deeper than {MAX_LEVELS} levels")


def _serve(parent: str, tokenizer: str, vocab_size: str, *eos_token_ids: str) -> None:
    compiler: GrammarCompiler | None = None

    def load() -> GrammarCompiler:
        nonlocal compiler
        compiler = compiler or GrammarCompiler(Path(tokenizer), int(vocab_size), map(int, eos_token_ids))
        return compiler

    def set_up(_: bytes) -> None:
        with contextlib.suppress(InvalidRequest):  # if this fails, every structure is rejected for it
            load()

    def check(question: bytes) -> bytes:
        asked = json.loads(question)
        left_out = load().check(StructuredOutputs(**asked | {"choice": tuple(asked["choice"])}))
        return json.dumps(left_out).encode() if left_out else b""

    serve(int(parent), SandboxLimits(set_up_s=LOAD_S, cpu_s=COMPILE_S, memory_bytes=MAX_BYTES), set_up, check)


if __name__ == "__main__":
    _serve(*sys.argv[1:])

"""Compiles the structure of an answer into a grammar over a model's tokens, by llguidance.

The router compiles first and refuses what cannot be served; engines compile the same text again, for the tokens that
may come next. The library knows a schema's keywords or names the one that it does not know.

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
"""The library's own limit of a row is twice as high: there a token held up its step for a tenth of a second."""
_TOO_LONG_ROW = "Current row has"
"""Stands in what the library says where a row is longer."""
MAX_LEFT_OUT = 4096
"""Characters of what is left out of a structure's schemas, as JSON."""
LOAD_S = 30.0
"""Seconds of the processor's time in which a process that compiles has read the tokenizer."""
MAX_BYTES = 2 * 2**30
"""Memory of a process that compiles."""
_BRACKETS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])*/|(?P<open>[(\[{])|(?P<close>[)\]}])')


class GrammarCompiler:
    """Grammars over one model's vocabulary. It can be used in several threads. Making one takes up to two seconds.

    Args:
        tokenizer: the model's tokenizer.json.
        vocab_size: tokens that a mask covers.
        eos_token_ids: tokens that may follow where the structure is complete, and nowhere else.

    Raises:
        InvalidRequest: the library cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = sorted(eos_token_ids)
        with _complaints_told():
            self._tokenizer = LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=self._eos_token_ids or None)

    def compile(self, structure: StructuredOutputs) -> GrammarMatcher:
        """Returns a matcher at the beginning of an answer, where it has found already what may come.

        That takes milliseconds, up to seconds for what is made to be costly, or has no end at all.

        Raises:
            InvalidRequest: it is not valid, uses what is not known, is too large, or no answer can begin so; or the
                model has no token that ends an answer.
        """
        if not self._eos_token_ids:
            raise invalid_structure("the model has no token that ends an answer")
        with _complaints_told():
            matcher = GrammarMatcher(LLMatcher(self._tokenizer, _source(structure), log_level=0, limits=_LIMITS))
        matcher.allowed()
        return matcher

    def check(self, structure: StructuredOutputs) -> list[tuple[int, SchemaPath]]:
        """Compiles a structure, and returns what has to be left out of its schemas (`loosened`) for that.

        Only of a schema that is kept as far as it can be something is left out.

        Raises:
            InvalidRequest: it cannot be served, as in `compile`, or an answer could come to where nothing may follow;
                names the keyword of a schema to blame.
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
        """Yields the path of each keyword with which a schema cannot be compiled.

        Raises:
            InvalidRequest: none may be left out.
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
        """Returns what is wrong with a schema, in the library's words; empty: nothing."""
        try:
            with _complaints_told():
                source = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": options}))
                GrammarMatcher(LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)).allowed()
        except InvalidRequest as error:
            return complaint_in(error)
        return ""

    def _has_key(self, schema: Mapping[str, Any]) -> bool:
        """Returns whether an object of a schema may have a member; also if the schema cannot be compiled."""
        options = {"whitespace_flexible": False}
        with contextlib.suppress(InvalidRequest), _complaints_told():
            source = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": options}))
            matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
            return bool(matcher.is_error()) or matcher.compute_ff_bytes() != b"{}"
        return True

    def _begins(self, schema: Mapping[str, Any]) -> bool:
        """Returns whether an object of a schema can be begun; also if it allows none, or cannot be compiled."""
        with contextlib.suppress(InvalidRequest), _complaints_told():
            source = LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": LOOSE_OPTIONS}))
            matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
            matcher.consume_tokens(self._tokenizer.tokenize_str("{"))
            return _TOO_LONG_ROW not in matcher.get_error()
        return True


class GrammarMatcher:
    """An answer on its way through a grammar.

    Raises:
        InvalidRequest: the library has refused the grammar. Its methods raise it as well.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._check()

    def copy(self) -> GrammarMatcher:
        """Returns another matcher at the same place."""
        with _complaints_told():
            return GrammarMatcher(self._matcher.deep_copy())

    def take(self, token_ids: Sequence[int]) -> None:
        """Goes on with the answer's next tokens.

        Raises:
            InvalidRequest: the grammar does not allow them, or has become too large.
        """
        with _complaints_told():
            self._matcher.consume_tokens(list(token_ids))
        self._check()

    def allowed(self) -> bytes:
        """Returns which tokens may come next: a bit each, the lowest bit of the first byte is token 0.

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
    """Returns what of a schema is left out for a fault. Raises InvalidRequest: nothing may be."""
    if not placed.is_loose:
        raise refused_structure(fault.sentence(placed.place))
    return (*fault.path, fault.keyword) if fault.keyword else fault.path


def _bounded(left_out: list[tuple[int, SchemaPath]]) -> list[tuple[int, SchemaPath]]:
    """Returns what is left out, or whole schemas in place of many keywords: routers keep it."""
    if len(json.dumps(left_out)) <= MAX_LEFT_OUT:
        return left_out
    return [(index, ()) for index in sorted({index for index, _ in left_out})]


@contextlib.contextmanager
def _complaints_told() -> Iterator[None]:
    """Raises InvalidRequest for whatever the library raises. What it asserts of itself is no `Exception`."""
    try:
        yield
    except InvalidRequest:
        raise
    except BaseException as error:
        raise invalid_structure(complaint_of(error)) from error


def _source(structure: StructuredOutputs) -> str:
    """Returns the structure in the library's own form."""
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
    """The library's own parser goes down with each bracket."""
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
        with contextlib.suppress(InvalidRequest):  # then every structure is refused for it
            load()

    def check(question: bytes) -> bytes:
        asked = json.loads(question)
        left_out = load().check(StructuredOutputs(**asked | {"choice": tuple(asked["choice"])}))
        return json.dumps(left_out).encode() if left_out else b""

    serve(int(parent), SandboxLimits(set_up_s=LOAD_S, cpu_s=COMPILE_S, memory_bytes=MAX_BYTES), set_up, check)


if __name__ == "__main__":
    _serve(*sys.argv[1:])

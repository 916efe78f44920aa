"""Compiles the structure of an answer into a grammar over a model's tokens, by llguidance.

The router compiles first and refuses what cannot be served; engines compile the same text again, for the tokens that
may come next. The library knows a schema's keywords or names the one that it does not know.

As a program, `python -m baton.grammar PARENT TOKENIZER VOCAB_SIZE EOS...`, it compiles one structure after the other:
each is a line of JSON on its input and has a line of JSON on its output, what is wrong with it. It can be ended where
compiling has no end.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from baton.errors import InvalidRequest
from baton.nesting import MAX_LEVELS, levels
from baton.parent import die_with
from baton.structure import JSON_OPTIONS, LARK_HEAD, StructuredOutputs, invalid_structure

_LIMITS = LLParserLimits(
    max_grammar_size=100_000, max_items_in_row=1000, precompute_large_lexemes=False, verbose_errors=False
)
"""The library's own limit of a row is twice as high: there a token held up its step for a tenth of a second."""
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


@contextlib.contextmanager
def _complaints_told() -> Iterator[None]:
    """Raises InvalidRequest for whatever the library raises. What it asserts of itself is no `Exception`."""
    try:
        yield
    except InvalidRequest:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise invalid_structure(f"{type(error).__name__}: {error}") from error


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
    return json.dumps(schema | {"x-guidance": JSON_OPTIONS})


def _check_brackets(grammar: str) -> None:
    """The library's own parser goes down with each bracket."""
    level = 0
    for found in _BRACKETS.finditer(grammar):
        level += 1 if found["open"] else -1 if found["close"] else 0
        if level > MAX_LEVELS:
            raise invalid_structure(f"the grammar has brackets deeper than {MAX_LEVELS} levels")


def _serve(parent: str, tokenizer: str, vocab_size: str, *eos_token_ids: str) -> None:
    die_with(int(parent))
    compiler = None
    for line in itertools.chain(("{}",), sys.stdin):
        problem = ""
        try:
            compiler = compiler or GrammarCompiler(Path(tokenizer), int(vocab_size), map(int, eos_token_ids))
            if asked := json.loads(line):
                compiler.compile(StructuredOutputs(**asked | {"choice": tuple(asked["choice"])}))
        except InvalidRequest as refusal:
            problem = str(refusal)
        sys.stdout.write(json.dumps(problem) + "\n")  # the first one says that it is ready
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(*sys.argv[1:])

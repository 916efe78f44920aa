"""Makes the calls of an answer what a client asks: a grammar in which nothing else can be written.

It is Lark in llguidance's dialect: a text that is free until a call begins is followed by lazy lexemes, as in that
library's own structural tags. With `tool_choice` "auto" it is needed for strict tools, for a single call, and where the
content has a schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any

import regex

from baton.api import Chat, PromptInput
from baton.errors import InvalidRequest
from baton.sampling import SamplingParams
from baton.structure import JSON_OPTIONS, LARK_HEAD, MAX_GRAMMAR_BYTES, StructuredOutputs, invalid_structure
from baton.tools import Tool, ToolUse
from router.answer.call_format import CallForm, Written

if TYPE_CHECKING:
    from router.prompt.tokenizer import Tokenizer


def with_tool_choice(
    params: SamplingParams, prompt: PromptInput, form: CallForm | None, tokenizer: Tokenizer
) -> SamplingParams:
    """Returns the parameters with what makes answers call the tools that a client asks for, or none.

    Args:
        form: how the model writes calls; None: in a way that is not known.

    Raises:
        InvalidRequest: the model's calls cannot be forced, or there is another structure beside them.
    """
    if not isinstance(prompt, Chat) or not prompt.tools:
        return params
    choice = prompt.tool_choice
    if choice.use is ToolUse.NONE:
        signs = form.signs if form else ()
        return replace(params, bad_words=(*params.bad_words, *signs)) if signs else params
    is_forced = choice.use is ToolUse.REQUIRED
    is_strict = any(tool.strict for tool in prompt.tools)
    content = params.structured_outputs
    if not (is_forced or is_strict or not choice.is_parallel or content):
        return params
    if form is None or form.written is None:
        raise InvalidRequest(
            "how this model writes calls is not known, so none can be forced; set tool_choice to auto, and leave "
            "strict, parallel_tool_calls and response_format out",
            "tool_choice",
        )
    if content is not None and not (content.json or content.json_object):
        raise InvalidRequest("beside tools, an answer may have a JSON schema and no other structure", "tools")
    tools = [tool for tool in prompt.tools if choice.name in ("", tool.name)]
    grammar = _Grammar(form, form.written, tokenizer)
    is_single = bool(choice.name) or not choice.is_parallel
    text = grammar.forced(tools, is_single) if is_forced else grammar.free(tools, is_single, content)
    num_bytes = len(text.encode("utf-8", "replace"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"calls that are forced or strict need a grammar of {num_bytes} bytes for these tools; it may have at most "
            f"{MAX_GRAMMAR_BYTES}",
            "tools",
        )
    return replace(params, structured_outputs=StructuredOutputs(grammar=text))


_PLAIN_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions")
)
"""Keywords of an object's schema that ask for no members but those in `properties`."""
_SPACE = r"\s\x1c-\x1f"
"""White space as Python has it, in a class of a regular expression of llguidance."""
_IN_TAG = (rf'ENDS: "</parameter>" | /<\/function>[{_SPACE}]*<\/tool_call>/', "IN_TAG: ANY & ~(ANY ENDS ANY)")
"""The rules of a text in a tag, however it is spelled: nothing that ends the tag, or the call."""


class _Grammar:
    """Writes grammars for one model."""

    def __init__(self, form: CallForm, written: Written, tokenizer: Tokenizer) -> None:
        self._form = form
        self._written = written
        self._specials = {tokenizer.token(token_id): token_id for token_id in sorted(tokenizer.special_ids)}

    def forced(self, tools: Sequence[Tool], is_single: bool) -> str:
        """A grammar of calls and nothing else."""
        written = self._written
        return _lark([f"start: {self._list(is_single)}", *self._calls(tools, written.begin)])

    def free(self, tools: Sequence[Tool], is_single: bool, content: StructuredOutputs | None) -> str:
        """A grammar of content that may have calls.

        Args:
            content: what it is without a call; None: any text.
        """
        written = self._written
        if content is not None or self._form.only_at_begin:
            other = rf"/[^\[{{<{_SPACE}]/ ANY" if content is None else _json_rule(_schema_of_content(content))
            start = f"start: {self._list(is_single)} | other"
            return _lark([start, f"other: {other}", *self._calls(tools, written.begin)])
        sign = self._form.signs[0]
        head = f"head: TEXT {self._literal(sign)}" if sign in self._specials else f"head[lazy]: TEXT {_quoted(sign)}"
        if written.first:
            behind = self._literal(written.first.removeprefix(sign))
            start = f"start: head {behind} {self._some(is_single)} {self._literal(written.last)} | TEXT"
            calls = self._calls(tools, written.begin)
        else:
            start = "start: head call | TEXT" if is_single else "start: (head call)* TEXT"
            calls = self._calls(tools, written.begin.removeprefix(sign))
        signs = " | ".join(map(_quoted, self._form.signs))
        return _lark([start, head, f"SIGN: {signs}", "TEXT: ANY & ~(ANY SIGN ANY)", *calls])

    def _list(self, is_single: bool) -> str:
        return f"{self._literal(self._written.first)} {self._some(is_single)} {self._literal(self._written.last)}"

    def _some(self, is_single: bool) -> str:
        return "call" if is_single else f"call ({self._literal(self._written.between)} call)*"

    def _calls(self, tools: Sequence[Tool], begin: str) -> list[str]:
        """The rules of one call."""
        written = self._written
        rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
        rules += _IN_TAG if self._form.tags is not None else ()
        for index, tool in enumerate(tools):
            head, end = self._literal(begin + tool.name + written.middle), self._literal(written.end)
            if self._form.tags is None:
                rules.append(f"call_{index}: {head} {_json_rule(_schema_of(tool))} {end}")
            else:
                names, more = _tag_rules(f"call_{index}", _schema_of(tool))
                rules += [f"call_{index}: {head} {names} {end}", *more]
        return rules

    def _literal(self, text: str) -> str:
        """A text, in which special tokens are those tokens."""
        if not text:
            return ""
        longest_first = sorted(self._specials, key=len, reverse=True)
        pieces = regex.split("(" + "|".join(map(regex.escape, longest_first)) + ")", text) if longest_first else [text]
        return " ".join(
            f"<[{self._specials[piece]}]>" if piece in self._specials else _quoted(piece) for piece in pieces if piece
        )


def _lark(rules: Sequence[str]) -> str:
    return "\n".join([LARK_HEAD, *rules, r"ANY: /(.|\n)*/"])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': JSON_OPTIONS}, ensure_ascii=False)}"


def _schema_of_content(content: StructuredOutputs) -> dict[str, Any]:
    """The schema of an answer that has no call.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        schema = json.loads(content.json or '{"type": "object"}')
    except (ValueError, RecursionError) as error:
        raise invalid_structure(f"the schema is not JSON, or too deep: {error}") from error
    if not isinstance(schema, dict):
        raise invalid_structure("beside tools, a schema must be an object")
    return schema


def _schema_of(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object: of the declared members alone, where that is known to
    leave something. A small model would go on inventing others.
    """
    schema: dict[str, Any] = {**(tool.parameters or {}), "type": "object"}
    properties = schema.get("properties")
    declares_all = isinstance(properties, Mapping) and set(schema.get("required") or ()) <= properties.keys()
    if tool.strict or (declares_all and schema.keys() <= _PLAIN_KEYS):
        return {"additionalProperties": False, **schema}
    return schema


def _tag_rules(prefix: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The rule of arguments that are written as tags, one after the other, and the rules that it needs.

    Raises:
        InvalidRequest: a text has a rule that is not known to be kept.
    """
    properties = schema.get("properties") or {}
    required = frozenset(schema.get("required") or ())
    if not properties and schema.get("additionalProperties") is False:
        return "", []
    if not properties:
        any_tag = r'"<parameter=" /[^>\n]{1,64}/ ">\n" ' + f"{prefix}_text"
        return f"{prefix}_any*", [f"{prefix}_any: {any_tag}", _text_rule(f"{prefix}_text")]
    if odd := [key for key in properties if not _TAG_KEY.fullmatch(key)]:
        raise InvalidRequest(
            f"this model writes arguments as tags, whose name cannot be {odd[0][:64]!a}; rename it", "tools"
        )
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for key, value in properties.items():
        _check_tag(key, value)
    names, rules = [], []
    for index, (key, value) in enumerate(properties.items()):
        name = f"{prefix}_{index}"
        names.append(name if key in required else f"{name}?")
        begin = _quoted(f"<parameter={key}>\n")
        if isinstance(value, Mapping) and value.get("type") == "string" and "enum" not in value:
            rules += [f"{name}: {begin} {name}_text", _text_rule(f"{name}_text", value)]
            continue
        texts = value.get("enum") if isinstance(value, Mapping) else None
        if isinstance(texts, list) and all(isinstance(each, str) for each in texts):
            of_value = "(" + " | ".join(map(_quoted, texts)) + ")"
        else:
            of_value = _json_rule({**shared, **value} if '"$ref"' in json.dumps(value) else value)
        rules.append(f"{name}: {begin} {of_value} {_quoted(_TAG_END)}")
    return " ".join(names), rules


_TAG_TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
_TAG_KEY = regex.compile(r"[^>\n]+")
_TAG_END = "\n</parameter>\n"
_TEXT_KEYS = ("type", "title", "description", "default", "examples", "minLength", "maxLength")
"""What the schema of a text that stands in a tag may have."""


def _check_tag(key: str, schema: Any) -> None:
    """Raises InvalidRequest for a property that would be read as another type than it is written."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    texts = schema.get("enum", ()) if kind == "string" else ()
    bare = all(isinstance(each, str) and "<" not in each for each in texts)
    if kind not in _TAG_TYPES or not bare:
        raise InvalidRequest(
            f"this model writes arguments as tags, in which {key[:64]!a} must have one type, and texts of an enum no "
            "'<', to be enforced",
            "tools",
        )


def _text_rule(name: str, schema: Mapping[str, Any] = MappingProxyType({})) -> str:
    """A rule of a text up to the end of its tag."""
    if unknown := [each for each in schema if each not in _TEXT_KEYS]:
        raise InvalidRequest(
            f"this model writes arguments as tags, in which {unknown[0][:64]!a} of a string cannot be enforced; "
            "leave it out",
            "tools",
        )
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if (
        type(least) is not int
        or type(most) not in (int, NoneType)
        or not 0 <= least <= (least if most is None else most)
    ):
        raise InvalidRequest("minLength and maxLength in the schema of a tool must be integers that fit", "tools")
    if not least and most is None:
        return f"{name}[lazy]: IN_TAG {_quoted(_TAG_END)}"
    # No "<": the end of the tag would count as text.
    return f"{name}: /[^<]{{{least},{'' if most is None else most}}}\\n<\\/parameter>\\n/"

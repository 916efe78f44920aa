"""The format of a model's answers: finds it, plans how to read it, and enforces it for a client's tool choice.

A model separates reasoning and tool calls from content with marks. If tokenizer_config.json has a `response_template`,
in the format of transformers 5 (utils/chat_parsing/response_templates.py), it decides. Otherwise the chat template is
searched for the marks of known models.

A grammar enforces a client's tool choice (`with_tool_choice`). It is Lark in llguidance's dialect. Free text before a
call uses lazy lexemes, as in that library's own structural tags. With `tool_choice` "auto" a grammar is needed for
strict tools, for a single call, and if the content has a schema.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any

import regex

from baton.api import Chat, PromptInput
from baton.errors import InvalidRequest, ModelLoadError
from baton.json_schema import KEYWORDS, NEVER_ENFORCED, plain, shown
from baton.model_files import read_json
from baton.nesting import check_levels
from baton.sampling import SamplingParams
from baton.structure import (
    LARK_HEAD,
    MAX_GRAMMAR_BYTES,
    StructuredOutputs,
    invalid_structure,
    json_rule,
    refused_structure,
)
from baton.tools import Tool, ToolUse
from router.answer.call_format import HERMES, CallForm, Written, form_of, known_form
from router.answer.channels import CallIds, Calls, Channels, ReasoningReader
from router.answer.marks import Mark, Reasoning

if TYPE_CHECKING:
    from router.prompt.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning field in response templates."""
KNOWN_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought\n", "<channel|>"),
)
"""Marks around a reasoning: DeepSeek's, Qwen's and most others'; Mistral's; Seed's; Cohere's; Gemma's."""
MAX_TAIL = 64
"""Number of tokens at the end of a prompt that are searched for marks. It covers the generation prompt of templates."""
SPACE = r"\s\x1c-\x1f"
"""Python's white space, for use inside a character class of an llguidance regular expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Format of a model's answers to chats."""

    reasoning: Reasoning | None = None
    """None: the model does not reason, or does not mark its reasoning."""
    calls: CallForm | None = None
    """None: the model's tool calls cannot be read."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens in the marks."""

    @staticmethod
    def load(tokenizer: Tokenizer) -> AnswerFormat:
        """Read the format of a model. Logs a warning if its `response_template` has an unknown format of calls.

        Raises:
            ModelLoadError: its `response_template` is invalid.
        """
        fields = _fields_of(read_json(tokenizer.folder / "tokenizer_config.json").get("response_template"))
        template = tokenizer.chat_template
        marks = _known_marks(template.source) if fields is None else _marks_of(fields)
        reasoning, all_marks = None, list[Mark]()
        if marks is not None:
            begin, end = (tuple(tokenizer.encode_fragment(mark.text)) if mark.text else () for mark in marks)
            reasoning = Reasoning(*marks, begin[0] if len(begin) == 1 else None, end)
            all_marks += marks
        if template.asks_for_hermes:
            calls: CallForm | None = HERMES
        elif fields is not None and "tool_calls" in fields:
            calls = form_of(fields["tool_calls"])
            if calls is None:
                logger.warning("%s has an unknown format of tool calls, so they stay text", tokenizer.folder)
        else:
            calls = known_form(template.source_with_tools)
        all_marks += calls.marks if calls else ()
        special = {token_id: tokenizer.token(token_id) for token_id in tokenizer.special_ids}
        shown_ids = frozenset(i for i, text in special.items() if any(mark.names(text) for mark in all_marks))
        return AnswerFormat(reasoning=reasoning, calls=calls, shown_ids=shown_ids)

    def plan(
        self, prompt: PromptInput, prompt_ids: Sequence[int], tokenizer: Tokenizer, params: SamplingParams
    ) -> AnswerPlan | None:
        """Return the plan for the answers to a prompt; None: all of their text is content. Answers to texts have none.

        Args:
            prompt_ids: the tokens of the prompt.
            params: sampling parameters of the client. Structured content may contain marks in its texts, so calls are
                then read only at its start.
        """
        if not isinstance(prompt, Chat):
            return None
        is_open, may_begin = _place_of(self.reasoning, prompt, prompt_ids, tokenizer)
        reasoning = self.reasoning if is_open or may_begin else None
        calls = self.calls if prompt.tools and prompt.tool_choice.use is not ToolUse.NONE else None
        if reasoning is None and calls is None:
            return None
        if calls is not None and params.structured_outputs is not None:
            calls = replace(calls, only_at_begin=True)
        elif calls is not None and not needs_grammar(prompt, params):
            calls = calls.loose or calls
        tools = {tool.name: tool for tool in prompt.tools}
        is_forced = prompt.tool_choice.use is ToolUse.REQUIRED
        return AnswerPlan(
            reasoning=reasoning,
            is_open=is_open,
            calls=calls,
            is_forced=is_forced,
            tools=tools,
            shown_ids=self.shown_ids,
        )


PLAIN = AnswerFormat()
"""Format of answers without reasoning and calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """Plan for splitting the answers to one prompt into channels."""

    reasoning: Reasoning | None
    """None: answers have no reasoning."""
    is_open: bool
    """Whether answers start inside a reasoning; else they may start with one."""
    calls: CallForm | None
    """None: answers have no calls."""
    is_forced: bool
    """Whether answers consist of calls."""
    tools: Mapping[str, Tool]
    """Tools that answers may call, by name."""
    shown_ids: frozenset[int]

    def channels(self, request_id: str, choice_index: int) -> Channels:
        """Return the channels of one answer."""
        reasoning = ReasoningReader(self.reasoning, is_open=self.is_open) if self.reasoning else None
        calls = None
        if self.calls is not None:
            ids = CallIds(request_id, choice_index, self.calls.num_id_letters)
            calls = Calls(self.calls, self.tools, ids, is_forced=self.is_forced)
        return Channels(reasoning, calls, self.shown_ids)


def with_reasoning(params: SamplingParams, plan: AnswerPlan | None) -> SamplingParams:
    """Return the parameters with the tokens that start and end the reasoning.

    They are set if a structure or a thinking budget needs them, and the client does not set them.

    Raises:
        InvalidRequest: there is a thinking budget, but no known end of a reasoning.
    """
    if not params.is_structured or params.reasoning_end_ids:
        return params
    reasoning = plan.reasoning if plan else None
    if plan and reasoning and reasoning.end_ids and (plan.is_open or reasoning.begin_id is not None):
        begin_id = None if plan.is_open else reasoning.begin_id
        return replace(params, reasoning_begin_id=begin_id, reasoning_end_ids=reasoning.end_ids)
    if params.thinking_budget is not None:
        raise InvalidRequest(
            "thinking_budget needs a reasoning, but none is known for answers to this prompt; unset it, or set "
            "reasoning_end_ids to the tokens that end the reasoning",
            "thinking_budget",
        )
    return params


def _fields_of(template: Any) -> Mapping[str, Any] | None:
    """Return the fields of a response template; None: the model has no template."""
    if template is None:
        return None
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping):
        raise ModelLoadError("the model's response_template must be an object with fields")
    return fields


def _marks_of(fields: Mapping[str, Any]) -> tuple[Mark, Mark] | None:
    field = next((fields[name] for name in REASONING_NAMES if name in fields), None)
    if field is None:
        return None
    if not isinstance(field, Mapping):
        raise ModelLoadError("the model's response_template has a field that is not an object")
    return Mark.of(field, "open"), Mark.of(field, "close")


def _known_marks(chat_template: str) -> tuple[Mark, Mark] | None:
    for begin, end in KNOWN_MARKS:
        if begin in chat_template or end in chat_template:
            return Mark.of({"open": begin}, "open"), Mark.of({"close": end}, "close")
    return None


def _place_of(
    reasoning: Reasoning | None, chat: Chat, prompt_ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[bool, bool]:
    """Return whether answers start inside a reasoning, and whether they may start with one."""
    if reasoning is None:
        return False, False
    if chat.continue_final_message:
        return reasoning.is_open_in(chat.messages[-1].content), False
    tail = tokenizer.decode_all(prompt_ids[-MAX_TAIL:]).rstrip() if chat.add_generation_prompt else ""
    return reasoning.opens.ends(tail), chat.add_generation_prompt and not reasoning.closes.ends(tail)


def with_tool_choice(
    params: SamplingParams, prompt: PromptInput, form: CallForm | None, tokenizer: Tokenizer
) -> SamplingParams:
    """Return the parameters with the grammar or bad words that enforce the tool choice of a prompt.

    Args:
        form: format of the model's calls; None: unknown.

    Raises:
        InvalidRequest: the model's calls cannot be enforced, or the request also asks for another structure.
    """
    if not isinstance(prompt, Chat) or not prompt.tools:
        return params
    choice = prompt.tool_choice
    if choice.use is ToolUse.NONE:
        signs = form.signs if form else ()
        return replace(params, bad_words=(*params.bad_words, *signs)) if signs else params
    is_forced = choice.use is ToolUse.REQUIRED
    content = params.structured_outputs
    if not needs_grammar(prompt, params):
        return params
    if form is None or form.written is None:
        raise InvalidRequest(
            "tool_choice cannot be enforced: the tool-call format of this model is unknown; set tool_choice to auto, "
            "and unset strict, parallel_tool_calls and response_format",
            "tool_choice",
        )
    if content is not None and not (content.json or content.json_object):
        raise InvalidRequest("tools can be combined with a JSON schema, but not with another structure", "tools")
    tools = [
        _ToolArguments.of(tool, index) for index, tool in enumerate(prompt.tools) if choice.name in ("", tool.name)
    ]
    grammar = _Grammar(form, form.written, tokenizer)
    is_single = bool(choice.name) or not choice.is_parallel
    text = grammar.forced(tools, is_single) if is_forced else grammar.free(tools, is_single, content)
    num_bytes = len(text.encode("utf-8", "replace"))
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"the grammar for forced or strict calls of these tools has {num_bytes} bytes, above the limit of "
            f"{MAX_GRAMMAR_BYTES}; send fewer or smaller tools",
            "tools",
        )
    return replace(params, structured_outputs=StructuredOutputs(grammar=text))


def needs_grammar(chat: Chat, params: SamplingParams) -> bool:
    """Return whether a chat with tools needs a grammar, for its calls or for its content.

    Args:
        params: sampling parameters of the client.
    """
    choice = chat.tool_choice
    is_strict = any(tool.strict for tool in chat.tools)
    is_asked = choice.use is ToolUse.REQUIRED or is_strict or not choice.is_parallel
    return is_asked or params.structured_outputs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolArguments:
    """Arguments of one tool."""

    name: str
    """Name of the tool."""
    schema: Mapping[str, Any]
    place: str
    """Path of the schema in the request."""
    is_loose: bool
    """True: parts of the schema that cannot be enforced are ignored."""

    @staticmethod
    def of(tool: Tool, index: int) -> _ToolArguments:
        """Return the arguments of a tool.

        Args:
            index: index of the tool in the request.
        """
        place = f"tools[{index}].function.parameters"
        return _ToolArguments(name=tool.name, schema=_schema_of(tool), place=place, is_loose=not tool.strict)

    def rule(self) -> str:
        """Return their grammar rule, for arguments that are written as JSON."""
        return json_rule(self.schema, self.place, is_loose=self.is_loose)


_PLAIN_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions")
)
"""Keywords of an object's schema that ask for no members except those in `properties`."""


class _Grammar:
    """Writer of grammars for one model."""

    def __init__(self, form: CallForm, written: Written, tokenizer: Tokenizer) -> None:
        self._form = form
        self._written = written
        self._specials = {tokenizer.token(token_id): token_id for token_id in sorted(tokenizer.special_ids)}

    def forced(self, tools: Sequence[_ToolArguments], is_single: bool) -> str:
        """Return a grammar for calls and nothing else."""
        written = self._written
        return _lark([f"start: {self._list(is_single)}", *self._calls(tools, written.begin)])

    def free(self, tools: Sequence[_ToolArguments], is_single: bool, content: StructuredOutputs | None) -> str:
        """Return a grammar for content that may contain calls.

        Args:
            content: structure of an answer without calls; None: free text.
        """
        written = self._written
        if content is not None or self._form.only_at_begin:
            start = f"start: {self._list(is_single)} | other"
            return _lark([start, *self._other(tools, content), *self._calls(tools, written.begin)])
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

    def _other(self, tools: Sequence[_ToolArguments], content: StructuredOutputs | None) -> list[str]:
        """Return the rules of content without a call, for calls that are only at the start of the content."""
        if content is not None:
            return [f"other: {json_rule(plain(_schema_of_content(content)), 'schema')}"]
        if self._written.begin:
            return [rf"other: /[^\[{{<{SPACE}]/ ANY"]
        # Only a tool's name (letters, digits, _ and -) on a separate line marks a call.
        names = "|".join(tool.name for tool in tools)
        return [rf"CALL: /[{SPACE}]*({names})[ \t]*\n[{SPACE}]*\{{/", "other: OTHER", "OTHER: ANY & ~(CALL ANY)"]

    def _list(self, is_single: bool) -> str:
        return f"{self._literal(self._written.first)} {self._some(is_single)} {self._literal(self._written.last)}"

    def _some(self, is_single: bool) -> str:
        return "call" if is_single else f"call ({self._literal(self._written.between)} call)*"

    def _calls(self, tools: Sequence[_ToolArguments], begin: str) -> list[str]:
        """Return the rules of one call."""
        written = self._written
        rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
        if self._form.tags is not None and self._form.closes is not None:
            rules += rules_of_tags(self._form.closes.text)
        for index, tool in enumerate(tools):
            head, end = self._literal(begin + tool.name + written.middle), self._literal(written.end)
            if self._form.tags is None:
                rules.append(f"call_{index}: {head} {tool.rule()} {end}")
            else:
                names, more = tag_rules(f"call_{index}", tool.schema, tool.place, is_loose=tool.is_loose)
                rules += [f"call_{index}: {head} {names} {end}", *more]
        return rules

    def _literal(self, text: str) -> str:
        """Return the grammar of a literal text, in which special tokens are matched by their ids."""
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


def _schema_of_content(content: StructuredOutputs) -> dict[str, Any]:
    """Return the schema of an answer without calls.

    Raises:
        InvalidRequest: the schema is invalid.
    """
    try:
        schema = json.loads(content.json or '{"type": "object"}')
    except (ValueError, RecursionError) as error:
        raise invalid_structure(f"the schema is not JSON, or too deep: {error}") from error
    if not isinstance(schema, dict):
        raise invalid_structure("its schema must be a JSON object if the request has tools")
    check_levels(schema, "structured_outputs")
    return schema


def _schema_of(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, an object.

    Undeclared members are forbidden if the declared ones are known to suffice, because a small model would keep
    inventing others.
    """
    said = plain(tool.parameters or {})
    schema: dict[str, Any] = {**(said if tool.strict else plain(said, NEVER_ENFORCED)), "type": "object"}
    properties = schema.get("properties")
    declares_all = isinstance(properties, Mapping) and set(schema.get("required") or ()) <= properties.keys()
    is_closed = not said.keys() & _MORE_MEMBERS if tool.strict else declares_all and said.keys() <= _PLAIN_KEYS
    return {"additionalProperties": False, **schema} if is_closed else schema


_MORE_MEMBERS = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
"""Keywords of a strict tool's schema that may declare further members."""


def rules_of_tags(end_of_calls: str) -> list[str]:
    """Return the rules of any text in a tag: it must not contain what ends the tag or the call.

    Args:
        end_of_calls: the closing mark of a call.
    """
    mark = end_of_calls.replace("/", r"\/")
    return [rf'ENDS: "</parameter>" | /<\/function>[{SPACE}]*{mark}/', "IN_TAG: ANY & ~(ANY ENDS ANY)"]


_OBJECT_KEYS = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions",
     "default", "examples", "maxProperties")
)  # fmt: skip
"""Keywords of the arguments' schema that are enforced, or ask for nothing."""
_ANNOTATIONS = frozenset(
    ("$anchor", "$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "default", "deprecated",
     "description", "examples", "readOnly", "title", "writeOnly")
)  # fmt: skip
_TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
_KEY = regex.compile(r"[^>\n]+")
_END = "\n</parameter>\n"
_TEXT_KEYS = _ANNOTATIONS | {"type", "minLength", "maxLength"}
"""Allowed keywords in the schema of a text in a tag."""
_WHY = "this model writes arguments as tags"


def tag_rules(prefix: str, schema: Mapping[str, Any], place: str, *, is_loose: bool) -> tuple[str, list[str]]:
    """Return the rule of arguments that are written as tags, and the rules that it needs.

    Args:
        prefix: prefix of the names of these rules.
        place: path of the schema in the request.
        is_loose: whether parts of the schema that cannot be enforced are ignored.

    Raises:
        InvalidRequest: a part of the schema cannot be enforced; the message names it.
    """
    properties, required = schema.get("properties") or {}, frozenset(schema.get("required") or ())
    if not is_loose:
        _check(schema, properties, required, place)
    if not properties and schema.get("additionalProperties") is False:
        return "", []
    if not properties:
        any_tag = r'"<parameter=" /[^>\n]{1,64}/ ">\n" ' + f"{prefix}_text"
        return f"{prefix}_any*", [f"{prefix}_any: {any_tag}", _text_rule(f"{prefix}_text")]
    if odd := [key for key in properties if not _KEY.fullmatch(key)]:
        raise InvalidRequest(f"{_WHY}, so the name of an argument cannot be {odd[0][:64]!a}; rename it", "tools")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    names, rules = [], []
    for index, (key, value) in enumerate(properties.items()):
        name = f"{prefix}_{index}"
        names.append(name if key in required else f"{name}?")
        begin = _quoted(f"<parameter={key}>\n")
        at = f"{place}{shown(('properties', key))}"
        fault = _fault_of(value)
        if fault and not is_loose:
            raise refused_structure(f"{at}: {fault} cannot be enforced ({_WHY})")
        if fault or (value["type"] == "string" and "enum" not in value):
            rules += [f"{name}: {begin} {name}_text", _text_rule(f"{name}_text", _lengths_of(value))]
        elif value["type"] == "string":
            of_value = "(" + " | ".join(map(_quoted, value["enum"])) + ")"
            rules.append(f"{name}: {begin} {of_value} {_quoted(_END)}")
        else:
            full = {**shared, **value} if '"$ref"' in json.dumps(value) else value
            rules.append(f"{name}: {begin} {json_rule(full, at, is_loose=is_loose)} {_quoted(_END)}")
    return " ".join(names), rules


def _check(schema: Mapping[str, Any], properties: Mapping[str, Any], required: frozenset[str], place: str) -> None:
    """Raise InvalidRequest for a keyword of the arguments that the rules do not enforce."""
    if lost := next((key for key in schema if key not in _OBJECT_KEYS | _ANNOTATIONS and key in KEYWORDS), None):
        raise refused_structure(f"{place}: {lost} cannot be enforced ({_WHY})")
    if properties and not required <= properties.keys():
        raise refused_structure(f"{place}: required cannot be enforced ({_WHY}, and only those in properties)")
    least = schema.get("maxProperties", len(properties))
    if not isinstance(least, int) or least < len(properties):
        raise refused_structure(f"{place}: maxProperties cannot be enforced ({_WHY})")


def _fault_of(schema: Any) -> str:
    """Return the keyword of an argument's schema that cannot be enforced; empty: all can.

    The argument must be read back as the type that was written. A text of an enum must not look like the end of the
    tag.
    """
    if not isinstance(schema, Mapping):
        return "a schema without type"
    kind = schema.get("type")
    if kind not in _TYPES:
        return next((key for key in ("anyOf", "oneOf", "allOf", "$ref", "enum", "const") if key in schema), "type")
    if kind != "string":
        return ""
    if "enum" in schema:
        texts = schema["enum"]
        is_kept = isinstance(texts, list) and texts and all(isinstance(each, str) and "<" not in each for each in texts)
        if not is_kept:
            return "enum"
    known = _TEXT_KEYS | {"enum"}
    if odd := [str(key) for key in schema if key not in known and key in KEYWORDS]:
        return odd[0]
    if "enum" in schema and schema.keys() & {"minLength", "maxLength"}:
        return next(key for key in ("minLength", "maxLength") if key in schema)
    return "minLength" if _has_odd_length(schema) else ""


def _has_odd_length(schema: Mapping[str, Any]) -> bool:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    is_whole = type(least) is int and type(most) in (int, NoneType)
    return not is_whole or not 0 <= least <= (least if most is None else most)


def _lengths_of(schema: Any) -> Mapping[str, Any]:
    """Return the schema if its limits on a text's length can be enforced, else an empty schema."""
    is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
    return schema if is_text and not _has_odd_length(schema) else {}


def _text_rule(name: str, schema: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the rule of a text up to the end of its tag."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not least and most is None:
        return f"{name}[lazy]: IN_TAG {_quoted(_END)}"
    # No "<": the end of the tag would count as text.
    return f"{name}: /[^<]{{{least},{'' if most is None else most}}}\\n<\\/parameter>\\n/"

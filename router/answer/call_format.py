"""Formats of tool calls: from a template in the model's folder, or those of known model families.

A template is the field `tool_calls` of transformers' `response_template`. That library has those of Qwen; the formats
of the other families follow the models' chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import regex

from baton.errors import ModelLoadError
from baton.tools import Tool
from router.answer.call_readers import JsonCalls, JsonKeys, PythonCalls
from router.answer.marks import START, Found, Mark
from router.answer.tag_calls import LooseTagCalls, TagCalls, Tags

NAME_AND_ARGUMENTS = JsonKeys()
_PLACE = re.compile(r"\{(\w+)(?:\.(\w+))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Texts around the names and arguments of calls, for grammars that enforce calls."""

    first: str = ""
    """Text before the first call."""
    begin: str
    """Text before a name."""
    middle: str
    """Text between name and arguments."""
    end: str
    """Text behind the arguments."""
    between: str
    """Text between two calls."""
    last: str = ""
    """Text behind the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """Format of a model's calls, for reading and for enforcing them."""

    opens: Mark
    closes: Mark | None
    """None: there is no closing mark."""
    keys: JsonKeys = NAME_AND_ARGUMENTS
    """Keys of the name and the arguments in JSON."""
    tags: Tags | None = None
    """Format of the arguments if they are tags; None: they are JSON."""
    only_at_begin: bool = False
    """Whether calls can only be at the start of the content, because they have no mark except their JSON."""
    signs: tuple[str, ...] = ()
    """Texts of which one is in the start of every call."""
    num_id_letters: int = 29
    """Length of a call's id, in characters."""
    written: Written | None = None
    """None: unknown, so calls cannot be enforced."""
    closes_fence: Mark | None = None
    """Closing mark of calls whose opening mark has a fence; None: the same as without a fence."""
    loose: CallForm | None = None
    """Format for reading calls that no grammar enforces; None: the same."""

    @property
    def marks(self) -> list[Mark]:
        """All marks around calls."""
        return [mark for mark in (self.opens, self.closes, self.tags.closes if self.tags else None) if mark]

    def reader(self, raw: str, found: Found, tools: Mapping[str, Tool]) -> JsonCalls | TagCalls | None:
        """Return a reader for the text behind an opening mark; None: the mark names an unknown tool.

        Args:
            raw: the mark, and other text that becomes content if no call follows.
            found: search result of the mark.
            tools: the tools of the request, by name.
        """

        def tool_of(name: str) -> str | None:
            known = name if name in tools or not self.keys.is_loose else name.removeprefix("functions.")
            return known if known in tools or known in self.keys.no_calls else None

        name = tool_of(found.name) if found.name else ""
        if name is None:
            return None
        if found.is_python:
            return PythonCalls(raw, tool_of, is_list="[" in raw)
        if self.tags is not None and (name or not self.keys.is_loose):
            reader = LooseTagCalls if self.keys.is_loose else TagCalls
            return reader(self.tags, name, tools[name].parameters or {}) if name else None
        keys = replace(self.keys, no_calls=self.keys.no_calls - tools.keys())
        if found.is_bare and not name:
            keys = replace(keys, is_bare=True, needs_arguments=True)
        return JsonCalls(raw, tool_of, keys, name)


def form_of(field: Any) -> CallForm | None:
    """Return the format of calls from the field `tool_calls` of a response template; None: the format is unknown.

    Raises:
        ModelLoadError: the field is invalid.
    """
    if not isinstance(field, Mapping):
        raise ModelLoadError("the model's response_template has a field tool_calls that is not an object")
    opens = Mark.of(field, "open")
    closes = Mark.of(field, "close") if "close" in field or "close_pattern" in field else None
    signs = (opens.text,) if opens.text else ()
    arguments, places = field.get("content_args") or {}, _places(field.get("transform"))
    match field.get("content"), places:
        case "xml-inline", ("{name}", "{content}") if closes is not None and set(arguments) == {"tag_pattern"}:
            tags = Tags(tag=_tag(arguments["tag_pattern"]), closes=closes)
            return CallForm(opens=opens, closes=None, signs=signs, tags=tags, loose=_loose_like(opens, closes, tags))
        case "json", _ if arguments:
            return None  # a variant of JSON
        case "json", ("{name}", "{content}"):
            return CallForm(opens=opens, closes=closes, signs=signs)
        case "json", (name, of_arguments):
            found = [_PLACE.fullmatch(place) for place in (name, of_arguments)]
            keys = [each[2] or each[1] for each in found if each is not None]
            if len(keys) == 2:
                json_keys = JsonKeys(name=keys[0], arguments=(keys[1],))
                written = _written(opens, closes, json_keys)
                form = CallForm(opens=opens, closes=closes, keys=json_keys, signs=signs, written=written)
                return replace(form, loose=_loose_like(opens, closes)) if keys == ["name", "arguments"] else form
    return None


def _loose_like(opens: Mark, closes: Mark | None, tags: Tags | None = None) -> CallForm | None:
    """Return the format for reading calls that no grammar enforces, from a known format with the same marks."""
    if tags is None:
        is_hermes = closes is not None and opens.ends("<tool_call>") and closes.ends("</tool_call>")
        return HERMES.loose if is_hermes else None
    for form, mark in ((QWEN_XML, "tool_call"), (SEED_XML, "seed:tool_call")):
        is_same = opens.ends(f"<{mark}>\n<function=f>") and tags.closes.ends(f"</function>\n</{mark}>")
        if is_same and tags.tag.fullmatch("<parameter=k>\nv\n</parameter>"):
            return form.loose
    return None


def _places(transform: Any) -> tuple[str, ...]:
    """Return the places from which a template takes the name and the arguments of a call."""
    function = transform.get("function") if isinstance(transform, Mapping) else None
    if function == "{content}":
        return ("{content.name}", "{content.arguments}")
    if isinstance(function, Mapping):
        return tuple(str(function.get(name, "")) for name in ("name", "arguments"))
    return ()


def _tag(source: Any) -> regex.Pattern[str]:
    try:
        tag = regex.compile(source, regex.DOTALL)
        if {"key", "value"} <= tag.groupindex.keys() and not tag.fullmatch(""):
            return tag
    except (regex.error, TypeError) as error:
        raise ModelLoadError(f"the model's response_template has an invalid tag_pattern: {error}") from error
    raise ModelLoadError("the model's response_template has a tag_pattern without the groups key and value")


def _written(opens: Mark, closes: Mark | None, keys: JsonKeys) -> Written | None:
    """Return the texts around JSON calls between two marks; None: a mark has several spellings."""
    if not opens.text or (closes is not None and not closes.text):
        return None
    return Written(
        begin=f'{opens.text}\n{{"{keys.name}": "',
        middle=f'", "{keys.arguments[0]}": ',
        end=f"}}\n{closes.text if closes else ''}",
        between="\n",
    )


def _literal(text: str) -> Mark:
    return Mark.of({"open": text}, "open")


def _pattern(source: str) -> Mark:
    return Mark.of({"open_pattern": source}, "open")


_BARE = rf"(?P<bare>{START})"
_BARE_JSON = rf"{_BARE}(?=[\[{{])"
"""Pattern of the start of a JSON call without a mark, on a separate line."""


def _with_loose(form: CallForm, opens: str, closes: str = "", *, keys: JsonKeys | None = None) -> CallForm:
    """Return a format with a loose variant, which reads calls that no grammar enforces.

    Args:
        opens: pattern of the text that may precede calls.
        closes: pattern of the text that may follow them, in addition to extra brackets and the end of a fence.
        keys: keys of the loose variant, if they differ from the format's.
    """
    behind, at_fence = r"[\]}]+", ""
    if closes:
        behind, at_fence = rf"[\]}}\s]*(?:{closes})|{behind}", rf"(?:\s*(?:{closes}))?"
    fence = rf"[\]}}\s]*```{at_fence}|{behind}"
    loose = replace(
        form,
        opens=_pattern(opens),
        closes=_pattern(behind),
        closes_fence=_pattern(fence),
        keys=replace(keys or form.keys, is_loose=True),
        only_at_begin=False,
        loose=None,
    )
    return replace(form, loose=loose)


def _json_form(opens: str, closes: str) -> CallForm:
    """Return the format of JSON between two fixed marks."""
    begin, end = _literal(opens), _literal(closes)
    return CallForm(opens=begin, closes=end, signs=(opens,), written=_written(begin, end, NAME_AND_ARGUMENTS))


HERMES = _with_loose(
    _json_form("<tool_call>", "</tool_call>"),
    rf"<tool_call>(?:\s*```(?:json)?)?|(?P<bare><tools>\s*(?:```(?:json)?\s*)?)(?=[\[{{])|{_BARE_JSON}",
    "</tool_call>|</tools>",
)
"""Format of Hermes and Qwen 2.5 and 3. Also used if the router itself writes the tools (`router.prompt.chat`)."""


def _tag_form(mark: str) -> CallForm:
    """Return the format of tags inside a mark. Behind text, models omit the mark or the tags.

    Args:
        mark: name of the mark.
    """
    named = r"<function=(?P<name>[^>\n]+)>"
    form = CallForm(
        opens=_pattern(rf"<{mark}>\s*{named}|{named}(?=\s*(?:<parameter=|</function>))"),
        closes=_literal(f"</{mark}>"),
        tags=Tags(
            tag=regex.compile(r"<parameter=(?P<key>[^>\n]{1,256})>\n?(?P<value>.*?)\n?</parameter>", regex.DOTALL),
            closes=_pattern(rf"</function>\s*</{mark}>"),
            endings=("</parameter>", "</function>", f"</{mark}>"),
            begin="<parameter=",
            end="</function>",
            mark=mark,
        ),
        signs=(f"<{mark}>", "<function="),
        written=Written(begin=f"<{mark}>\n<function=", middle=">\n", end=f"</function>\n</{mark}>", between="\n"),
    )
    quoted = r"""<function=["']?(?P<name>[^>\n"']+)["']?>"""
    behind = r"(?=\s*(?:<parameter=|</function>))"
    json_of_hermes = rf"<{mark}>\s*(?=[\[{{])"
    return _with_loose(form, rf"<{mark}>\s*{quoted}|{quoted}{behind}|{json_of_hermes}", f"</{mark}>")


QWEN_XML = _tag_form("tool_call")
"""Format of Qwen 3 Coder and 3.5."""
SEED_XML = _tag_form("seed:tool_call")
"""Format of Seed-OSS."""
_MEMBERS_OF_COHERE = {"begin": '{"tool_name": "', "middle": '", "parameters": ', "end": "}", "between": ", "}
_LISTED = {"begin": '{"name": "', "middle": '", "arguments": ', "end": "}", "between": ", ", "last": "]"}
_OPENS_MISTRALS = _pattern(r"\[TOOL_CALLS\](?:(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|(?=\s*\{)))?")
MISTRAL = _with_loose(
    CallForm(
        opens=_OPENS_MISTRALS,
        closes=None,
        signs=("[TOOL_CALLS]",),
        num_id_letters=9,
        written=Written(first="[TOOL_CALLS][", **_LISTED),
    ),
    r"\[TOOL_CALLS\](?:\s*(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|(?=\s*\{)))?"
    rf"|{_BARE}(?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\](?=\s*\{{)|{_BARE_JSON}",
)
"""Format of Mistral's models up to Mistral Large 2: a list of calls. Their templates require ids of this length.

Mistral's two formats are both read with either template, because a folder's template may be older than its weights.
"""
MISTRAL_11 = replace(MISTRAL, written=Written(begin="[TOOL_CALLS]", middle="[ARGS]", end="", between=""))
"""Format of Mistral's later models."""
DEEPSEEK = CallForm(
    opens=_pattern(
        "(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>"
        r"(?:function<｜tool▁sep｜>(?P<name>[^\s<]+)\s*```json|(?P<name>[^\s<]+)<｜tool▁sep｜>)"
    ),
    closes=_pattern(r"(?:```\s*)?<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?"),
    signs=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    written=Written(
        first="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        middle="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        between="\n",
        last="<｜tool▁calls▁end｜>",
    ),
)
"""Format of DeepSeek V3 and R1. V3.1 writes name and arguments without a fence, which is read as well."""
GRANITE = _with_loose(
    CallForm(
        opens=_literal("<|tool_call|>"),
        closes=None,
        signs=("<|tool_call|>",),
        written=Written(first="<|tool_call|>[", **_LISTED),
    ),
    rf"<\|tool_call\|>|<tool_call>\s*(?=[\[{{])|{_BARE_JSON}",
    "</tool_call>",
)
COHERE = _with_loose(
    CallForm(
        opens=_literal("<|START_ACTION|>"),
        closes=_literal("<|END_ACTION|>"),
        keys=JsonKeys(name="tool_name", arguments=("parameters",)),
        signs=("<|START_ACTION|>",),
        written=Written(first="<|START_ACTION|>[", **_MEMBERS_OF_COHERE, last="]<|END_ACTION|>"),
    ),
    rf"<\|START_ACTION\|>|{_BARE_JSON}",
    r"<\|END_ACTION\|>",
)
"""Format of Command R7B and later."""
COHERE_FENCED = _with_loose(
    replace(
        COHERE,
        opens=_pattern(r"Action:\s*```json\s*(?=\[)"),
        closes=_literal("```"),
        signs=("Action:",),
        written=Written(first="Action: ```json\n[", **_MEMBERS_OF_COHERE, last="]\n```"),
    ),
    rf"Action:\s*```(?:json)?\s*(?=\[)|{_BARE_JSON}",
    keys=replace(COHERE.keys, no_calls=frozenset(("directly_answer", "directly-answer"))),
)
"""Format of Command R and R+."""
NEMOTRON = _with_loose(
    CallForm(
        opens=_literal("<TOOLCALL>"),
        closes=_literal("</TOOLCALL>"),
        signs=("<TOOLCALL>",),
        written=Written(first="<TOOLCALL>[", **{**_LISTED, "last": "]</TOOLCALL>"}),
    ),
    rf"<TOOLCALL>|{_BARE_JSON}",
    "</TOOLCALL>",
)
PHI = _with_loose(
    CallForm(
        opens=_pattern(r"(?:functools|<\|tool_call\|>)\s*(?=\[)"),
        closes=_literal("<|/tool_call|>"),
        signs=("functools[", "<|tool_call|>"),
        written=Written(first="functools[", **_LISTED),
    ),
    rf"(?:functools|<\|tool_calls?\|>)\s*(?=[\[{{])|{_BARE_JSON}",
    r"<\|/tool_calls?\|>",
)
"""Format of Phi 4 mini."""
GLM = _with_loose(
    CallForm(
        opens=_pattern(r"(?P<name>[\w.-]+)[ \t]*\n\s*(?=\{)"),
        closes=None,
        only_at_begin=True,
        written=Written(begin="", middle="\n", end="", between="\n"),
    ),
    rf"(?P<bare>{START}|(?<=\x1e)(?:\s|<\|assistant\|>)*)(?P<name>[\w.-]+)[ \t]*\n\s*(?=\{{)",
)
"""Format of GLM 4: a name on a separate line, then the arguments."""
PLAIN_JSON = _with_loose(
    CallForm(
        opens=_pattern(r"<\|python_tag\|>\s*(?=[\[{])|(?=[\[{])"),
        closes=None,
        keys=JsonKeys(needs_arguments=True),
        only_at_begin=True,
        written=Written(begin='{"name": "', middle='", "parameters": ', end="}", between="; "),
    ),
    r"<\|python_tag\|>\s*(?=[\[{])|<\|python_tag\|>(?P<python>)(?=[\w.-]+\()"
    r"|<function=(?P<name>[\w.-]+)>(?=\s*\{)|(?:<tool_call>|\[TOOL_CALLS\])\s*(?=[\[{])"
    rf"|{_BARE}(?P<python>\[)(?=\s*[\w.-]+\()|{_BARE_JSON}",
    "</function>|</tool_call>",
)
"""Format of Llama 3 and of unknown models: one object, or several separated by semicolons."""
KNOWN_FORMS: tuple[tuple[str, CallForm], ...] = (
    ("<seed:tool_call>", SEED_XML),
    ("<function=", QWEN_XML),
    ("<tool_call>", HERMES),
    ("[ARGS]", MISTRAL_11),
    ("[TOOL_CALLS]", MISTRAL),
    ("<｜tool▁call▁begin｜>", DEEPSEEK),
    ("<|START_ACTION|>", COHERE),
    ("directly_answer", COHERE_FENCED),
    ("directly-answer", COHERE_FENCED),
    ("<TOOLCALL>", NEMOTRON),
    ("functools", PHI),
    ("<|/tool|>", PHI),
    ("<|tool_call|>", GRANITE),
    ("<|observation|>", GLM),
)
"""Text in the chat template -> format of calls. The first match wins."""


def known_form(chat_template: str) -> CallForm:
    """Return the format of calls for a chat template that supports tools."""
    return next((form for needle, form in KNOWN_FORMS if needle in chat_template), PLAIN_JSON)

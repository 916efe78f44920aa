"""How models write calls of tools: by a template of their folder, or as their families are known to.

The templates are fields `tool_calls` of transformers' `response_template`. That library has those of Qwen; the others
are written after the models' chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import regex

from baton.errors import ModelLoadError
from baton.tools import Tool
from router.answer.call_readers import JsonCalls, JsonKeys
from router.answer.loose_tags import LooseTagCalls
from router.answer.marks import START, Found, Mark
from router.answer.python_calls import PythonCalls
from router.answer.tag_calls import TagCalls, Tags

NAME_AND_ARGUMENTS = JsonKeys()
_PLACE = re.compile(r"\{(\w+)(?:\.(\w+))?\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What stands around names and arguments of calls, when they are forced."""

    first: str = ""
    """What stands before the first call."""
    begin: str
    """What stands before a name."""
    middle: str
    """What stands between name and arguments."""
    end: str
    """Behind the arguments."""
    between: str
    """What stands between two calls."""
    last: str = ""
    """Behind the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How calls are written: read, and forced."""

    opens: Mark
    closes: Mark | None
    """None: nothing stands behind them."""
    keys: JsonKeys = NAME_AND_ARGUMENTS
    """Where the JSON in which they are written has name and arguments."""
    tags: Tags | None = None
    """How they are written in place of JSON; None: as JSON."""
    only_at_begin: bool = False
    """Whether calls stand at the begin of the content, or nowhere: nothing but JSON marks them."""
    signs: tuple[str, ...] = ()
    """Texts without which no call begins."""
    num_id_letters: int = 29
    """Letters of a call's id."""
    written: Written | None = None
    """None: nobody knows how to write them."""
    closes_fence: Mark | None = None
    """What stands behind calls whose opening mark has a fence; None: the same as behind others."""
    loose: CallForm | None = None
    """The form in which calls are read that no grammar enforces; None: the same."""

    @property
    def marks(self) -> list[Mark]:
        """All marks around calls."""
        return [mark for mark in (self.opens, self.closes, self.tags.closes if self.tags else None) if mark]

    def reader(self, raw: str, found: Found, tools: Mapping[str, Tool]) -> JsonCalls | TagCalls | None:
        """Returns a reader of what is behind a mark; None: it is the call of no tool.

        Args:
            raw: the mark, and what else becomes text if no call follows.
            found: says what the mark has.
            tools: those that there are, by name.
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
    """Reads how calls are written from a `tool_calls` field of a response template; None: in a way that is not known.

    Raises:
        ModelLoadError: it is not valid.
    """
    if not isinstance(field, Mapping):
        raise ModelLoadError("The model's response_template has a field tool_calls that is no object.")
    opens = Mark.of(field, "open")
    closes = Mark.of(field, "close") if "close" in field or "close_pattern" in field else None
    signs = (opens.text,) if opens.text else ()
    arguments, places = field.get("content_args") or {}, _places(field.get("transform"))
    match field.get("content"), places:
        case "xml-inline", ("{name}", "{content}") if closes is not None and set(arguments) == {"tag_pattern"}:
            tags = Tags(tag=_tag(arguments["tag_pattern"]), closes=closes)
            return CallForm(opens=opens, closes=None, signs=signs, tags=tags, loose=_loose_like(opens, closes, tags))
        case "json", _ if arguments:
            return None  # another notation than JSON's
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
    """Returns how calls are read that no grammar enforces: as those of a known form with the same marks."""
    if tags is None:
        is_hermes = closes is not None and opens.ends("<tool_call>") and closes.ends("</tool_call>")
        return HERMES.loose if is_hermes else None
    for form, mark in ((QWEN_XML, "tool_call"), (SEED_XML, "seed:tool_call")):
        is_same = opens.ends(f"<{mark}>\n<function=f>") and tags.closes.ends(f"</function>\n</{mark}>")
        if is_same and tags.tag.fullmatch("<parameter=k>\nv\n</parameter>"):
            return form.loose
    return None


def _places(transform: Any) -> tuple[str, ...]:
    """Returns from where a template takes the name and the arguments of a call."""
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
        raise ModelLoadError(f"The model's response_template has an invalid tag_pattern: {error}.") from error
    raise ModelLoadError("The model's response_template has a tag_pattern without the groups key and value.")


def _written(opens: Mark, closes: Mark | None, keys: JsonKeys) -> Written | None:
    """Returns how JSON between two marks is written; None: the marks are not always the same."""
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
"""Calls without a mark, in a line of their own."""


def _with_loose(form: CallForm, opens: str, closes: str = "", *, keys: JsonKeys | None = None) -> CallForm:
    """Returns a form with the one in which its calls are read if no grammar enforces them.

    Args:
        opens: pattern of what may stand before calls.
        closes: pattern of what may stand behind them, beside brackets too many and the end of a fence.
        keys: those of the calls, if they are others than the form's.
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
    """The form of JSON between two marks that are always the same."""
    begin, end = _literal(opens), _literal(closes)
    return CallForm(opens=begin, closes=end, signs=(opens,), written=_written(begin, end, NAME_AND_ARGUMENTS))


HERMES = _with_loose(
    _json_form("<tool_call>", "</tool_call>"),
    rf"<tool_call>(?:\s*```(?:json)?)?|(?P<bare><tools>\s*(?:```(?:json)?\s*)?)(?=[\[{{])|{_BARE_JSON}",
    "</tool_call>|</tools>",
)
"""The form of Hermes and Qwen 2.5 and 3; also where the router itself writes the tools (`router.prompt.tools`)."""


def _tag_form(mark: str) -> CallForm:
    """The form of tags in a mark, of which a model leaves out the one or the other behind text.

    Args:
        mark: the name of the mark.
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
"""The form of Qwen 3 Coder and 3.5."""
SEED_XML = _tag_form("seed:tool_call")
"""The form of Seed-OSS."""
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
"""A list of calls, up to Mistral Large 2; its templates refuse ids of another length. Both forms are read with both
templates: a folder's template may be older than its weights.
"""
MISTRAL_11 = replace(MISTRAL, written=Written(begin="[TOOL_CALLS]", middle="[ARGS]", end="", between=""))
"""The form of later ones of Mistral."""
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
"""The form of V3 and R1; V3.1 writes name and arguments without a fence, which is read, too."""
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
"""The form of Command R7B and later."""
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
"""The form of Command R and R+."""
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
"""The form of Phi 4 mini."""
GLM = _with_loose(
    CallForm(
        opens=_pattern(r"(?P<name>[\w.-]+)[ \t]*\n\s*(?=\{)"),
        closes=None,
        only_at_begin=True,
        written=Written(begin="", middle="\n", end="", between="\n"),
    ),
    rf"(?P<bare>{START}|(?<=\x1e)(?:\s|<\|assistant\|>)*)(?P<name>[\w.-]+)[ \t]*\n\s*(?=\{{)",
)
"""The form of GLM 4: a name in a line of its own, and the arguments."""
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
"""The form of Llama 3, and of models whose form is not known: an object, or several behind semicolons."""
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
"""What a chat template has, if it is that of a model which writes calls so."""


def known_form(chat_template: str) -> CallForm:
    """Returns how the model of a chat template that reads tools writes calls."""
    return next((form for needle, form in KNOWN_FORMS if needle in chat_template), PLAIN_JSON)

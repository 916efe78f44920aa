"""How models write calls of tools: by a template of their folder, or as their families are known to.

The templates are fields `tool_calls` of transformers' `response_template`. That library has those of Qwen; the others
are written after the models' chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex

from baton.errors import ModelLoadError
from baton.tools import Tool
from router.answer.call_readers import JsonCalls, JsonKeys
from router.answer.marks import Mark
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

    @property
    def marks(self) -> list[Mark]:
        """All marks around calls."""
        return [mark for mark in (self.opens, self.closes, self.tags.closes if self.tags else None) if mark]

    def reader(self, raw: str, tools: Mapping[str, Tool]) -> JsonCalls | TagCalls | None:
        """Returns a reader of what is behind a mark; None: it is the call of no tool.

        Args:
            raw: the mark, and what else becomes text if no call follows.
            tools: those that there are, by name.
        """
        found = self.opens.pattern.search(raw)
        name = (found.groupdict().get("name") or "").strip() if found else ""
        if name and name not in tools:
            return None
        if self.tags is not None:
            return TagCalls(self.tags, name, tools[name].parameters or {}) if name else None
        return JsonCalls(raw, tools.__contains__, self.keys, name)


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
            return CallForm(opens=opens, closes=None, signs=signs, tags=Tags(_tag(arguments["tag_pattern"]), closes))
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
                return CallForm(opens=opens, closes=closes, keys=json_keys, signs=signs, written=written)
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


def _json_form(opens: str, closes: str | None) -> CallForm:
    """The form of JSON between two marks that are always the same."""
    begin, end = _literal(opens), _literal(closes) if closes else None
    return CallForm(opens=begin, closes=end, signs=(opens,), written=_written(begin, end, NAME_AND_ARGUMENTS))


HERMES = _json_form("<tool_call>", "</tool_call>")
"""The form of Hermes and Qwen 2.5 and 3; also where the router itself writes the tools (`router.prompt.tools`)."""
QWEN_XML = CallForm(
    opens=_pattern(r"<tool_call>\s*<function=(?P<name>[^>\n]+)>"),
    closes=None,
    tags=Tags(
        regex.compile(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", regex.DOTALL),
        _pattern(r"</function>\s*</tool_call>"),
        ("</parameter>", "</tool_call>"),
    ),
    signs=("<tool_call>",),
    written=Written(begin="<tool_call>\n<function=", middle=">\n", end="</function>\n</tool_call>", between="\n"),
)
"""The form of Qwen 3 Coder and 3.5."""
_LISTED = {"begin": '{"name": "', "middle": '", "arguments": ', "end": "}", "between": ", ", "last": "]"}
MISTRAL = CallForm(
    opens=_literal("[TOOL_CALLS]"),
    closes=None,
    signs=("[TOOL_CALLS]",),
    num_id_letters=9,
    written=Written(first="[TOOL_CALLS][", **_LISTED),
)
"""A list of calls, up to Mistral Large 2; its templates refuse ids of another length."""
MISTRAL_11 = CallForm(
    opens=_pattern(r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]"),
    closes=None,
    signs=("[TOOL_CALLS]",),
    num_id_letters=9,
    written=Written(begin="[TOOL_CALLS]", middle="[ARGS]", end="", between=""),
)
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
GRANITE = CallForm(
    opens=_literal("<|tool_call|>"),
    closes=None,
    signs=("<|tool_call|>",),
    written=Written(first="<|tool_call|>[", **_LISTED),
)
PLAIN_JSON = CallForm(
    opens=_pattern(r"<\|python_tag\|>\s*(?=[\[{])|(?=[\[{])"),
    closes=None,
    keys=JsonKeys(needs_arguments=True),
    only_at_begin=True,
    written=Written(begin='{"name": "', middle='", "parameters": ', end="}", between="; "),
)
"""The form of Llama 3, and of models whose form is not known: an object, or several behind semicolons."""
KNOWN_FORMS: tuple[tuple[str, CallForm], ...] = (
    ("<function=", QWEN_XML),
    ("<tool_call>", HERMES),
    ("[ARGS]", MISTRAL_11),
    ("[TOOL_CALLS]", MISTRAL),
    ("<｜tool▁call▁begin｜>", DEEPSEEK),
    ("<|tool_call|>", GRANITE),
)
"""What a chat template has, if it is that of a model which writes calls so."""


def known_form(chat_template: str) -> CallForm:
    """Returns how the model of a chat template that reads tools writes calls."""
    return next((form for needle, form in KNOWN_FORMS if needle in chat_template), PLAIN_JSON)

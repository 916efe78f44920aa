"""Chat templates, rendered exactly as transformers' `apply_chat_template` renders them.

Templates come with the model and are untrusted code, so they run in Jinja's immutable sandbox and see plain JSON only.
The names they may use follow transformers/utils/chat_template_utils.py (5.23).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from baton.api import Chat
from baton.chat import ChatMessage, check_num_messages
from baton.errors import InvalidRequest, ModelLoadError
from baton.nesting import check_levels
from baton.tools import check_tools
from router.prompt.tools import with_calls_as_text, with_tools

CONTINUES = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands where the last message is continued: transformers' mark, by which the two write the same."""
_NAMING = (
    jinja2.nodes.Getattr, jinja2.nodes.Getitem, jinja2.nodes.Compare, jinja2.nodes.Operand, jinja2.nodes.Call,
    jinja2.nodes.Keyword, jinja2.nodes.Filter, jinja2.nodes.Test, jinja2.nodes.List, jinja2.nodes.Tuple,
)  # fmt: skip
"""Parts of a template whose texts may be names of members."""
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that are set from the request's own fields."""


class ChatTemplate:
    """The templates of one model by name; most have one, "default", and some another for requests with tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Raises ModelLoadError when a template is not valid Jinja."""
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._sources = dict(templates)
        try:
            self._templates = {name: environment.from_string(source) for name, source in templates.items()}
            trees = {name: environment.parse(source) for name, source in templates.items()}
            self._names = {name: jinja2.meta.find_undeclared_variables(tree) for name, tree in trees.items()}
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"The model's chat template is not valid: {error}") from error
        self._known_words = {
            name: frozenset(word for word in ("developer", "tool_calls") if word in source)
            for name, source in templates.items()
        }
        """What the templates look for, by name."""
        self.words = frozenset(word for tree in trees.values() for word in _words(tree)) | set(special_tokens.values())
        """All texts that the templates have: what they may write, and more."""
        self.names = frozenset(name for tree in trees.values() for name in _names(tree))
        """What the templates may ask objects for."""
        for template in self._templates.values():
            # Each rendering copies them, and Jinja's chain of dicts is slow to copy.
            template.globals = dict(template.globals)

    @property
    def source(self) -> str:
        """The template of chats without tools; empty: the model has none."""
        return self._sources.get("default", "")

    @property
    def source_with_tools(self) -> str:
        """The template of chats with tools; empty: the model has none."""
        return self._sources.get(self._name(has_tools=True), "")

    @property
    def reads_tools(self) -> bool:
        """Whether the template of chats with tools reads `tools`."""
        return self.reads("tools", has_tools=True)

    def reads(self, variable: str, *, has_tools: bool) -> bool:
        """Returns whether the template of chats with or without tools reads a variable."""
        return variable in self._names.get(self._name(has_tools=has_tools), ())

    @staticmethod
    def load(folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Reads chat_template.jinja and additional_chat_templates/, else tokenizer_config.json."""
        templates: dict[str, str] = {}
        match tokenizer_config.get("chat_template"):
            case str(source):
                templates["default"] = source
            case [*named]:
                templates |= {entry["name"]: entry["template"] for entry in named}
        if (single := folder / "chat_template.jinja").is_file():
            templates = {"default": single.read_text(encoding="utf-8")}
        for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
        return ChatTemplate(templates, special_tokens)

    def context(self, chat: Chat) -> dict[str, Any]:
        """What the template gets from the client.

        Raises:
            InvalidRequest: no template, one that does not read what the chat has, or messages in a form that no
                template knows; `param` names it.
        """
        name = self._name(has_tools=bool(chat.tools))
        if name not in self._templates:
            raise InvalidRequest(
                "This model has no chat template, so it cannot answer a chat; send the prompt as text instead.",
                "messages",
            )
        check_num_messages(len(chat.messages))
        check_tools(chat.tools, chat.tool_choice)
        check_levels(chat.documents, "documents")
        check_levels(chat.template_kwargs, "chat_template_kwargs")
        self._check_read(chat, name)
        known, is_read = self._known_words[name], "tools" in self._names[name]
        knows_developer = "developer" in known
        messages = [
            _for_template(message, i, knows_developer=knows_developer) for i, message in enumerate(chat.messages)
        ]
        has_calls = any(message.tool_calls or message.role in ("tool", "function") for message in chat.messages)
        if has_calls and "tool_calls" not in known:
            messages = with_calls_as_text(messages)
        if chat.tools and not is_read:
            messages = with_tools(messages, chat.tools)
        if chat.continue_final_message:
            if not chat.messages[-1].content:
                raise InvalidRequest(
                    "continue_final_message needs a last message with content; it has none", "continue_final_message"
                )
            messages[-1]["content"] += CONTINUES
        return {
            **chat.template_kwargs,
            "messages": messages,
            "tools": [tool.in_openai_form() for tool in chat.tools] if chat.tools and is_read else None,
            "documents": list(chat.documents) or None,
            "add_generation_prompt": chat.add_generation_prompt,
        }

    def render(self, context: Mapping[str, Any], *, continues: bool = False) -> str:
        """The prompt, up to where the assistant's next message begins.

        Args:
            context: see `context`.
            continues: whether the prompt ends where the last message does.

        Raises:
            InvalidRequest: messages that the template cannot render; `param` is messages.
        """
        try:
            text = self._templates[self._name(has_tools=bool(context["tools"]))].render(
                {**self._special_tokens, **context}
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # The template is a program over the client's messages: whatever stops it, the messages do not fit it.
            raise InvalidRequest(f"The model's chat template refuses these messages: {error}.", "messages") from error
        return _until_continued(text) if continues else text

    def _check_read(self, chat: Chat, name: str) -> None:
        """Raises InvalidRequest for what the template would not read: it would be ignored."""
        given = {**dict.fromkeys(chat.template_kwargs, "chat_template_kwargs")}
        if reserved := next((each for each in given if each in RESERVED), None):
            raise InvalidRequest(f"chat_template_kwargs cannot set {reserved!a}", "chat_template_kwargs")
        if chat.documents:
            given["documents"] = "documents"
        unread = next((each for each in given if each not in self._names[name]), None)
        if unread is not None:
            raise InvalidRequest(
                f"the model's chat template does not read {unread[:64]!a}, so it would change nothing; leave it out",
                given[unread],
            )

    def _name(self, *, has_tools: bool) -> str:
        return "tool_use" if has_tools and "tool_use" in self._templates else "default"


def _for_template(message: ChatMessage, index: int, *, knows_developer: bool) -> dict[str, Any]:
    """A message in the form that templates expect. Raises InvalidRequest naming what is wrong with it."""
    message.check(index)
    # `developer` is OpenAI's newer name for `system`, which most templates do not know.
    role = "system" if message.role == "developer" and not knows_developer else message.role
    plain: dict[str, Any] = {"role": role, "content": message.content}
    if message.name:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = message.parsed_tool_calls()
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning is not None:
        plain |= {"thinking": message.reasoning, "reasoning_content": message.reasoning}
    return plain


def _words(tree: jinja2.nodes.Template) -> Iterator[str]:
    for node in tree.find_all((jinja2.nodes.TemplateData, jinja2.nodes.Const)):
        match node:
            case jinja2.nodes.TemplateData(data=text) | jinja2.nodes.Const(value=str(text)):
                yield text


def _names(tree: jinja2.nodes.Template) -> Iterator[str]:
    for node in tree.find_all(_NAMING):
        if isinstance(node, jinja2.nodes.Getattr):
            yield node.attr
        yield from (
            each.value
            for each in node.iter_child_nodes()
            if isinstance(each, jinja2.nodes.Const) and isinstance(each.value, str)
        )


def _until_continued(text: str) -> str:
    """The prompt up to the end of the message that is continued. Some templates strip what is at a message's end.

    Raises:
        InvalidRequest: the template has left the message out.
    """
    end = text.rfind(CONTINUES.strip())
    if end < 0:
        raise InvalidRequest(
            "The model's chat template leaves the end of the last message out, so it cannot be continued.", "messages"
        )
    return text[:end] if text.startswith(CONTINUES, end) else text[:end].rstrip()


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002  # templates may name the argument
    return datetime.now().strftime(format)

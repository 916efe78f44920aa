"""Chat templates, rendered exactly as transformers' `apply_chat_template` renders them.

Templates come with the model and are untrusted code, so they run in Jinja's immutable sandbox and see plain JSON only.
The names they may use follow transformers/utils/chat_template_utils.py (5.23).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from baton.chat import ChatMessage
from baton.errors import InvalidRequest, ModelLoadError


class ChatTemplate:
    """The templates of one model by name; most have one, "default", and some another for requests with tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Raises ModelLoadError when a template is not valid Jinja."""
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._sources = dict(templates)
        try:
            self._templates = {name: environment.from_string(source) for name, source in templates.items()}
        except jinja2.TemplateError as error:
            raise ModelLoadError(f"The model's chat template is not valid: {error}") from error
        for template in self._templates.values():
            # Each rendering copies them, and Jinja's chain of dicts is slow to copy.
            template.globals = dict(template.globals)

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

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt, up to where the assistant's next message begins.

        Args:
            tools: OpenAI's, as plain JSON values.
            variables: further names that the template may read.

        Raises:
            InvalidRequest: no template, or messages that it cannot render; `param` is messages or tools.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(
                "This model has no chat template, so it cannot answer a chat; send the prompt as text instead.",
                "messages",
            )
        if not messages:
            raise InvalidRequest("messages must hold at least one message; it is empty.", "messages")
        knows_developer = "developer" in self._sources[name]
        chat = [_for_template(message, i, knows_developer=knows_developer) for i, message in enumerate(messages)]
        context = {
            **self._special_tokens, "documents": None, **variables,
            "messages": chat, "tools": list(tools) if tools else None, "add_generation_prompt": True,
        }  # fmt: skip
        try:
            return self._templates[name].render(context)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # The template is a program over the client's messages: whatever stops it, the messages do not fit it.
            raise InvalidRequest(f"The model's chat template refuses these messages: {error}.", "messages") from error


def _for_template(message: ChatMessage, index: int, *, knows_developer: bool) -> dict[str, Any]:
    """A message in the form that templates expect. Raises InvalidRequest naming what is wrong with it."""
    message.check_role(index)
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

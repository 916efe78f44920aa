"""Chat templates, rendered exactly as transformers' `apply_chat_template` renders them.

Templates come with the model and are programs that nobody has checked. They run in Jinja's immutable sandbox, see plain
JSON only, and do so in a process of its own: some have no end, or take all memory. The names that they may use follow
transformers/utils/chat_template_utils.py (5.23).

As a program, `python -m baton.template PARENT`, it is a sandbox (`baton.sandbox`) that renders one chat after the
other. Its setup is JSON, the templates and the special tokens; so is each question, of a template's name, its
variables, and the most characters that it may write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from baton.errors import InvalidRequest
from baton.sandbox import SandboxLimits, serve

RENDER_S = 1.0
"""Seconds of the processor's time that a chat may take."""
COMPILE_S = 2.0
MAX_BYTES = 512 * 2**20
STOPS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
    MemoryError,
)  # fmt: skip
"""What may stop a template, wherever: it is a program."""


class Templates:
    """The templates of one model by name, in the process that renders them.

    Raises:
        InvalidRequest: one is not valid.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        environment = environment_of_templates()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except STOPS as error:
            raise InvalidRequest(f"the model's chat template is not valid: {stop_of(error)}") from error
        for template in self._templates.values():
            # Each rendering copies them, and Jinja's chain of dicts is slow to copy.
            template.globals = dict(template.globals)

    def render(self, name: str, context: Mapping[str, Any], most: int) -> str:
        """Returns what a template writes.

        Args:
            most: characters that it may write.

        Raises:
            InvalidRequest: messages that it cannot render; `param` is messages.
        """
        try:
            text = self._templates[name].render({**self._special_tokens, **context})
        except STOPS as error:
            # The template is a program over the client's messages: whatever stops it, the messages do not fit it.
            if isinstance(error, MemoryError):
                raise
            raise refused(stop_of(error)) from error
        if len(text) > most:
            raise refused(f"it writes {len(text)} characters, more than the {most} that it may")
        return text


class Variables(jinja2.meta.TrackingCodeGenerator):
    """The variables that a template reads, without running any of it: Jinja computes constants when it compiles, and a
    constant may have no end.
    """

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.optimizer = None

    @staticmethod
    def of(tree: jinja2.nodes.Template) -> frozenset[str]:
        """Returns their names. Raises one of STOPS: the template is not valid."""
        assert tree.environment is not None
        generator = Variables(tree.environment)
        generator.visit(tree)
        return frozenset(generator.undeclared_identifiers)

    def _output_child_to_const(self, node: jinja2.nodes.Expr, frame: Any, finalize: Any) -> str:
        if isinstance(node, jinja2.nodes.TemplateData):
            return super()._output_child_to_const(node, frame, finalize)
        raise jinja2.nodes.Impossible

    def visit_EvalContextModifier(  # noqa: N802  # Jinja's name
        self, node: jinja2.nodes.EvalContextModifier, frame: Any
    ) -> None:
        """See `jinja2.compiler.CodeGenerator`."""
        for keyword in node.options:
            self.visit(keyword.value, frame)
        frame.eval_ctx.volatile = True


def stop_of(error: BaseException) -> str:
    """Says what stopped a template."""
    match error:
        case RecursionError():
            return "it is nested too deeply"
        case MemoryError():
            return "it takes too much memory"
    return str(error)[:1000]


def refused(why: str) -> InvalidRequest:
    """Returns the error for messages that a template does not render."""
    return InvalidRequest(f"The model's chat template refuses these messages: {why}.", "messages")


def environment_of_templates() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Returns the environment of chat templates, as transformers makes it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


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


def _serve(parent: str) -> None:
    templates: Templates

    def set_up(setup: bytes) -> None:
        nonlocal templates
        templates = Templates(*json.loads(setup))

    def render(question: bytes) -> bytes:
        return templates.render(*json.loads(question)).encode(errors="surrogatepass")

    limits = SandboxLimits(set_up_s=COMPILE_S, cpu_s=RENDER_S, memory_bytes=MAX_BYTES)
    serve(int(parent), limits, set_up, render)


if __name__ == "__main__":
    _serve(*sys.argv[1:])

"""Chat templates, rendered exactly as transformers' `apply_chat_template` renders them.

Templates come with the model and are untrusted programs. They run in Jinja's immutable sandbox, on plain JSON only, and
in a separate process: some never end, or exhaust the memory. The names that they may use follow
transformers/utils/chat_template_utils.py (5.23).

As a program, `python -m baton.template PARENT`, it is a sandbox (`baton.sandbox`) that renders one chat after the
other. Its setup is JSON with the templates and the special tokens. Each question is JSON with a template's name, its
variables, and the maximum number of characters of its output.
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
"""Processor seconds that a chat may take."""
COMPILE_S = 2.0
MAX_BYTES = 512 * 2**20
STOPS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
    MemoryError,
)  # fmt: skip
"""Errors that may stop a template anywhere: it is a program."""


class Templates:
    """Templates of one model by name, in the process that renders them.

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
        """Return a template's output.

        Args:
            most: the maximum number of characters of the output.

        Raises:
            InvalidRequest: it cannot render the messages; `param` is messages.
        """
        try:
            text = self._templates[name].render({**self._special_tokens, **context})
        except STOPS as error:
            # The template is a program over the client's messages: any error in it means that it does not accept them.
            if isinstance(error, MemoryError):
                raise
            raise refused(stop_of(error)) from error
        if len(text) > most:
            raise refused(f"its output has {len(text)} characters; the limit is {most}")
        return text


class Variables(jinja2.meta.TrackingCodeGenerator):
    """Variables that a template reads, found without running it.

    Jinja evaluates constants when it compiles a template, and the evaluation of a constant may never end.
    """

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.optimizer = None

    @staticmethod
    def of(tree: jinja2.nodes.Template) -> frozenset[str]:
        """Return the names of the variables. Raises one of STOPS: the template is not valid."""
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
        """Override the method of `jinja2.compiler.CodeGenerator`."""
        for keyword in node.options:
            self.visit(keyword.value, frame)
        frame.eval_ctx.volatile = True


def stop_of(error: BaseException) -> str:
    """Return the reason why a template stopped."""
    match error:
        case RecursionError():
            return "it is nested too deeply"
        case MemoryError():
            return "it takes too much memory"
    return str(error)[:1000]


def refused(why: str) -> InvalidRequest:
    """Return the error for messages that a template does not render."""
    return InvalidRequest(f"The model's chat template refuses these messages: {why}.", "messages")


def environment_of_templates() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the environment of chat templates, as transformers creates it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """Extension that renders the body of `{% generation %}`, which marks the assistant's tokens for training."""

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
    """Dump JSON, unlike Jinja's filter without escaping HTML or sorting keys."""
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

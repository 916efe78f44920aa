"""The application: all commands, and errors as one sentence."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from baton.cluster import VERSION
from baton.errors import BatonError
from deploy.cli import chat, generate, lab, look, mistakes, operate, serve
from deploy.cli.options import print_error
from deploy.extras import advice

app = typer.Typer(
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"baton {VERSION or 'of no release'}")  # noqa: T201
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Baton: disaggregated serving of large language models."""


app.command()(serve.up)
app.command()(serve.run)
app.command()(serve.leave)
app.command()(serve.keys)
app.command()(generate.generate)
app.command()(chat.chat)
app.command(name="scale")(operate.scale_pool)
app.command()(operate.drain)
app.command()(operate.role)
app.command()(operate.status)
app.command()(operate.requests)
app.command()(look.logs)
app.command(name="config")(look.show_config)
app.command()(operate.autoscale)
app.command()(operate.doctor)
app.command()(lab.bench)
app.command()(lab.simulate)


def main() -> None:
    """Runs the command. An error of Baton's tree becomes one sentence and exit status 1, as does a package of an extra
    that is not installed; a command that is not understood, one and exit status 2.
    """
    try:
        mistakes.main(app)
    except BatonError as error:
        print_error(error)
        sys.exit(1)
    except ImportError as error:
        if not (missing := advice(error)):
            raise
        print_error(missing)
        sys.exit(1)

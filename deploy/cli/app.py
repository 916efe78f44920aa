"""The application: all commands, and errors as one sentence."""

from __future__ import annotations

import sys

import typer

from baton.errors import BatonError
from deploy.cli import generate, lab, mistakes, operate, serve
from deploy.cli.options import print_error

app = typer.Typer(
    help="Baton: disaggregated serving of large language models.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve.up)
app.command()(serve.run)
app.command()(serve.leave)
app.command()(serve.keys)
app.command()(generate.generate)
app.command(name="scale")(operate.scale_pool)
app.command()(operate.drain)
app.command()(operate.role)
app.command()(operate.status)
app.command()(operate.requests)
app.command()(operate.autoscale)
app.command()(operate.doctor)
app.command()(lab.bench)
app.command()(lab.simulate)


def main() -> None:
    """Runs the command. An error of Baton's tree becomes one sentence and exit status 1; a command that is not
    understood, one and exit status 2.
    """
    try:
        mistakes.main(app)
    except BatonError as error:
        print_error(error)
        sys.exit(1)

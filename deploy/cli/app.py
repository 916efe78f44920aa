"""The application: all commands, each of which is read when it is given; and errors as one sentence."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from baton.errors import BatonError
from deploy.cli import mistakes
from deploy.cli.options import print_error
from deploy.say import say

COMMANDS = {
    "up": ("serve:up", "Serve a model on this machine: Redis, Ray, both pools and the routers. Ctrl-C ends all of it."),
    "run": (
        "serve:run",
        "Run one part of a cluster in the foreground, as containers do. The parts find each other through Redis and "
        "Ray.",
    ),
    "leave": (
        "serve:leave",
        "Drain all workers of this machine; replacements start elsewhere first. Use it as a pod's preStop hook.",
    ),
    "keys": (
        "keys:keys",
        "Write the keys that one member of a cluster needs, so that its processes never see the cluster's secret.",
    ),
    "generate": ("generate:generate", "Stream an answer to a prompt."),
    "chat": ("chat:chat", "Talk with the model: each line is a message, answers are streamed."),
    "scale": ("operate:scale_pool", "Set the number of workers in a pool. Workers that leave migrate their requests."),
    "drain": (
        "operate:drain",
        "Remove a worker: its work goes to others, and another one takes its place. Waits until it is gone.",
    ),
    "role": ("operate:role", "Move a worker and its cache to the other pool, and adjust the sizes of both pools."),
    "status": (
        "operate:status",
        "Show the state of the cluster, or with --explain a request's timeline.",
    ),
    "requests": (
        "operate:requests",
        "List the latest requests with their outcome and where their time went, without their content.",
    ),
    "logs": (
        "look:logs",
        "Show what a worker or another part of the cluster has logged; without a name, list those that have a log.",
    ),
    "config": (
        "look:show_config",
        "Show every setting, its value, and where that comes from: default, file, or environment variable.",
    ),
    "autoscale": (
        "operate:autoscale",
        "Measure a running cluster for a while, and show how the autoscaler would size its pools.",
    ),
    "doctor": (
        "doctor:doctor",
        "Check this machine, and the cluster if one runs, and say how to fix what is wrong.",
    ),
    "bench": (
        "bench:bench",
        "Replay a trace against a running cluster, in real time, and report what its clients saw.",
    ),
    "simulate": (
        "simulate:simulate",
        "Replay a trace in virtual time, under Baton's placement policy and under baseline policies.",
    ),
}
"""Where each command is, as module:function of `deploy.cli`, and the first sentence of its help. So a command reads its
own module only, and `baton --help` none.
"""


def function_of(name: str) -> Callable[..., None]:
    """Returns the function that is the command, from its module."""
    module, _, function = COMMANDS[name][0].partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(f"deploy.cli.{module}"), function)
    return found


class _Command(TyperCommand):
    """A command by its name and first sentence; its options are read when it is given.

    The context that it makes is that of the whole command, which then runs.
    """

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        assert self.name
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(function_of(self.name))
        return typer.main.get_command(alone).make_context(info_name, args, parent, **extra)


class _Commands(TyperGroup):
    """The group of all commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, sentence) in COMMANDS.items():
            self.add_command(_Command(name, help=sentence))


app = typer.Typer(
    cls=_Commands,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from baton.cluster import VERSION

        say(f"baton {VERSION or 'of no release'}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Baton: disaggregated serving of large language models."""


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
        from deploy.extras import advice

        if not (missing := advice(error)):
            raise
        print_error(missing)
        sys.exit(1)

"""Application with all commands, which are imported on demand; it prints errors as one sentence."""

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
    "up": (
        "serve:up",
        "Serve models on this machine: Redis, Ray, the pools and the routers. Ctrl-C stops everything.",
    ),
    "run": (
        "serve:run",
        "Run one part of a cluster in the foreground, as containers do. Parts find each other through Redis and Ray.",
    ),
    "leave": (
        "serve:leave",
        "Drain all workers of this machine once replacements run elsewhere. Use it as a pod's preStop hook.",
    ),
    "keys": (
        "keys:keys",
        "Derive the keys of one cluster member from the cluster's secret, so that its processes never see the secret.",
    ),
    "generate": ("generate:generate", "Generate text for a prompt, and stream it."),
    "chat": ("chat:chat", "Chat with the model in the terminal. Each line is a message; replies are streamed."),
    "scale": (
        "operate:scale_pool",
        "Set the number of workers in a pool. Workers that stop migrate their requests first.",
    ),
    "drain": (
        "operate:drain",
        "Drain a worker: its requests migrate to other workers, and a new worker replaces it. Waits until it is gone.",
    ),
    "role": ("operate:role", "Move a worker with its cache to the other pool, and adjust the sizes of both pools."),
    "wake": (
        "operate:wake",
        "Start the workers of a model that sleeps, before a request does. A model that is awake is left as it is.",
    ),
    "adapters": (
        "operate:adapters",
        "List, add or remove LoRA adapters, which clients request by name like models.",
    ),
    "status": (
        "operate:status",
        "Show the state of the cluster, or with --explain a request's timeline.",
    ),
    "requests": (
        "operate:requests",
        "List the latest requests with their outcome and timing, without their content.",
    ),
    "logs": (
        "look:logs",
        "Show the log of a worker or of another part of the cluster. Without a name, list the available logs.",
    ),
    "config": (
        "look:show_config",
        "Show every setting with its value and its source: default, file, or environment variable.",
    ),
    "autoscale": (
        "operate:autoscale",
        "Measure a running cluster, and show how the autoscaler would size its pools.",
    ),
    "doctor": (
        "doctor:doctor",
        "Check this machine, and the cluster if one runs, and show how to fix each problem.",
    ),
    "bench": (
        "bench:bench",
        "Replay a trace against a running cluster in real time, and report goodput and latencies.",
    ),
    "simulate": (
        "simulate:simulate",
        "Replay a trace in virtual time, with Baton's placement policy and with baseline policies.",
    ),
}
"""Location of each command, as module:function in `deploy.cli`, and the first sentence of its help.

So a command imports its own module only, and `baton --help` imports none.
"""


def function_of(name: str) -> Callable[..., None]:
    """Import the module of a command, and return the command's function."""
    module, _, function = COMMANDS[name][0].partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(f"deploy.cli.{module}"), function)
    return found


class _Command(TyperCommand):
    """Placeholder of a command with its name and first sentence; the options are imported when it is invoked.

    Its context is the context of the real command, which then runs.
    """

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        assert self.name
        alone = typer.Typer(add_completion=False)
        alone.command(self.name)(function_of(self.name))
        return typer.main.get_command(alone).make_context(info_name, args, parent, **extra)


class _Commands(TyperGroup):
    """Group of all commands."""

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
    """Run the command of this process.

    Print one sentence and exit with status 1 if it raises one of Baton's errors, or needs a package of an extra that is
    not installed. Exit with status 2 if the command line cannot be parsed.
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

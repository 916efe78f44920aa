"""Invalid command lines: prints one sentence for each, with a suggestion."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import typer

from deploy.cli.options import print_error

SAID_ELSEWHERE = {"launch": "up", "ls": "status", "ps": "status", "serve": "up", "start": "up"}
"""Commands of other servers, and Baton's commands that do the same."""
WRONG_USE = 2
"""Exit status for an invalid command line."""


def run(app: typer.Typer, words: Sequence[str]) -> int:
    """Run the command, and return its exit status. Print one sentence if the command line is invalid.

    Args:
        app: the application.
        words: command line after the program's name; if empty, print the help.
    """
    try:
        status = app(list(words) or ["--help"], prog_name="baton", standalone_mode=False)
    except typer.Abort:
        return 1
    except typer.TyperException as error:
        print_error(_sentence(error))
        return WRONG_USE
    return status if isinstance(status, int) else 0


def main(app: typer.Typer) -> None:
    """Run the command of this process, and exit with its status."""
    sys.exit(run(app, sys.argv[1:]))


def _sentence(error: Any) -> str:
    """Return the error, and the command that shows help."""
    text = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    if number := re.fullmatch(r"No such option: (-\d[\d.]*)", text):
        text = f"{number[1]} is not allowed: numbers must be 0 or more"
    if (wrong := re.match(r"No such command '(\w+)'", text)) and (ours := SAID_ELSEWHERE.get(wrong[1])):
        text = f"{wrong[0]}. Did you mean '{ours}'?"
    text = re.sub(r" \(Possible options: ([^),]+).*\)$", r"; did you mean \1?", text)
    command = error.ctx.command_path if error.ctx else "baton"
    return text if text.endswith("?") else f"{text}; see `{command} --help`"

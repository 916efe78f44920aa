"""Commands that were typed wrongly: each gets one sentence, with what was probably meant."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import typer

from deploy.cli.options import print_error

SAID_ELSEWHERE = {"launch": "up", "ls": "status", "ps": "status", "serve": "up", "start": "up"}
"""Commands of other servers, and ours that do the same."""
WRONG_USE = 2
"""Exit status of a command that was not understood."""


def run(app: typer.Typer, words: Sequence[str]) -> int:
    """Runs the command, and returns its exit status. Words that are not understood become one sentence.

    Args:
        app: the application.
        words: the command line after the program's name; none: the help.
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
    """Runs the command of this process, and ends it."""
    sys.exit(run(app, sys.argv[1:]))


def _sentence(error: Any) -> str:
    """What was wrong, and where to look."""
    text = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    if number := re.fullmatch(r"No such option: (-\d[\d.]*)", text):
        text = f"{number[1]} is not possible: numbers here are 0 or more"
    if (wrong := re.match(r"No such command '(\w+)'", text)) and (ours := SAID_ELSEWHERE.get(wrong[1])):
        text = f"{wrong[0]}. Did you mean '{ours}'?"
    text = re.sub(r" \(Possible options: ([^),]+).*\)$", r"; did you mean \1?", text)
    command = error.ctx.command_path if error.ctx else "baton"
    return text if text.endswith("?") else f"{text}; `{command} --help` shows what there is"

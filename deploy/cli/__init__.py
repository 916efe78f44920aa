"""The `baton` command: one file for each group of commands.

Commands import what they need when they run, so that `baton --help` stays fast; `app` puts them together and prints
errors as one sentence.
"""

from deploy.cli.app import main

__all__ = ["main"]

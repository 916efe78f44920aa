"""The `baton` command.

app                                           all commands by name, imported on demand; error output
serve, keys, generate, chat, operate, look,
doctor, bench, simulate                       the commands: options, help, and one call each
serving, leaving, conversation, part_logs,
diagnosis                                     implementations of commands that have no package elsewhere
options, settings, mistakes, hints            shared by all commands

The module of a command imports little more than its options need, so that `--help` is fast. The command's function
imports its implementation.
"""

from deploy.cli.app import main

__all__ = ["main"]

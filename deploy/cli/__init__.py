"""The `baton` command.

app                                           all commands by name, each read when it is given; errors
serve, keys, generate, chat, operate, look,
doctor, bench, simulate                       the commands: their options, their help, and a call
serving, leaving, conversation, part_logs,
diagnosis                                     what those calls do, if no other room does it
options, settings, mistakes, hints            what commands have in common

The module of a command imports little more than its options need, so that `--help` is fast. The command's function
imports what it calls.
"""

from deploy.cli.app import main

__all__ = ["main"]

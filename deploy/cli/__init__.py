"""The `baton` command. Commands import what they need when they run, so that `baton --help` stays fast."""

from deploy.cli.app import main

__all__ = ["main"]

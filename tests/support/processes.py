"""Processes that tests look at while these end."""

from __future__ import annotations

import psutil


def command_line(process: psutil.Process) -> list[str]:
    """Returns its arguments; none if it has ended, its parent having heard of that or not."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []

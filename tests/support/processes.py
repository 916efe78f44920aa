"""Processes that tests look at while these end."""

from __future__ import annotations

from collections.abc import Iterable

import psutil


def running(processes: Iterable[psutil.Process], program: str) -> list[psutil.Process]:
    """Returns those that run a program, by a part of their command line."""
    return [process for process in processes if any(program in word for word in command_line(process))]


def command_line(process: psutil.Process) -> list[str]:
    """Returns its arguments; none if it has ended, its parent having heard of that or not."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []

"""Result of a check, and its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from baton.errors import BatonError, ConfigError
from deploy.extras import ALL_IN_USE, advice, pip_command

State = Literal["ok", "warn", "fail"]
REINSTALL = f"reinstall it: {pip_command(ALL_IN_USE)} --force-reinstall"


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check. `fix` says what to do; empty if nothing is wrong."""

    name: str
    state: State
    found: str
    fix: str = ""


def judged(name: str, is_good: bool, found: str, fix: str, otherwise: State = "fail") -> Check:
    """Return an ok check, or one with state `otherwise` and the fix."""
    return Check(name, "ok", found) if is_good else Check(name, otherwise, found, fix)


def guarded(name: str, look: Callable[[], Iterable[Check]], fix: str = REINSTALL) -> list[Check]:
    """Return the results of a group of checks, followed by a failure if it raises, so that other groups still run."""
    checks = []
    try:
        for check in look():
            checks.append(check)  # noqa: PERF402 - checks before an error count
    except ConfigError as error:  # its message has the fault, then the fix
        checks.append(Check(name, "fail", *str(error).split("; ", 1)))
    except (BatonError, ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ImportError) and (missing := advice(error)):
            checks.append(Check(name, "fail", *missing.split("; ", 1)))
        else:
            checks.append(Check(name, "fail", f"{type(error).__name__}: {error}", fix))
    return checks


def show(checks: list[Check], console: Console) -> None:
    marks = {"ok": "[green]ok  [/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]FAIL[/red]"}
    for check in checks:
        console.print(marks[check.state], end=" ", markup=True)
        console.print(f"{check.name}: {check.found}", highlight=False, soft_wrap=True, markup=False)
        if check.fix:
            console.print(f"     -> {check.fix}", highlight=False, soft_wrap=True, markup=False)


def names(items: Iterable[str], most: int = 5) -> str:
    """Return a readable list: the first few items, and the number of the rest."""
    listed = sorted(items)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more

"""The result of a check, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from baton.errors import BatonError, ConfigError
from deploy.extras import ALL_IN_USE, advice, pip_command

State = Literal["ok", "warn", "fail"]
REINSTALL = f"install it again: {pip_command(ALL_IN_USE)} --force-reinstall"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `fix` is what to do; empty when all is well."""

    name: str
    state: State
    found: str
    fix: str = ""


def judged(name: str, is_good: bool, found: str, fix: str, otherwise: State = "fail") -> Check:
    """Well, or `otherwise` with the remedy."""
    return Check(name, "ok", found) if is_good else Check(name, otherwise, found, fix)


def guarded(name: str, look: Callable[[], Iterable[Check]], fix: str = REINSTALL) -> list[Check]:
    """The results of a group of checks, or one failure in their place: a broken part does not hide the others."""
    checks = []
    try:
        for check in look():
            checks.append(check)  # noqa: PERF402 - those before an error count
    except ConfigError as error:  # its sentence names what was found, then what to do
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
    """A list for people: the first few, and how many more there are."""
    listed = sorted(items)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more

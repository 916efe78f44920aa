"""What of the distribution's extras is installed: one sentence for what is missing, and the command that brings it.

The installed distribution's own metadata says which extra brings a package, so that stands in pyproject.toml alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "baton-serving"
ALL_IN_USE = ("worker", "local")
"""The extras with which `baton up` runs."""
DEVELOPMENT = "dev"
"""The extra of those who work on the source; nobody else is sent to it."""


def requirements(extras: Collection[str]) -> Iterator[Requirement]:
    """The requirements of the installed distribution and of its extras; none where it is not installed."""
    for extra, requirement in _every_requirement():
        if not extra or extra in extras:
            yield requirement


def pip_command(extras: Collection[str]) -> str:
    """The command that installs the extras."""
    listed = f"[{','.join(sorted(extras))}]" if extras else ""
    return f"pip install '{DISTRIBUTION}{listed}'"


def lacking(*modules: str) -> str:
    """What to do about modules of extras that are not installed, in one sentence; empty: all are there.

    Args:
        modules: names by which code imports them, at the top level.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if not missing:
        return ""
    are = "is" if len(missing) == 1 else "are"
    return f"{_listed(missing)} {are} not installed; get what is missing with: {pip_command(_extras_of(missing))}"


def advice(error: ImportError) -> str:
    """What to do about an import that failed, in one sentence; empty: no extra brings what is missing."""
    module = (error.name or "").partition(".")[0]
    extras = _extras_of([module])
    return f"this needs {module}, which is not installed; get it with: {pip_command(extras)}" if extras else ""


def _extras_of(modules: Collection[str]) -> list[str]:
    """The extras that bring the modules; of several that bring the same, the first one."""
    found: dict[str, str] = {}
    for extra, requirement in _every_requirement():
        module = requirement.name.replace("-", "_").lower()
        if extra and module in modules:
            found.setdefault(module, extra)
    return sorted(set(found.values()))


def _every_requirement() -> Iterator[tuple[str, Requirement]]:
    """Requirements for this Python and this machine, and the extra that brings each; empty: it is always there."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
        extras = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, lines):
        for extra in ("", *(each for each in extras if each != DEVELOPMENT)):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                yield extra, requirement
                break


def _listed(names: list[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]

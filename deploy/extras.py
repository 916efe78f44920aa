"""Extras of the distribution: names the missing packages and the command that installs them.

The metadata of the installed distribution maps packages to extras, so only pyproject.toml defines that mapping.
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
"""Extras that `baton up` needs."""
DEVELOPMENT = "dev"
"""Extra for developers of Baton; hints for users never name it."""


def requirements(extras: Collection[str]) -> Iterator[Requirement]:
    """Yield the requirements of the installed distribution and of `extras`; none if it is not installed."""
    for extra, requirement in _every_requirement():
        if not extra or extra in extras:
            yield requirement


def pip_command(extras: Collection[str]) -> str:
    """Return the command that installs the extras."""
    listed = f"[{','.join(sorted(extras))}]" if extras else ""
    return f"pip install '{DISTRIBUTION}{listed}'"


def lacking(*modules: str) -> str:
    """Return one sentence that names the missing modules and how to install them; "" if none is missing.

    Args:
        modules: top-level names by which code imports them.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if not missing:
        return ""
    are = "is" if len(missing) == 1 else "are"
    return f"{_listed(missing)} {are} not installed; get what is missing with: {pip_command(_extras_of(missing))}"


def advice(error: ImportError) -> str:
    """Return one sentence on how to fix a failed import; "" if no extra installs the missing module."""
    module = (error.name or "").partition(".")[0]
    extras = _extras_of([module])
    return f"this needs {module}, which is not installed; get it with: {pip_command(extras)}" if extras else ""


def _extras_of(modules: Collection[str]) -> list[str]:
    """Return the extras that install the modules; the first one of several for the same module."""
    found: dict[str, str] = {}
    for extra, requirement in _every_requirement():
        module = requirement.name.replace("-", "_").lower()
        if extra and module in modules:
            found.setdefault(module, extra)
    return sorted(set(found.values()))


def _every_requirement() -> Iterator[tuple[str, Requirement]]:
    """Yield (extra, requirement) for this Python and this machine; the extra is "" if no extra is needed."""
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

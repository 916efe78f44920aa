"""Makes an interpreter as bare as a machine that has a GPU and the packages of `tests/gpu/README.md`, and no more.

Python imports this by itself in every process that has this folder in PYTHONPATH. What is of no package in `PACKAGES`,
nor of one that these need, cannot be found then. Baton's own code may import `PACKAGES` and `BROUGHT` alone:
what else comes with them differs from version to version.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from types import ModuleType
from typing import Any

PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "numpy": "numpy",
    "xxhash": "xxhash",
    "pyyaml": "yaml",
}
"""What is installed, by name, with the module that it is for."""
BROUGHT = {"safetensors", "tokenizers"}
"""What else Baton's own code may import: transformers cannot do without, whatever its version."""
OWN = frozenset({"baton", "engine", "kvstore", "tests"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def installed() -> frozenset[str]:
    """Returns the names of the packages, and of those that they need, however deep."""
    found: set[str] = set()
    rest = list(PACKAGES)
    while rest:
        if (name := _normal(rest.pop())) in found:
            continue
        found.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:  # for another platform, or a CPU build of torch, which has no Triton
            continue
        rest += [match[0] for each in needed if "extra ==" not in each and (match := _NAME.match(each))]
    return frozenset(found)


@cache
def _owners() -> dict[str, list[str]]:
    return {module: [_normal(name) for name in names] for module, names in packages_distributions().items()}


@cache
def is_there(module: str) -> bool:
    """Returns whether a module of some package can be imported on such a machine; of no package it can."""
    owners = _owners().get(module, [])
    return not owners or module in OWN or not installed().isdisjoint(owners)


class BareFinder:
    """Finds what the finders of an interpreter do, of the packages that are there."""

    def __init__(self, finders: Iterable[Any]) -> None:
        self._finders = [finder for finder in finders if hasattr(finder, "find_spec")]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module = name.partition(".")[0]
        if module not in sys.stdlib_module_names and not is_there(module):
            return None
        found = (finder.find_spec(name, path, target) for finder in self._finders)
        return next((spec for spec in found if spec is not None), None)

    def find_distributions(self, *args: Any) -> Iterator[Any]:
        """Yields what is known of packages: all of them, since only imports fail."""
        for finder in self._finders:
            yield from getattr(finder, "find_distributions", lambda *_: ())(*args)


_import = builtins.__import__


def _import_by(name: str, *args: Any, **kwargs: Any) -> Any:
    """Arguments are those of `__import__`, by place or by name."""
    importer, _, _, level = (*args, None, None, None, None)[:4]
    importer, level = importer or kwargs.get("globals") or {}, level or kwargs.get("level") or 0
    by, module = str(importer.get("__name__", "")), name.partition(".")[0]
    is_own = by.partition(".")[0] in OWN and level == 0
    if is_own and module not in sys.stdlib_module_names and module not in (*OWN, *BROUGHT, *PACKAGES.values()):
        raise ModuleNotFoundError(f"{by} imports {module}, which a bare machine may lack", name=module)
    return _import(name, *args, **kwargs)


sys.meta_path[:] = [BareFinder(list(sys.meta_path))]
builtins.__import__ = _import_by

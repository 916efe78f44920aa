"""Each package says what it is for and which names others may import. Some load torch, so all are read as text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.unit.test_house import PACKAGES, ROOT

ROOMS = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for path in (ROOT / package).rglob("__init__.py")
    if path.parent.name not in ("v1", "v3")
)
WORDS_OF_A_PARAGRAPH = 25


def submodules(room: Path) -> set[str]:
    modules = {path.stem for path in room.glob("*.py") if not path.stem.startswith("__")}
    return modules | {path.parent.name for path in room.glob("*/__init__.py")}


def bound_in(tree: ast.Module) -> set[str]:
    """Names that the module itself defines or imports."""
    names: set[str] = set()
    for statement in tree.body:
        match statement:
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names |= {alias.asname or alias.name for alias in aliases}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


def exported_by(tree: ast.Module) -> list[str]:
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return [str(name) for name in ast.literal_eval(value)]
    return []


def test_every_package_is_looked_at() -> None:
    assert set(PACKAGES) <= set(ROOMS)
    assert len(ROOMS) > 40


@pytest.mark.parametrize("room", ROOMS)
def test_a_package_says_what_it_is_for_and_exports_names_that_exist(room: str) -> None:
    tree = ast.parse((ROOT / room / "__init__.py").read_text())
    assert len((ast.get_docstring(tree) or "").split()) >= WORDS_OF_A_PARAGRAPH
    exported = exported_by(tree)
    assert exported
    assert len(exported) == len(set(exported))
    if not set(exported) <= bound_in(tree):
        assert set(exported) == submodules(ROOT / room), "its submodules: all of them, and nothing else"

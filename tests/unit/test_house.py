"""Habits of the house that no linter knows."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "baton",
    "engine",
    "kvstore",
    "router",
    "prefill_worker",
    "decode_worker",
    "worker",
    "deploy",
    "lab",
    "tools",
)
MAX_POSITIONAL_FIELDS = 4
MADE_IN_HOT_LOOPS = {"Header", "Terms"}
"""A chunk's header, and what placement reckons for each candidate: keywords cost a tenth of making one."""


def product_files() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (path for path in (ROOT / package).rglob("*.py") if not {"v1", "v3"} & set(path.parts))


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax, which many tests look at."""
    return ast.parse(path.read_text())


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Everything in a tree, in the order of `ast.walk`, which is slow."""
    nodes = tuple(ast.walk(tree))
    gc.freeze()  # these are kept, and are so many that each later collection of garbage would take long
    return nodes


def dataclasses_of(tree: ast.AST) -> Iterator[tuple[ast.ClassDef, ast.expr]]:
    for node in nodes_of(tree):
        if isinstance(node, ast.ClassDef):
            for decorator in node.decorator_list:
                called = decorator.func if isinstance(decorator, ast.Call) else decorator
                if ast.unparse(called) == "dataclass":
                    yield node, decorator


def fields_of(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [
        line
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and "ClassVar" not in ast.unparse(line.annotation)
        and not (line.value is not None and "init=False" in ast.unparse(line.value))
    ]


def test_what_has_many_fields_is_made_by_their_names() -> None:
    """A field more, or in another place, then changes nothing for those who make one."""
    num_large, positional = 0, set()
    for path in product_files():
        for node, decorator in dataclasses_of(tree_of(path)):
            if len(fields_of(node)) > MAX_POSITIONAL_FIELDS:
                num_large += 1
                if "kw_only=True" not in ast.unparse(decorator):
                    positional.add(node.name)
    assert num_large > 50
    assert positional == MADE_IN_HOT_LOOPS


FRAGMENT = re.compile(
    r"(Of|That|By|With|From|To|On|In|Until|Between|Since|Before|After|While|As|For|Because"
    r"|Its|It|Their|They|Those|Whose|The same)\b"
)
"""Beginnings of docstrings that mean nothing without the name above them."""


def docstrings_of(tree: ast.AST) -> Iterator[str]:
    """Also those of fields and constants, which follow them."""
    for node in nodes_of(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(ast.Constant(str(text))):
                    yield text.strip()


def test_every_docstring_can_be_read_alone() -> None:
    fragments: dict[str, list[str]] = {}
    for path in product_files():
        for text in docstrings_of(tree_of(path)):
            if FRAGMENT.match(text):
                fragments.setdefault(path.relative_to(ROOT).as_posix(), []).append(text)
    assert not fragments


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes_of(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


MAX_LINES_OF_A_FILE = 700
MAX_LINES_OF_A_FUNCTION = 60
MAX_POSITIONAL_ARGUMENTS = 5
MANY_ARGUMENTS = {
    "_take_notes",
    "paged_attention",
    "plan",
    "autoscale",
    "doctor",
    "generate",
    "write",
    "attend",
    "combine",
    "_shares_of",
    "_look",
    "_look_over",
    "norm",
    "add_norm",
    "rotate",
    "multiply",
    "gather",
    "scatter",
    "_segments_of",
}
"""Functions that transformers calls; kernels; the two ends of a plan; commands, to which typer gives their
options by name."""


def test_files_and_functions_are_of_a_size_to_be_read() -> None:
    long_files, too_large = set(), []
    for path in product_files():
        name = path.relative_to(ROOT).as_posix()
        if len(path.read_text().splitlines()) > MAX_LINES_OF_A_FILE:
            long_files.add(name)
        for function in functions_of(tree_of(path)):
            assert function.end_lineno is not None
            if function.end_lineno - function.lineno + 1 > MAX_LINES_OF_A_FUNCTION:
                too_large.append(f"{name}: {function.name} is long")
            arguments = [one.arg for one in function.args.posonlyargs + function.args.args if one.arg != "self"]
            if len(arguments) > MAX_POSITIONAL_ARGUMENTS and function.name not in MANY_ARGUMENTS:
                too_large.append(f"{name}: {function.name} has {len(arguments)} arguments by position")
    assert not long_files
    assert not too_large


NAME_OF_A_TYPE = re.compile(r"_?[A-Z]\w*[a-z]")
"""Constants are in capitals, and a type variable of one letter means what the function or class says that has it."""


def types_of(tree: ast.Module) -> Iterator[str]:
    """Names of the classes, and those that the module gives to other types: aliases and type variables."""
    yield from (node.name for node in nodes_of(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(name)]) | ast.AnnAssign(target=ast.Name(name), value=ast.expr()):
                if NAME_OF_A_TYPE.match(name):
                    yield name


def test_the_name_of_a_type_has_one_meaning_in_a_package() -> None:
    files: dict[str, list[str]] = {}
    for path in product_files():
        for name in types_of(tree_of(path)):
            package = path.parent.relative_to(ROOT).as_posix()
            files.setdefault(f"{package}: {name.lstrip('_')}", []).append(path.name)
    assert len(files) > 400
    assert {name: where for name, where in files.items() if len(where) > 1} == {}


def imports_of(path: Path) -> Iterator[str]:
    """Modules that a file imports, wherever in it: at its top, in a function, or for its types alone."""
    for node in nodes_of(tree_of(path)):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(str(module), names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)


def test_no_module_imports_itself_through_others() -> None:
    """The packages' own `__init__` apart, which import their rooms to export their names."""
    modules = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
        for path in product_files()
        if path.name != "__init__.py"
    }
    arrows = {name: {one for one in imports_of(path) if one in modules} for name, path in modules.items()}
    assert sum(map(len, arrows.values())) > 500
    with_ways_on = set(arrows)
    while ended := {name for name in with_ways_on if not arrows[name] & with_ways_on}:
        with_ways_on -= ended
    assert not with_ways_on

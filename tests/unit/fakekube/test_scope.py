"""The test Kubernetes is a package of its own: it stands without Baton and without the other tests."""

from __future__ import annotations

import ast
from pathlib import Path

from tests import fakekube

FOLDER = Path(fakekube.__file__).parent
FOREIGN = (
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
    "tests",
)


def imported(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom():
                assert node.level == 0
                assert node.module
                names.append(node.module)
    return names


def test_it_imports_nothing_of_baton_and_of_the_other_tests() -> None:
    names = {path.relative_to(FOLDER): imported(path) for path in FOLDER.rglob("*.py")}
    assert len(names) > 40
    assert sum("tests.fakekube" in name for found in names.values() for name in found) > 100
    foreign = {
        f"{path}: {name}"
        for path, found in names.items()
        for name in found
        if name.split(".")[0] in FOREIGN and not name.startswith("tests.fakekube")
    }
    assert not foreign

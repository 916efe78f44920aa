"""The tool that breaks the product on purpose: a tree of two files, faults that are seen and one that is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools import mutants
from tools.mutants import BadList, Mutant

PRODUCT = "def double(number):\n    doubled = 2 * number\n    return doubled\n"
TEST = "from product import double\n\ndef test_double():\n    assert double(0) == 0\n    assert double(2) == 4\n"
RUN = """
import sys
from pathlib import Path
from tools import mutants
mutants.ROOT, mutants.LIST = Path(sys.argv[1]), Path(sys.argv[1]) / "list.yaml"
mutants.IMPORTED_BEFORE = ("pytest", "pytest_timeout")
sys.exit(mutants.main(sys.argv[2:]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "product.py").write_text(PRODUCT)
    (tmp_path / "tests" / "unit" / "test_product.py").write_text(TEST)
    faults = [
        {"name": "three", "old": "2 * number", "new": "3 * number"},
        {"name": "sum", "old": "2 * number", "new": "2 + number"},
        {"name": "square", "old": "2 * number", "new": "number * number"},
        {"name": "same", "old": "2 * number", "new": "number + number", "equivalent": "it is the same"},
        {"name": "broken", "old": "2 * number", "new": "2 *"},
    ]
    group = {"file": "product.py", "tests": "tests/unit/test_product.py", "mutants": faults}
    (tmp_path / "list.yaml").write_text(yaml.safe_dump([group]))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def run(tree: Path, *names: str) -> tuple[int, str]:
    """Its exit status, and what it printed. The one plugin that it needs is loaded, which saves a second a fault."""
    command = [sys.executable, "-c", RUN, str(tree), "--jobs", "2", *names]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}
    done = subprocess.run(
        command, cwd=mutants.ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def test_what_is_seen_what_lives_and_what_is_no_fault_are_told_apart(tree: Path) -> None:
    returncode, output = run(tree)
    verdicts = {line.split()[-1]: line.split()[:2] for line in output.splitlines() if line.startswith(("ok ", "BAD "))}
    assert verdicts == {
        "tests/unit/test_product.py": ["ok", "green"],
        "three": ["ok", "red"],
        "sum": ["ok", "red"],
        "square": ["BAD", "green"],
        "same": ["ok", "green"],
        "broken": ["BAD", "error"],
    }
    assert returncode == 1
    assert "4 faults: 2 are seen, 2 of them by unit and contract tests; 1 more are equivalent" in output
    assert (tree / "product.py").read_text() == PRODUCT, "faults are tried in copies"


def test_it_succeeds_when_all_is_as_the_list_says(tree: Path) -> None:
    assert run(tree, "three", "same")[0] == 0


def test_a_test_that_fails_by_itself_has_seen_nothing(tree: Path) -> None:
    (tree / "tests" / "unit" / "test_product.py").write_text("def test_it():\n    assert False\n")
    returncode, output = run(tree, "three")
    assert returncode == 1
    assert "without a fault" in output.splitlines()[-1]


@pytest.mark.parametrize("text", ["", PRODUCT + PRODUCT])
def test_a_line_that_is_not_there_once_is_an_error(
    tree: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "product.py").write_text(text)
    monkeypatch.setattr(mutants, "ROOT", tree)
    monkeypatch.setattr(mutants, "LIST", tree / "list.yaml")
    assert mutants.main([]) == 1
    assert f"three: '2 * number' is {text.count('2 *')} times in product.py, not once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("test", "is_there"),
    [
        ("tests/unit/test_product.py", True),
        ("tests/unit/test_product.py::test_double", True),
        ("tests/unit/test_product.py::test_double[of a case]", True),
        ("tests/unit/test_product.py::test_doub", False),
        ("tests/unit/test_products.py", False),
    ],
)
def test_a_test_that_is_not_there_is_an_error(
    tree: Path, test: str, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tree)
    mutant = Mutant(name="m", file="product.py", old="2 * number", new="3", tests=(test,))
    if is_there:
        mutants.check([mutant])
        return
    with pytest.raises(BadList, match="m: no tests/unit/test_product"):
        mutants.check([mutant])


def test_the_list_fits_the_tree() -> None:
    """A change of a line that the list names is seen in `make check`; `make chaos` tries the faults."""
    mutants.check(mutants.load())


def test_a_name_and_a_test_are_needed() -> None:
    mutant = Mutant(name="m", file="product.py", old="a", new="b", tests=("tests/integration/test_x.py",))
    assert not mutant.is_fast
    with pytest.raises(BadList, match="0 times"):
        mutant.applied("c")
    assert mutant.applied("cac") == "cbc"

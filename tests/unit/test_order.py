"""How the tests themselves are handed out: xdist's own scheduler, told what `tests.support.order` tells it."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_xdist_make_scheduler
from tests.support.order import ONE_CHART, ONE_CLUSTER, ONE_INTERPRETER, ONE_REAL_CLUSTER, ONE_SYNTAX, put_first

ROOT = Path(__file__).parents[2]
LOG: Any = SimpleNamespace(loadscopesched=lambda *told: None, loadfilesched=lambda *told: None)


class Process:
    """One of xdist's, which notes what it is to run."""

    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.shutting_down = False
        self.told: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.told += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def handed_out(tests: list[str], num_processes: int) -> list[list[str]]:
    """What each process has run in the end, in its order; they take turns."""
    config: Any = SimpleNamespace(
        getvalue=lambda name: ["popen"] * num_processes, option=SimpleNamespace(loadscopereorder=False)
    )
    scheduler = pytest_xdist_make_scheduler(config, LOG)
    processes: list[Any] = [Process(number) for number in range(num_processes)]
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, tests)
    scheduler.schedule()
    for turn in itertools.count():
        waiting = [process for process in processes if len(process.told) > turn]
        if not waiting:
            return [[tests[index] for index in process.told] for process in processes]
        for process in waiting:
            scheduler.mark_test_complete(process, process.told[turn])
    raise AssertionError


def test_a_files_tests_run_in_one_process_in_their_order() -> None:
    tests = [f"tests/{file}.py::test_{number}[a::b]" for file in "abcdefg" for number in range(5)]
    ran = handed_out(tests, 3)
    assert sorted(itertools.chain(*ran)) == sorted(tests)
    files = [{test.partition("::")[0] for test in process} for process in ran]
    assert sum(map(len, files)) == len(set().union(*files)) == 7
    assert all(process == [test for test in tests if test in process] for process in ran)
    assert [process[0].partition("::")[0] for process in ran] == ["tests/a.py", "tests/b.py", "tests/c.py"]


@pytest.mark.parametrize("files", [ONE_CLUSTER, ONE_CHART, ONE_INTERPRETER, ONE_SYNTAX])
def test_files_that_share_something_run_in_one_process(files: set[str]) -> None:
    shared = sorted(f"{file}::test_{number}" for file in files for number in range(4))
    others = [f"tests/integration/test_{file}.py::test_{number}" for file in "abc" for number in range(4)]
    ran = handed_out([*others[:4], *shared[:9], *others[4:], *shared[9:]], 3)
    assert [test for process in ran for test in process if test in shared] == shared
    assert sum(bool(set(process) & set(shared)) for process in ran) == 1


@pytest.mark.parametrize(
    ("folder", "argument", "files"),
    [
        ("integration", "arithmetic_cluster: Cluster", ONE_CLUSTER),
        ("integration", "split_cluster: Cluster", ONE_REAL_CLUSTER),
        ("unit", "interpreter: Executor", ONE_INTERPRETER),
    ],
)
def test_those_are_the_files_that_ask_for_it(folder: str, argument: str, files: set[str]) -> None:
    """A file that shares the session's cluster and is not named would bring up another one in its process."""
    asking = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests" / folder).rglob("test_*.py")
        if argument in path.read_text() and path != Path(__file__)
    }
    assert asking == files


def test_what_is_marked_first_comes_first_and_the_rest_stays() -> None:
    def item(name: str, is_first: bool) -> Any:
        return SimpleNamespace(
            name=name, get_closest_marker=lambda mark: mark if is_first and mark == "first" else None
        )

    items = [item(name, name.isupper()) for name in "aBcDeF"]
    put_first(items)
    assert [each.name for each in items] == ["B", "D", "F", "a", "c", "e"]

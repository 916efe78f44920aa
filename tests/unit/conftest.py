"""What unit tests share that takes long to be brought up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor

import pytest


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Executor]:
    """A process with Triton's interpreter: one for the tests of all files, since its imports take long."""
    from tests.support import interpreted

    with interpreted.process(TRITON_INTERPRET="1") as pool:
        yield pool

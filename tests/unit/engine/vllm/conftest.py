"""Fixtures of the tests of `engine.vllm`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.engine.vllm.hosts import Hosts


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    (tmp_path / "hosts").mkdir()
    made = Hosts(tmp_path / "hosts")
    yield made
    made.close()

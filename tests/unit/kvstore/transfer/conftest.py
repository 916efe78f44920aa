"""What tests of transfers share: an NCCL without GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.nccl import Knobs, fake_nccl


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Knobs]:
    """Has the transports take the fake in the place of NCCL; a test turns what it gets."""
    with fake_nccl(monkeypatch) as knobs:
        yield knobs

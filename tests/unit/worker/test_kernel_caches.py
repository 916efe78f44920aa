"""Kernels that another user may have compiled are not loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from baton.own_files import make_own
from tests.support.foreign import given_away
from worker.kernel_caches import kernel_caches, own_kernel_caches


def test_a_cache_of_another_is_left_for_one_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    environ = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    for folder in kernel_caches(environ).values():
        make_own(folder)
    with own_kernel_caches(environ) as variables:
        assert variables == {}
    given_away(tmp_path / ".triton" / "cache", monkeypatch)
    given_away(tmp_path / "inductor", monkeypatch)
    with caplog.at_level(logging.WARNING), own_kernel_caches(environ) as variables:
        assert set(variables) >= {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
        assert "(TRITON_CACHE_DIR), since " in caplog.text
        places = {Path(folder).parent for folder in variables.values()}
        assert [place.stat().st_mode & 0o777 for place in places] == [0o700]
    assert not any(place.exists() for place in places)


def test_where_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    usual = kernel_caches({})
    assert usual["TRITON_CACHE_DIR"] == tmp_path / ".triton" / "cache"
    assert usual["TORCHINDUCTOR_CACHE_DIR"].name.startswith("torchinductor_")
    assert kernel_caches({"TRITON_CACHE_DIR": "/x"}) == {**usual, "TRITON_CACHE_DIR": Path("/x")}

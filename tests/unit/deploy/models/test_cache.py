"""Of a cache that several users share, the parts that are another's are not used."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from baton.config import ClusterConfig
from deploy.local.child_log import log_folder
from deploy.local.log_files import log_files
from deploy.models import cache_dir, ignore_progress, own_part
from deploy.models.catalogue import CatalogueModel
from deploy.models.wheel import catalogue_folder
from tests.support.foreign import given_away
from tests.unit.deploy.models.test_catalogue import made, tiny

__all__ = ["made", "tiny"]


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return ClusterConfig(cache_dir=str(tmp_path / "shared"))


def test_a_part_of_another_is_replaced_by_ones_own(
    shared: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = cache_dir(shared)
    assert own_part(cache, "logs") == cache / "logs"
    (cache / "logs").mkdir(parents=True)
    assert own_part(cache, "logs") == cache / "logs"
    assert caplog.text == ""
    given_away(cache / "logs", monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert own_part(cache, "logs") == tmp_path / "home" / "baton" / "logs"
    assert f"{cache / 'logs'} belongs to user " in caplog.text


def test_logs_are_nobody_elses(shared: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = log_folder(shared)
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert first.parent == tmp_path / "shared" / "logs"
    given_away(first.parent, monkeypatch)
    second = log_folder(shared)
    assert second.parent == tmp_path / "home" / "baton" / "logs"
    (second / "router.log").touch()
    assert log_files(cache_dir(shared)) == {"router": second / "router.log"}


def test_a_folder_of_logs_that_somebody_has_made_before_is_not_used(
    shared: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "20261129-100000")
    made = log_folder(shared)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    made.rmdir()
    made.symlink_to(elsewhere)
    with pytest.raises(FileExistsError):
        log_folder(shared)


def test_a_model_of_another_is_not_served(
    shared: ClusterConfig,
    tiny: CatalogueModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = cache_dir(shared)
    theirs = catalogue_folder(tiny, cache, ignore_progress)
    assert catalogue_folder(tiny, cache, ignore_progress) == theirs
    modes = {stat.S_IMODE(path.stat().st_mode) & 0o022 for path in (theirs, *theirs.iterdir())}
    assert modes == {0}
    given_away(theirs.parent, monkeypatch)
    ours = catalogue_folder(tiny, cache, ignore_progress)
    assert ours.parent == tmp_path / "home" / "baton" / "models"
    given_away(ours, monkeypatch)
    if ours.stat().st_uid == 65534:  # an ordinary user has given all away by now
        assert catalogue_folder(tiny, cache, ignore_progress) == ours
        assert ours.stat().st_uid != 65534, "it is made anew"

"""What another user may have written is not opened, and no folder of theirs is written to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from baton.own_files import ForeignFile, close_to_others, make_own, open_own, why_foreign
from tests.support.foreign import FOREIGN, given_away


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("ours")
    path.chmod(0o644)
    return path


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_others_may_have_written_is_not_opened(
    kind: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_own(file) as opened:
        assert opened.read() == b"ours"
    FOREIGN[kind](file, monkeypatch)
    with pytest.raises(ForeignFile, match=str(file)), open_own(file):
        pass


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("pipe", "."):
        with pytest.raises(ForeignFile, match="not a regular file"), open_own(tmp_path / name):
            pass
    with pytest.raises(FileNotFoundError), open_own(tmp_path / "none"):
        pass


def test_what_was_looked_at_is_what_is_read(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("another's")
    with open_own(file) as opened:
        other.rename(file)
        assert opened.read() == b"ours"


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_own(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o755
    (tmp_path / "a" / "b").chmod(0o2777)
    assert why_foreign(tmp_path / "a" / "b") == ""
    make_own(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o2755, "it is closed to them"


@pytest.mark.parametrize("kind", ["another's", "a link"])
def test_a_folder_of_another_is_left_alone(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    FOREIGN[kind](folder, monkeypatch)
    with pytest.raises(ForeignFile, match=str(folder)) as refusal:
        make_own(folder)
    assert why_foreign(folder) == str(refusal.value)


def test_what_is_not_there_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert why_foreign(tmp_path / "none") == why_foreign(tmp_path / "file") == ""
    with pytest.raises(NotADirectoryError):
        make_own(tmp_path / "file")


def test_files_are_closed_to_others(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.chmod(0o666)
    tmp_path.chmod(0o777)
    close_to_others(tmp_path)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path, file)] == [0o755, 0o644]
    given_away(file, monkeypatch)
    with pytest.raises(ForeignFile, match=r"belongs to user \d+, and this process runs as \d+"), open_own(file):
        pass

"""What nobody has used for a month is removed, unless somebody is about to use it or it is not ours."""

from __future__ import annotations

import fcntl
import os
import re
import threading
from pathlib import Path

from engine.native.unused import UNUSED_S, claim, remove_unused

NOW_S = 4e9
NAMES = re.compile(r"ours-\d+")


def old(path: Path, since_s: float = UNUSED_S + 1) -> Path:
    path.write_text("content")
    os.utime(path, (NOW_S - since_s, NOW_S - since_s))
    return path


def test_only_old_files_with_our_names_go(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    gone = old(folder / "ours-1")
    young = old(folder / "ours-2", UNUSED_S - 1)
    for name in ("ours-", "theirs-1", "ours-1.txt"):
        old(folder / name)
    (folder / "ours-3").mkdir()
    os.utime(folder / "ours-3", (0, 0))
    outside = old(tmp_path / "ours-4")
    (folder / "ours-4").symlink_to(outside)
    (folder / "ours-5").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "ours-6")
    os.utime(folder / "ours-6", (0, 0))
    before = set(folder.iterdir())
    remove_unused(folder, NAMES, NOW_S)
    assert set(folder.iterdir()) == before - {gone}
    assert outside.exists()
    assert young.exists()


def test_what_is_claimed_stays(tmp_path: Path) -> None:
    path, other = tmp_path / "ours-1", tmp_path / "ours-2"
    assert not claim(path)
    for one in (path, other):
        one.write_text("content")
        os.utime(one, (0, 0))
    assert claim(path)
    remove_unused(tmp_path, NAMES, path.stat().st_mtime + UNUSED_S - 1)
    assert list(tmp_path.iterdir()) == [path]


def test_who_is_about_to_open_a_file_and_who_removes_it_do_not_meet(tmp_path: Path) -> None:
    path = old(tmp_path / "ours-1")
    with path.open("rb") as opening:
        fcntl.flock(opening, fcntl.LOCK_SH)
        remove_unused(tmp_path, NAMES, NOW_S)
        assert path.exists()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(claim(path)))
    with path.open("rb") as removing:
        fcntl.flock(removing, fcntl.LOCK_EX)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive(), "it waits"
        path.unlink()
    thread.join(30)
    assert found == [False], "it was removed before it could be claimed"

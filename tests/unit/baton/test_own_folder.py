"""The folder of `baton up`: one that a killed process has left goes at the next start, another's stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from baton.own_folder import own_folder

HOLD = """
import pathlib, sys, time
from baton.own_folder import own_folder
with own_folder(pathlib.Path(sys.argv[1])) as folder:
    (folder / "password").touch()
    print(folder, flush=True)
    time.sleep(600)
"""


def test_only_what_was_left_by_the_dead_is_removed(tmp_path: Path) -> None:
    strange = tmp_path / "baton-of-somebody"
    strange.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        theirs = Path(process.stdout.readline().strip())
        with own_folder(tmp_path) as first:
            is_kept = (theirs / "password").exists()
            process.kill()
            process.wait()
            assert is_kept, "its process lived"
            with own_folder(tmp_path) as second:
                assert not theirs.exists()
                assert first != second
                assert {first, second, strange} == set(tmp_path.iterdir())
                assert second.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == [strange]

"""What another user of this machine has left where ours is expected."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

STRANGER = 65534
"""The user whom Unix calls nobody."""


def given_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a file or a folder another user's: by giving it away, or, as an ordinary user may not, by becoming one."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    return path


def written_by_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path.chmod(path.stat().st_mode | 0o022)
    return path


def by_a_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    elsewhere = path.rename(path.with_name(f"{path.name}-elsewhere"))
    path.symlink_to(elsewhere)
    return path


FOREIGN: dict[str, Callable[[Path, pytest.MonkeyPatch], Path]] = {
    "another's": given_away,
    "open to others": written_by_others,
    "a link": by_a_link,
}

"""Keys of a cluster that tests draw."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from baton.trust import KeyFile, Principal, draw_secret, write_private

MemberKeys: TypeAlias = dict[Principal, KeyFile]


def draw_keys(path: Path) -> MemberKeys:
    """Draws a secret, writes it to a file, and returns the keys of all members of its cluster."""
    write_private(path, draw_secret())
    return {member: KeyFile(path, member) for member in Principal}

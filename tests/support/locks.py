"""The images' locks, as pip reads them."""

from __future__ import annotations

import re
from pathlib import Path


def hashes(text: str) -> dict[str, list[str]]:
    """Return the SHA-256 of the permitted files of each package (NAME==VERSION)."""
    lines = text.replace("\\\n", " ").splitlines()
    return {
        line.split()[0]: re.findall(r"--hash=sha256:([0-9a-f]{64})", line) for line in lines if not line.startswith("#")
    }


FOLDER = Path(__file__).parents[2] / "deploy" / "docker" / "locks"
LOCKS = {path.stem: hashes(path.read_text()) for path in sorted(FOLDER.glob("*.txt"))}
"""By the lock's name."""

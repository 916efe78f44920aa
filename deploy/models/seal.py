"""Seal of a converted model folder, by which a later start detects damage by a disk or an interrupted copy.

The digest (XXH3, 128 bits) is fast enough to compute for all files at every start. It does not protect against an
attacker who can write to the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import xxhash

SEAL_FILE = "baton-files.json"
READ_BYTES = 2**20


def seal(folder: Path) -> None:
    """Record the size and the digest of each file in the folder. Raises OSError."""
    found = {path.name: _measured(path) for path in _files(folder)}
    new = folder / f"{SEAL_FILE}.new"
    new.write_text(json.dumps(found, indent=2) + "\n")
    new.rename(folder / SEAL_FILE)


def is_sealed(folder: Path) -> bool:
    return (folder / SEAL_FILE).is_file()


def damage(folder: Path) -> str:
    """Return the first difference from the sealed folder, in words; empty: there is none."""
    try:
        sealed = json.loads((folder / SEAL_FILE).read_text())
        for name, measured in sealed.items():
            if not (path := folder / name).is_file():
                return f"{name} is missing"
            if _measured(path) != measured:
                return f"{name} is not as it was written"
    except (OSError, ValueError, AttributeError) as error:
        return f"it cannot be read: {error}"
    return ""


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(SEAL_FILE))


def _measured(path: Path) -> list[int | str]:
    """Return size and digest."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
        return [file.tell(), digest.hexdigest()]

"""Wheels with nothing in them, and a build backend for a project without code, to which `test_install` copies it."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

EXTRAS = "worker", "local", "plot", "dev"


def wheel(folder: Path, name: str, version: str, *lines: str) -> str:
    """Writes one and returns its file name.

    Args:
        lines: of its metadata.
    """
    file, info = f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    metadata = "\n".join(("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines, ""))
    with zipfile.ZipFile(folder / file, "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: stub\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return file


def build_editable(folder: str, config_settings: Any = None, metadata_directory: Any = None) -> str:
    """PEP 660. What the project's requirements are stands in a file beside this one."""
    extras = [f"Provides-Extra: {name}" for name in EXTRAS]
    needed = Path("requirements.txt").read_text().splitlines()
    return wheel(
        Path(folder), "served", "1", *extras, *(f"Requires-Dist: {each}; extra == 'worker'" for each in needed)
    )

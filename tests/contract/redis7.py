"""A real Redis 7, of Debian 12's packages.

An installed one is used where there is one. Else the packages are unpacked once into `.venv/redis7`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests import debian

PACKAGES = ("redis-tools", "liblzf1", "libjemalloc2")
"""The server's program is among the tools; its package `redis-server` has a name for it and how to start it."""
FOLDER = Path(sys.prefix) / "redis7"
VERSION = " v=7."


def binary() -> Path:
    """Skips the test where it cannot be had."""
    found = _found()
    if isinstance(found, str):
        pytest.skip(f"needs Redis 7, of the Debian 12 packages {', '.join(PACKAGES)}: {found}")
    return found


def client() -> Path:
    """The `redis-cli` of the same package. Skips the test where it cannot be had."""
    return binary().with_name("redis-cli")


@cache
def _found() -> Path | str:
    """It, or why not."""
    # Not the one that a wheel put into the venv.
    if (installed := shutil.which("redis-server", path=os.defpath)) and VERSION in _version(Path(installed)):
        return Path(installed)
    unpacked = FOLDER / "redis-server"
    if not (unpacked.exists() and (FOLDER / "redis-cli").exists()) and (
        reason := debian.provide(PACKAGES, FOLDER, _take)
    ):
        return reason
    version = _version(unpacked)
    return unpacked if VERSION in version else f"it says {version.strip()!r}"


def _take(root: Path) -> None:
    """Each file appears whole, and last the one by which it is started: tests of several processes may come at once."""
    for library in root.glob("usr/lib/*/*.so.*"):
        shutil.copy(library, root / "whole")  # what a link names
        (root / "whole").replace(FOLDER / library.name)
    (root / "usr/bin/redis-cli").replace(FOLDER / "client")
    (root / "usr/bin/redis-check-rdb").replace(FOLDER / "redis")  # under another name it is the server
    for name, program in (("redis-cli", "client"), ("redis-server", "redis")):
        start = root / name
        start.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{FOLDER}" exec "{FOLDER}/{program}" "$@"\n')
        start.chmod(0o755)
        start.replace(FOLDER / name)


def _version(server: Path) -> str:
    found = subprocess.run([server, "--version"], capture_output=True, text=True)
    return found.stdout or found.stderr

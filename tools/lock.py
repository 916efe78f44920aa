"""Writes the lock of an image from what uv found for each processor and Python. `make lock` calls it.

    python -m tools.lock deploy/docker/locks/worker.txt pylock.worker-31111-x86_64.toml pylock.worker-31111-aarch64.toml

uv's own list of hashes has every file of a version, for all systems and Pythons. A lock has only the files that an
image may install. Locks named `torch-...` get torch and NVIDIA's libraries, the others everything else: each build of
torch has its own lock, because it comes from its own index.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

HEAD = "# Written by `make lock`: the files for Linux, on x86_64 and aarch64, and for the Python of each image.\n"
OF_TORCH = re.compile(r"torch|triton|cuda-.*|nvidia-.*")


def lock(pylocks: Iterable[str], of_torch: bool) -> str:
    """Return a lock with the files that all processors and Pythons need.

    Args:
        pylocks: one pylock.toml (PEP 751) for each processor and Python.
        of_torch: whether the lock is for torch and NVIDIA's libraries, or for everything else.

    Raises:
        ValueError: the processors or Pythons need different packages.
    """
    first, *others = (_files(each, of_torch) for each in pylocks)
    for other in others:
        if other.keys() != first.keys():
            raise ValueError(f"the processors need different packages: {sorted(first.keys() ^ other.keys())}")
        for pin, hashes in other.items():
            first[pin] |= hashes
    lines = (" \\\n    --hash=sha256:".join((pin, *sorted(hashes))) for pin, hashes in first.items())
    return HEAD + "".join(f"{line}\n" for line in lines)


def _files(pylock: str, of_torch: bool) -> dict[str, set[str]]:
    """Return the SHA-256 of the files of each package, by name and version."""
    return {
        f"{package['name']}=={package['version']}": {wheel["hashes"]["sha256"] for wheel in package["wheels"]}
        for package in tomllib.loads(pylock)["packages"]
        if bool(OF_TORCH.fullmatch(package["name"])) == of_torch
    }


if __name__ == "__main__":
    target, *paths = map(Path, sys.argv[1:])
    target.write_text(lock((path.read_text() for path in paths), target.name.startswith("torch-")))

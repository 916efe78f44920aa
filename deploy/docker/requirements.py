"""Prints what an image installs, at the versions that pyproject.toml pins.

That is the distribution's own requirements, and those of whole extras (EXTRA) or of packages of one (EXTRA:PACKAGE).
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(pyproject: str, wanted: Sequence[str], only: bool = False) -> list[str]:
    """The pinned requirements of the extras. Raises KeyError: there is no such extra, or no such package in it."""
    project = tomllib.loads(pyproject)["project"]
    lines: list[str] = [] if only else list(project["dependencies"])
    for item in wanted:
        extra, _, package = item.partition(":")
        pins = {pin.partition("==")[0]: pin for pin in project["optional-dependencies"][extra]}
        lines += [pins[package]] if package else pins.values()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="store_true", help="without the distribution's own")
    parser.add_argument("wanted", nargs="*", metavar="EXTRA[:PACKAGE]")
    arguments = parser.parse_args()
    lines = requirements(Path("pyproject.toml").read_text(), arguments.wanted, arguments.only)
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()

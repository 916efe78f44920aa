"""`make audit`: a package that no database knows was not audited."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / ".ci" / "known-vulnerabilities"
PIP_AUDIT = """#!/bin/sh
for last; do :; done
case "$*" in {vulnerable}) echo "torch 2.13.0 CVE-1" > "$last"; echo Found 1 known vulnerability >&2; exit 1;; esac
case "$*" in {asked}) echo No known vulnerabilities found >&2; exit 0;; esac
case "$*" in *--strict*) ;; *) exit 0;; esac
echo "Traceback\nConnectionError: no route" >&2
exit {unreachable}
"""
"""In place of pip-audit, which skips a package that a database lacks, unless it is strict."""


@pytest.mark.parametrize(
    ("vulnerable", "asked", "unreachable", "status", "last"),
    [
        ("none", "*pypi*", 1, 0, "No known vulnerabilities found"),
        ("none", "*osv*", 1, 0, "No known vulnerabilities found"),
        ("*pypi*", "*osv*", 1, 1, "torch 2.13.0 CVE-1"),
        ("*osv*", "none", 1, 1, "torch 2.13.0 CVE-1"),
        ("none", "none", 1, 3, "no database of vulnerabilities could be asked about every package"),
        ("none", "none", 2, 2, "ConnectionError: no route"),
    ],
)
def test_all_is_well_only_if_a_database_was_asked_about_every_package(
    tmp_path: Path, vulnerable: str, asked: str, unreachable: int, status: int, last: str
) -> None:
    program = tmp_path / "pip-audit"
    program.write_text(PIP_AUDIT.format(vulnerable=vulnerable, asked=asked, unreachable=unreachable))
    program.chmod(0o755)
    done = subprocess.run([SCRIPT, program, tmp_path / "packages.txt"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (status, last)

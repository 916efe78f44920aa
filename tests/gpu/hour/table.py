"""The checks by name, read from `checks.yaml`."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.gpu.hour.checks import Check


def _read() -> dict[str, Check]:
    rows = yaml.safe_load(Path(__file__).with_name("checks.yaml").read_text())
    found = {row["name"]: Check(**row) for row in rows}
    assert len(found) == len(rows), "two checks of one name"
    return found


CHECKS = _read()

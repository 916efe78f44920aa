"""A real Prometheus and its promtool, of Debian's package `prometheus`: two binaries that need nothing but libc.

Installed ones are used where there are any. Else the package is unpacked once into `.venv/prometheus`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deploy.processes import tied
from tests import debian
from tests.integration.cluster import free_port
from tests.support.waiting import wait_until

PACKAGE = "prometheus"
FOLDER = Path(sys.prefix) / "prometheus"
NAMES = ("prometheus", "promtool")
START_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Binaries:
    prometheus: Path
    promtool: Path


def binaries() -> Binaries:
    """Skips the test where they cannot be had."""
    found = _found()
    if isinstance(found, str):
        pytest.skip(f"needs Prometheus and promtool, of the Debian package {PACKAGE!r}: {found}")
    return found


@cache
def _found() -> Binaries | str:
    """They, or why not."""
    if all(installed := [shutil.which(name) for name in NAMES]):
        return Binaries(*(Path(path) for path in installed if path))
    unpacked = Binaries(*(FOLDER / name for name in NAMES))
    if not (unpacked.prometheus.exists() and unpacked.promtool.exists()) and (
        reason := debian.provide((PACKAGE,), FOLDER, _take)
    ):
        return reason
    return unpacked


def _take(root: Path) -> None:
    """Each binary appears whole: tests of several processes may come at the same time."""
    for name in NAMES:
        (root / "usr/bin" / name).replace(FOLDER / name)


class Prometheus:
    """One that runs."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The vector that an expression is now. Raises AssertionError if Prometheus refuses it."""
        result = self.get("query", query=expression)
        if result["resultType"] == "scalar":
            return [{"metric": {}, "value": result["result"]}]
        assert result["resultType"] == "vector", result
        vector: list[dict[str, Any]] = result["result"]
        return vector

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of its HTTP API."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
        return False


@contextlib.contextmanager
def running_prometheus(folder: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """One for the length of a block.

    Args:
        folder: empty; for its data.
        config: its configuration file.
    """
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port()}"
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            tied(
                [
                    str(binaries().prometheus),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address={address}",
                ]
            ),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            prometheus, text = Prometheus(address), (folder / "log").read_text

            def is_ready() -> bool:
                assert process.poll() is None, f"Prometheus ended with {process.returncode}:\n{text()}"
                return prometheus.is_ready()

            wait_until(is_ready, START_TIMEOUT_S, every_s=0.1, seen=text)
            yield prometheus
        finally:
            process.terminate()
            process.wait(30)

"""A worker's log is what its process has written, whichever way, and no more of it than somebody reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton.config import Config
from baton.errors import WorkerFailed
from baton.telemetry import logs
from deploy.processes import last_line
from deploy.ray_pools.actor import worker_environment
from worker.log import END_BYTES, written

CRASHES = """
import ctypes, logging, sys, threading
from baton.telemetry import logs
logs.configure("info", "json", "baton-decode")
print(":actor_name:WorkerActor")
logging.getLogger("worker").info("joins")
print("a library speaks")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
try:
    raise ValueError("of a request")
except ValueError:
    logging.getLogger("worker").exception("it failed")
ctypes.string_at(0)
"""


def test_all_that_the_process_writes_is_there_up_to_its_crash(tmp_path: Path) -> None:
    """Log lines in JSON are shown as text, and what is Ray's is not shown."""
    file = tmp_path / "worker.err"
    with file.open("ab") as output:
        done = subprocess.run(
            [sys.executable, "-c", CRASHES], stdout=output, stderr=output, env={**worker_environment(Config())}
        )
    assert done.returncode < 0
    lines = written(file, "decode-0")
    order = [
        next(number for number, line in enumerate(lines) if words in line)
        for words in (
            " INFO ",
            "a library speaks",
            "ZeroDivisionError: division by zero",
            "worker: it failed",
            "ValueError: of a request",
            "Fatal Python error: Segmentation fault",
        )
    ]
    assert order == sorted(order)
    assert lines[order[0]].endswith("worker: joins")
    assert not any("actor_name" in line or line.startswith("{") for line in lines)
    assert last_line(file) == "Fatal Python error: Segmentation fault"


def test_of_a_long_file_the_end_is_read(tmp_path: Path) -> None:
    file = tmp_path / "worker.err"
    file.write_text("é" * END_BYTES + "\n" + "".join(f"line {number}\n" for number in range(1000)))
    assert written(file, "w") == [f"line {number}" for number in range(1000 - logs.MAX_KEPT_LINES, 1000)]
    file.write_text("x" * END_BYTES + "\nlast")
    assert written(file, "w") == ["last"]
    file.write_text("x" * 10_000)
    assert written(file, "w") == ["x" * logs.MAX_KEPT_CHARACTERS]
    file.unlink()
    with pytest.raises(WorkerFailed, match=r"the output of w cannot be read from .*worker\.err"):
        written(file, "w")

"""A worker's log is what its process has written, whichever way, and no more of it than somebody reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from baton.config import Config
from baton.errors import WorkerFailed
from baton.telemetry import logs
from deploy.ray_pools.actor import worker_environment
from tests.support.node_process import actor, node, order, write
from worker.log import NodeProcess, written

CRASHES = """
import ctypes, logging, sys, threading
from baton.telemetry import logs
logs.configure("info", "json", "baton-decode")
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


async def test_all_that_the_process_writes_is_there_up_to_its_crash(tmp_path: Path) -> None:
    """Log lines in JSON are shown as text."""
    with node(tmp_path) as here:
        async with actor(here, "decode-0") as link:
            crashing = replace(order(CRASHES), environment=worker_environment(Config()))
            with pytest.raises(WorkerFailed, match="decode-0 ended before it was ready: Fatal Python error: Segmentat"):
                await link.start(crashing, "")
            assert (await link.ended()).status < 0
        lines = written(NodeProcess(here.socket), "decode-0")
    places = [
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
    assert places == sorted(places)
    assert lines[places[0]].endswith("worker: joins")
    assert not any(line.startswith("{") for line in lines)


async def test_no_more_of_it_is_shown_than_somebody_reads(tmp_path: Path) -> None:
    with node(tmp_path) as here:
        await write(here, "w", *(f"line {number}" for number in range(1000)))
        assert written(NodeProcess(here.socket), "w") == [
            f"line {number}" for number in range(1000 - logs.MAX_KEPT_LINES, 1000)
        ]
        await write(here, "v", "x" * 10_000)
        assert written(NodeProcess(here.socket), "v") == ["x" * logs.MAX_KEPT_CHARACTERS]
    with pytest.raises(WorkerFailed, match=r"the output of w cannot be read from .*socket"):
        written(NodeProcess(here.socket), "w")

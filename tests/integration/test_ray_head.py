"""The Ray of `baton up`, by itself."""

from __future__ import annotations

import asyncio
import contextlib

import psutil
import pytest

from deploy.local.child import Child
from tests.support.processes import command_line, running
from tests.support.waiting import wait_until


def names(line: list[str]) -> set[str]:
    return {argument.rpartition("/")[2] for argument in line}


@pytest.mark.chaos
async def test_it_leaves_no_process_when_its_raylet_is_killed() -> None:
    """The agents then report to the GCS, and when that is gone as well they try for a minute."""
    head = Child("Ray", "deploy.ray_pools.head", (), {})
    await head.start_and_listen()
    (ours,) = running(psutil.Process().children(), "deploy.ray_pools.head")
    # The agents are still on their way when the head reports; each has its name once it is there.
    wait_until(lambda: any("ray::RuntimeEnvAgent" in command_line(each) for each in ours.children(recursive=True)), 60)
    processes = ours.children(recursive=True)
    programs = {command_line(process)[0].rpartition("/")[2]: process for process in processes}
    try:
        left_out = [line for line in map(command_line, processes) if {"dashboard.py", "monitor.py"} & names(line)]
        assert not left_out, "nobody asks them anything"
        programs["gcs_server"].kill()
        programs["raylet"].kill()
        assert await asyncio.wait_for(head.ended(), 120) == 1
        wait_until(lambda: not any(map(command_line, processes)), 10, seen=lambda: list(map(command_line, processes)))
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

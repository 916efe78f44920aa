"""What children write: into a file, their log lines to the terminal as well, and the last of it into the error."""

from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path

import pytest

from baton.config import ClusterConfig
from baton.errors import ConfigError
from deploy.local.child import Child
from deploy.local.child_log import KEPT, ChildLog, log_folder
from deploy.processes import MOST_CHARACTERS, last_line
from tests.support.waiting import until

LINE = "2026-11-27 21:13:48,767 INFO 4156 router.server: router router-0 stops"
OF_A_WORKER = f"(decode-0 pid=3415) {LINE}"
JSON_LINE = '{"timestamp": "2026-11-27T21:13:48+00:00", "level": "INFO", "message": "x"}'
HIDDEN = "Traceback (most recent call last):\n  File x\nValueError: of a library\n\x1b[36mcoloured\x1b[0m\n"


def test_the_terminal_has_log_lines_alone(tmp_path: Path) -> None:
    terminal = io.StringIO()
    log = ChildLog(tmp_path / "x.log", terminal)
    log.show_new()
    with log.path.open("w") as file:
        file.write(f"{LINE}\n{HIDDEN}{OF_A_WORKER}\n{JSON_LINE}\n{LINE[:30]}")
        file.flush()
        log.show_new()
        assert terminal.getvalue().splitlines() == [LINE, OF_A_WORKER, JSON_LINE]
        file.write(f"{LINE[30:]}\n")
    log.show_new()
    log.show_new()
    assert terminal.getvalue().splitlines() == [LINE, OF_A_WORKER, JSON_LINE, LINE]


def test_lines_of_one_of_several_children_begin_with_its_label(tmp_path: Path) -> None:
    terminal = io.StringIO()
    log = ChildLog(tmp_path / "x.log", terminal, "big-1")
    log.path.write_text(f"{LINE}\n{JSON_LINE}\n")
    log.show_new()
    assert terminal.getvalue().splitlines() == [f"[big-1] {LINE}", JSON_LINE], "a document stays one"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("\n\n", ""),
        (f"{HIDDEN}ValueError: no such file\n\n", "ValueError: no such file"),
        (f"cannot\n{LINE}\n", "router router-0 stops"),
        ("why\n:actor_name:decode-0\n", "why"),
        ("x" * 100_000, "x" * MOST_CHARACTERS),
    ],
)
def test_the_last_line_is_the_last_that_says_something(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text(text)
    assert last_line(tmp_path / "x.log") == line
    assert last_line(tmp_path / "none.log") == ""


async def test_a_child_that_dies_leaves_its_last_line_and_its_logs_path(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(f"import sys\nprint({LINE!r})\nprint('before')\nsys.exit('what was wrong')")
    terminal = io.StringIO()
    path = tmp_path / "dying.log"
    child = Child("the child", "dying", (), {"PYTHONPATH": str(tmp_path)}, log=ChildLog(path, terminal))
    with pytest.raises(ConfigError) as error:
        await child.start_and_listen()
    assert str(error.value) == f"the child ended with status 1: what was wrong; its log: {path}"
    await until(lambda: bool(terminal.getvalue()))
    await child.stop(1)
    assert terminal.getvalue() == f"{LINE}\n"
    await child.start()
    await child.ended()
    await child.stop(1)
    assert path.read_text().count("before") == 2, "all its starts are in one file"
    assert terminal.getvalue() == f"{LINE}\n" * 2, "what it wrote last, too"


def test_only_the_latest_logs_of_processes_that_have_ended_are_kept(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for number in range(KEPT + 3):
        (logs / f"2026112{number:02}-120000-{2**22 + 7}").mkdir(parents=True)
    (logs / f"20200101-120000-{os.getppid()}").mkdir()
    made = log_folder(ClusterConfig(cache_dir=str(tmp_path)))
    left = sorted(path.name for path in logs.iterdir())
    assert made.name in left
    assert f"20200101-120000-{os.getppid()}" in left, "its process runs"
    assert len(left) == KEPT + 1
    assert f"2026112{KEPT + 2:02}-120000-{2**22 + 7}" in left
    assert f"202611200-120000-{2**22 + 7}" not in left


async def test_what_is_waited_for_is_shown_until_it_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from rich.console import Console

    from baton.config import Config
    from deploy.local import up
    from deploy.local.keys import member_files
    from deploy.local.ray_cluster import RayCluster

    monkeypatch.setattr(up, "SHOW_S", 0.01)
    said = io.StringIO()
    ray = RayCluster([Config()], [tmp_path / "state.json"], member_files("", tmp_path).files)
    showing = asyncio.create_task(up._show_waiting(ray, Console(file=said, width=120)))
    await until(lambda: "0 s: waiting for Ray\n" in said.getvalue())
    ray.awaited = "the workers"
    await until(lambda: "0 s: waiting for the workers\n" in said.getvalue())
    showing.cancel()

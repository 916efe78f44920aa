"""Progress on a terminal: bars on a screen, or one plain line per stage in a log file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from deploy.models.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

TITLES = {
    "wait": "Waiting for another process that prepares this model",
    "fix": "Recreating a damaged model folder:",
    "download": "Downloading",
    "verify": "Verifying",
    "dequantise": "Dequantising",
}


class ProgressDisplay:
    """Context manager whose `update` is an `OnModelProgress`. Writes to stderr, so that stdout stays for programs."""

    def __init__(self, console: Console | None = None) -> None:
        from rich import (
            progress as bars,
        )  # imported here, because most processes that import this package never show progress

        from deploy.terminal import Terminal

        self._console = console or Terminal(stderr=True)
        self._bars = bars.Progress(
            bars.TextColumn("{task.description:<12}", markup=False),
            bars.BarColumn(),
            bars.TaskProgressColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn("{task.fields[detail]}", markup=False),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, progress: Progress) -> None:
        title = TITLES.get(progress.stage, progress.stage)
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._bars.add_task(title, total=None, detail=progress.detail)
            if not self._console.is_terminal:
                self._console.print(f"{title} {progress.detail}".rstrip() + " ...", soft_wrap=True)
        self._bars.update(
            self._tasks[progress.stage],
            completed=progress.done,
            total=progress.total or None,
            detail=progress.detail,
        )

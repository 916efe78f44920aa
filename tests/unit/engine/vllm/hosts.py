"""Engines over a fake vLLM, and what their processes leave behind."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from baton.config import Config
from engine.testing import expected_tokens
from engine.vllm.engine import VllmEngine, vllm_engine
from tests.support.fake_vllm.environment import behave, fake_vllm, model_without_weights
from tests.support.waiting import wait_until
from tests.unit.engine.contract.subjects import SETTINGS, Subject

BLOCK_SIZE = 32
"""vLLM's on CPUs."""


class Hosts:
    """Makes engines, each in an environment of its own, and ends them.

    Attributes:
        python: interpreter of the last one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[VllmEngine] = []
        self.python = ""

    def config(self, behaviour: dict[str, Any] | None = None, **settings: Any) -> Config:
        """Settings for a fake that behaves like this."""
        folder = self._folder / str(len(list(self._folder.iterdir())))
        folder.mkdir()
        self.python = fake_vllm(folder)
        behave(self.python, **behaviour or {})
        engine = replace(SETTINGS, runner="vllm", vllm_python=self.python, **settings)
        return Config(model=model_without_weights(folder / "model"), engine=engine)

    def engine(self, behaviour: dict[str, Any] | None = None, **settings: Any) -> VllmEngine:
        """A started engine."""
        return self.started(self.config(behaviour, **settings))

    def started(self, config: Config) -> VllmEngine:
        self._made.append(vllm_engine(config, self._folder))
        return self._made[-1]

    def subject(self, behaviour: dict[str, Any] | None = None, **settings: Any) -> Subject:
        """The same, with what its model says."""
        return Subject(engine=self.engine(behaviour, **settings), expected=expected_tokens)

    def close(self) -> None:
        while self._made:
            self._made.pop().close()


def host_of(engine: VllmEngine) -> psutil.Process:
    """The process that computes for an engine: its only child that is Python of another environment."""
    return psutil.Process(engine._host.pid)


@contextlib.contextmanager
def nothing_is_left() -> Iterator[Callable[[], None]]:
    """Yields a check that no descriptor, folder, process or thread is there that was not before."""
    folder = Path(tempfile.mkdtemp(prefix="b"))  # a short path: a socket's has at most 107 bytes
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    descriptors = _descriptors()
    processes = set(psutil.Process().children(recursive=True))

    def check() -> None:
        gc.collect()  # the mapped memory lives as long as its tensors
        assert list(folder.iterdir()) == []
        assert set(psutil.Process().children(recursive=True)) <= processes
        wait_until(lambda: _descriptors() <= descriptors, seen=lambda: _descriptors() - descriptors)

    try:
        yield check
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder)


def _descriptors() -> set[str]:
    """What this process's descriptors are of: those of sockets, pipes and memory have names of their own."""
    found = set()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(FileNotFoundError):
            found.add(str(Path(f"/proc/self/fd/{number}").readlink()))
    return found

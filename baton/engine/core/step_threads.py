"""The threads in which a runner executes steps, one after the other in the order in which they were begun.

On a CPU a step is computed in the one thread, and a step that was begun meanwhile waits there: it starts as soon as the
other one has ended, whatever the event loop does. A device needs its next step before it is idle, and what came of the
last one has to be waited for: so one thread launches, and another one collects.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from baton.engine.core.runner import LaunchedStep, OnLayerDone, Runner, StepInput, StepOutput

FORGETTING = 0.8
"""Weight of a launch after the next one."""


@dataclass(slots=True, kw_only=True)
class RunningStep:
    """A step that was given to the runner."""

    step: StepInput
    output: asyncio.Future[StepOutput]
    began_s: float
    """When the runner could begin it, on the monotonic clock: it was given the step, and had ended the one before."""
    launched: Future[Any]
    """Done when the thread takes the next step."""


class StepThreads:
    """The threads of one runner. Leaving the context waits until they have ended.

    Args:
        plans_ahead: whether steps are given to it behind those that run.
    """

    def __init__(self, runner: Runner, *, plans_ahead: bool = False) -> None:
        self._runner = runner
        self._launches = plans_ahead and runner.runs_ahead
        self._thread = ThreadPoolExecutor(1, "engine")
        self._collector = ThreadPoolExecutor(1, "engine-collect")
        self.launch_s = 0.0
        """Seconds from a step's launch to when its device could go on by itself, lately."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pool in (self._thread, self._collector):
            pool.shutdown(cancel_futures=True)

    def execute(
        self, step: StepInput, on_layer_done: OnLayerDone, now: float, before: RunningStep | None = None
    ) -> RunningStep:
        """Begins a step, behind one that may still run: where that one fails, this one does.

        Args:
            before: the last step that was begun, if the tokens that it samples are not known yet.
        """
        after = None if before is None else before.launched
        launched: Future[Any]
        if self._launches:
            launched = launching = self._thread.submit(self._launch, after, step, on_layer_done)
            output = self._collector.submit(lambda: launching.result().collect())
        else:
            launched = output = self._thread.submit(self._execute, after, step, on_layer_done)
        return RunningStep(step=step, output=asyncio.wrap_future(output), began_s=now, launched=launched)

    def recover(self) -> asyncio.Future[None]:
        """Begins `Runner.recover`, behind the steps that were begun before."""
        return asyncio.wrap_future(self._thread.submit(self._runner.recover))

    def _execute(self, after: Future[Any] | None, step: StepInput, on_layer_done: OnLayerDone) -> StepOutput:
        if after is not None:
            after.result()
        return self._runner.execute(step, on_layer_done)

    def _launch(self, after: Future[Any] | None, step: StepInput, on_layer_done: OnLayerDone) -> LaunchedStep:
        if after is not None:
            after.result()
        began_s = time.monotonic()
        launched = self._runner.launch(step, on_layer_done)
        self.launch_s = FORGETTING * self.launch_s + (1 - FORGETTING) * (time.monotonic() - began_s)
        return launched

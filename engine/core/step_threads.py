"""The threads in which a runner executes steps, one after the other in the order in which they were begun.

On a CPU a step is computed in the one thread, and a step that was begun meanwhile waits there: it starts as soon as the
other one has ended, whatever the event loop does. A device needs its next step before it is idle, and what came of the
last one has to be waited for: so one thread launches, and another one collects.

A thread that waits for a device cannot be cancelled. So nothing here waits for one without a limit, and threads that
have not ended in time are left behind: their process has to end.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from baton.costs import StepCosts
from engine.core.faults import Fault, fault_of
from engine.core.runner import LaunchedStep, OnLayerDone, Runner, StepInput, StepOutput
from engine.core.step_fit import StepSize

logger = logging.getLogger(__name__)
FORGETTING = 0.8
"""Weight of a launch after the next one."""
HUNG = 20.0
"""How many times as long as it is expected to a step may take, if that is longer than `step_timeout_s`."""
LIMIT_PARTS = 8
"""Parts in which a limit passes. Of a time in which the process was stopped (SIGSTOP, a machine that sleeps) no more
than one passes: the step was stopped as well."""


@dataclass(slots=True, kw_only=True)
class RunningStep:
    """A step that was given to the runner."""

    step: StepInput
    size: StepSize
    output: asyncio.Future[StepOutput]
    began_s: float
    """When the runner could begin it, on the monotonic clock: it was given the step, and had ended the one before."""
    launched: Future[Any]
    """Done when the thread takes the next step."""
    expected_s: float
    """What such a step takes, as far as the ones before have shown."""
    limit_s: float
    """Time after which it hangs."""

    async def has_ended(self) -> bool:
        """Returns whether it ends in time, once it has ended or has not."""
        return await ends_within(self.limit_s, self.output)


class StepThreads:
    """The threads of one runner, until `close`.

    Args:
        step_timeout_s: how long a step may take at least.
        plans_ahead: whether steps are given to it behind those that run.

    Attributes:
        last: the step that was begun last; None: there was none.
    """

    def __init__(self, runner: Runner, step_timeout_s: float, *, plans_ahead: bool) -> None:
        self._runner = runner
        self._step_timeout_s = step_timeout_s
        self._launches = plans_ahead and runner.runs_ahead
        self._thread = ThreadPoolExecutor(1, "engine")
        self._collector = ThreadPoolExecutor(1, "engine-collect")
        self.launch_s = 0.0
        """Seconds from a step's launch to when its device could go on by itself, lately."""
        self.last: RunningStep | None = None

    def close(self, *, waits: bool) -> None:
        """Ends the threads, and waits for that if they have nothing to do any more."""
        for pool in (self._thread, self._collector):
            pool.shutdown(wait=waits, cancel_futures=True)

    def execute(
        self, step: StepInput, on_layer_done: OnLayerDone, now: float, costs: StepCosts, before: RunningStep | None
    ) -> RunningStep:
        """Begins a step, behind one that may still run: where that one fails, this one does.

        Args:
            costs: what steps take, as far as it is known.
            before: the last step that was begun, if the tokens that it samples are not known yet.
        """
        after = None if before is None else before.launched
        launched: Future[Any]
        if self._launches:
            launched = launching = self._thread.submit(self._launch, after, step, on_layer_done)
            output = self._collector.submit(lambda: launching.result().collect())
        else:
            launched = output = self._thread.submit(self._execute, after, step, on_layer_done)
        size = StepSize.of(step)
        expected_s = size.expected_s(costs)
        self.last = RunningStep(
            step=step,
            size=size,
            output=asyncio.wrap_future(output),
            began_s=now,
            launched=launched,
            expected_s=expected_s,
            limit_s=self._limit_s(size, expected_s),
        )
        return self.last

    async def have_lost_device(self, error: Exception) -> bool:
        """Returns whether the device computes nothing more after a step's error; else what the step left is freed."""
        if fault_of(error) is Fault.DEVICE_LOST:
            return True
        traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
        recovering = asyncio.wrap_future(self._thread.submit(self._runner.recover))
        if not await ends_within(self._step_timeout_s, recovering):
            logger.error("the device has given no sign of life for %g s after a failed step", self._step_timeout_s)
            return True
        if (refusal := recovering.exception()) is not None:
            logger.error("the device does not answer after a failed step", exc_info=refusal)
        return refusal is not None

    def _limit_s(self, size: StepSize, expected_s: float) -> float:
        """Returns how long a step may take. Before the first ones of a kind are over, what the runner's own first step
        has shown counts: a large model on a few CPUs takes minutes for a prompt.
        """
        tried_s = self._runner.token_s * (size.num_new + size.num_drafts)
        return max(self._step_timeout_s, HUNG * max(tried_s, expected_s))

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


async def ends_within(limit_s: float, *futures: asyncio.Future[Any]) -> bool:
    """Waits until futures are done, for `limit_s` at most, and returns whether they are."""
    for _ in range(LIMIT_PARTS):
        _, left = await asyncio.wait(futures, timeout=limit_s / LIMIT_PARTS)
        if not left:
            return True
    return False

"""Threads in which the steps of one engine are executed, with a time limit on each."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from baton.costs import StepCosts, StepSize
from engine.core.faults import Fault, fault_of
from engine.core.runner import LaunchedStep, OnLayerDone, Runner, StepInput, StepOutput

logger = logging.getLogger(__name__)
FORGETTING = 0.8
"""Weight of a launch after the next one."""
HUNG = 20.0
"""Factor over its expected time after which a step counts as hung, if that is longer than `step_timeout_s`."""
LIMIT_PARTS = 8
"""Number of parts into which a limit is divided. If the process was stopped (SIGSTOP, a sleeping machine), at most one
part passes: the step was stopped as well."""


@dataclass(slots=True, kw_only=True)
class RunningStep:
    """A step that was given to the runner."""

    step: StepInput
    size: StepSize
    output: asyncio.Future[StepOutput]
    began_s: float
    """Time at which the runner could start it, on the monotonic clock: it had the step, and had ended the one
    before."""
    launched: Future[Any]
    """Done when the thread can take the next step."""
    expected_s: float
    """Expected duration, from the steps so far."""
    limit_s: float
    """Seconds after which it counts as hung."""

    async def has_ended(self) -> bool:
        """Wait until the step ends or its time limit has passed. Return whether it has ended."""
        return await ends_within(self.limit_s, self.output)


class StepThreads:
    """Threads in which one runner executes steps, until `close`: one after the other, in the order of their start.

    On a CPU one thread computes the steps. A step that is started meanwhile waits in that thread and runs as soon as
    the current one has ended, whatever the event loop does. A device needs its next step before it is idle, while the
    results of the last step must be waited for; so one thread launches and another one collects.

    A thread that waits for a device cannot be cancelled. So nothing here waits for a thread without a limit. Threads
    that have not ended in time are left behind, and their process has to end.

    Args:
        step_timeout_s: minimum time limit of a step.
        plans_ahead: whether a step may be given to the runner before the one before it ends.

    Attributes:
        last: the step that was started last; None: there was none.
    """

    def __init__(self, runner: Runner, step_timeout_s: float, *, plans_ahead: bool) -> None:
        self._runner = runner
        self._step_timeout_s = step_timeout_s
        self._launches = plans_ahead and runner.runs_ahead
        self._thread = ThreadPoolExecutor(1, "engine")
        self._collector = ThreadPoolExecutor(1, "engine-collect")
        self.launch_s = 0.0
        """Recent time from a step's launch until its device continues by itself, in seconds."""
        self.last: RunningStep | None = None

    def close(self, *, waits: bool) -> None:
        """Stop the threads. Wait for them if they have nothing left to do."""
        for pool in (self._thread, self._collector):
            pool.shutdown(wait=waits, cancel_futures=True)

    def execute(
        self, step: StepInput, on_layer_done: OnLayerDone, now: float, costs: StepCosts, before: RunningStep | None
    ) -> RunningStep:
        """Start a step, possibly after one that is still running: if that one fails, this one does too.

        Args:
            costs: step costs as measured so far.
            before: the last step that was started, if its sampled tokens are not known yet.
        """
        after = None if before is None else before.launched
        launched: Future[Any]
        if self._launches:
            launched = launching = self._thread.submit(self._launch, after, step, on_layer_done)
            output = self._collector.submit(lambda: launching.result().collect())
        else:
            launched = output = self._thread.submit(self._execute, after, step, on_layer_done)
        size = step.size(denoises=self._runner.canvas_length > 0)
        expected_s = size.expected_s(costs)
        self.last = RunningStep(
            step=step,
            size=size,
            output=asyncio.wrap_future(output),
            began_s=now,
            launched=launched,
            expected_s=expected_s,
            limit_s=self._limit_s(step, size, expected_s),
        )
        return self.last

    async def have_lost_device(self, error: Exception) -> bool:
        """Return whether the device cannot compute after a step's error; otherwise free what the step left."""
        if fault_of(error) is Fault.DEVICE_LOST:
            return True
        traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
        recovering = asyncio.wrap_future(self._thread.submit(self._runner.recover))
        if not await ends_within(self._step_timeout_s, recovering):
            logger.error("the device has not responded for %g s after a failed step", self._step_timeout_s)
            return True
        if (refusal := recovering.exception()) is not None:
            logger.error("the device does not respond after a failed step", exc_info=refusal)
        return refusal is not None

    def _limit_s(self, step: StepInput, size: StepSize, expected_s: float) -> float:
        """Return the time limit of a step.

        Before the first steps of a kind have ended, it is based on the runner's trial step: a large model on a few CPUs
        takes minutes for a prompt.
        """
        num_tokens = size.num_new + size.num_drafts
        if self._runner.canvas_length:
            num_tokens += self._runner.canvas_length * sum(part.sample for part in step.parts)
        tried_s = self._runner.token_s * num_tokens
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
    """Wait until futures are done, for at most `limit_s`. Return whether they are."""
    for _ in range(LIMIT_PARTS):
        _, left = await asyncio.wait(futures, timeout=limit_s / LIMIT_PARTS)
        if not left:
            return True
    return False

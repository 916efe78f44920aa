"""Steps that do not fit into a device's memory: executed again in halves.

    step        | a | b | c | d |    out of memory
    halves      | a | b |            computed
                        | c |        computed
                            | d |    out of memory alone: `d` ends, and no other worker retries it

A failed step leaves nothing that a retry would not write again: KV of the same tokens in the same blocks. A retry must
not zero blocks of which a layer has been reported, since a transfer may be reading them.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence

from baton.scores import NO_SCORES, TokenScores
from engine.core.faults import Fault, fault_of
from engine.core.runner import BlockCopy, NotedLayers, OnLayerDone, StepInput, StepOutput, StepPart, ignore_layer

logger = logging.getLogger(__name__)
Execute = Callable[[StepInput, OnLayerDone, bool], StepOutput]
"""Executes a step. The last argument says whether its blocks are ready: those that it starts are zeroed already."""


class SmallerSteps:
    """Executes steps, in halves if the device runs out of memory.

    Args:
        execute: computes a step, or raises an error.
        copy: performs the copies of a step.
        recover: frees what a failed step has left on the device.
    """

    def __init__(
        self,
        execute: Execute,
        copy: Callable[[Sequence[BlockCopy]], None],
        recover: Callable[[], None],
    ) -> None:
        self._execute = execute
        self._copy = copy
        self._recover = recover

    def execute(self, step: StepInput, on_layer_done: OnLayerDone) -> StepOutput:
        """See `Runner.execute`. Layers of a divided step are not reported, since none is complete for all its parts.

        Raises:
            Exception: the step has failed for another reason than its size.
        """
        layers = NotedLayers(on_layer_done)
        try:
            return self._execute(step, layers.report, False)
        except Exception as error:
            return self.divided(step, error, layers.has_begun)

    def divided(self, step: StepInput, error: Exception, is_ready: bool) -> StepOutput:
        """Execute a failed step again, in halves.

        Args:
            step: the step, with all its tokens.
            error: the error of the failed step.
            is_ready: whether a layer of it was reported: then its copies are done, and the blocks that it starts are
                zeroed.

        Raises:
            Exception: `error`, if it is not a lack of memory, or the error of a half.
        """
        _require_too_large(error)
        logger.warning("a step of %d sequences is too large for the device's memory", len(step.parts))
        self._recover()
        if not is_ready:
            self._copy(step.copies)
        return _joined(list(self._halves(step.parts, is_ready)))

    def _halves(self, parts: Sequence[StepPart], is_ready: bool) -> Iterator[StepOutput]:
        """Yield the outputs of the halves of a step that is too large."""
        if len(parts) == 1:
            yield _too_large(parts[0])
            return
        middle = len(parts) // 2
        for half in (parts[:middle], parts[middle:]):
            yield from self._smaller(half, is_ready)

    def _smaller(self, parts: Sequence[StepPart], is_ready: bool) -> Iterator[StepOutput]:
        try:
            output = self._execute(StepInput(tuple(parts)), ignore_layer, is_ready)
        except Exception as error:
            _require_too_large(error)
        else:
            yield output
            return
        self._recover()
        yield from self._halves(parts, is_ready)


def _require_too_large(error: Exception) -> None:
    if fault_of(error) is not Fault.OUT_OF_MEMORY:
        raise error
    traceback.clear_frames(error.__traceback__)  # they hold the step's tensors


def _joined(outputs: Sequence[StepOutput]) -> StepOutput:
    """Return the output of a step from those of its pieces, in order."""
    counts = [len(output.sampled_token_ids) for output in outputs]
    begins = [sum(counts[:index]) for index in range(len(counts))]
    return StepOutput(
        sampled_token_ids=tuple(tokens for output in outputs for tokens in output.sampled_token_ids),
        num_computed_tokens=tuple(number for output in outputs for number in output.num_computed_tokens),
        scores=_joined_scores([output.scores for output in outputs], counts),
        prompt_scores=_joined_scores([output.prompt_scores for output in outputs], counts),
        failures={
            begin + index: reason
            for begin, output in zip(begins, outputs, strict=True)
            for index, reason in (output.failures or {}).items()
        }
        or None,
        candidates={
            begin + index: found
            for begin, output in zip(begins, outputs, strict=True)
            for index, found in (output.candidates or {}).items()
        }
        or None,
        too_large=frozenset(
            begin + index for begin, output in zip(begins, outputs, strict=True) for index in output.too_large
        ),
    )


def _joined_scores(
    found: Sequence[tuple[TokenScores, ...] | None], counts: Sequence[int]
) -> tuple[TokenScores, ...] | None:
    if not any(found):
        return None
    pieces = zip(found, counts, strict=True)
    return tuple(scores for piece, count in pieces for scores in piece or (NO_SCORES,) * count)


def _too_large(part: StepPart) -> StepOutput:
    return StepOutput(
        sampled_token_ids=((),), num_computed_tokens=(part.num_computed_tokens,), too_large=frozenset({0})
    )

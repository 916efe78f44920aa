"""The tokens that a step has sampled, for the one that was planned before they were known.

On a device they need not come to the host for that: they are put where the next step reads its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.scores import Drawn, Sampled
from engine.core.runner import UNKNOWN_TOKEN, LaunchedStep, StepInput, StepOutput, StepPart
from engine.uploads import StepNumbers

SOME_TOKEN = 0
"""Every vocabulary has it."""


class Filling(NamedTuple):
    """Tokens that are known to the device alone."""

    places: torch.Tensor
    """Where they stand among the packed tokens of a step, `[tokens]`."""
    sources: torch.Tensor
    """Where each stands in `tokens`, `[tokens]`."""
    tokens: torch.Tensor
    """`[tokens of the step before]`, on the device."""

    def put_by(self, numbers: StepNumbers) -> Filling:
        """Returns the same with all on the device, once the numbers have been sent."""
        return Filling(numbers.put(self.places), numbers.put(self.sources), self.tokens)

    def fill(self, token_ids: torch.Tensor) -> None:
        """Puts them into the packed tokens, `[tokens]` on the device."""
        token_ids.index_copy_(0, self.places, self.tokens.index_select(0, self.sources))


class LastTokens:
    """What the last step that was launched has sampled."""

    def __init__(self) -> None:
        self._last: tuple[StepInput, LaunchedStep] | None = None

    def keep(self, step: StepInput, launched: LaunchedStep) -> None:
        """Takes a step that was launched."""
        self._last = step, launched

    def filled(self, step: StepInput) -> StepInput:
        """Returns the next step with all its tokens, for which it waits. The step before is forgotten: its tokens are
        for no other one.

        A sequence that the step before has ended (`StepOutput.refusal`) gets some token: what comes of it is dropped.
        """
        last, self._last = self._last, None
        if not any(_has_unknown(part) for part in step.parts):
            return step
        assert last is not None, "a step has unknown tokens, and none was executed before it"
        output = last[1].collect()
        tokens = {
            part.sequence_key: of_part[-1] if of_part else SOME_TOKEN
            for index, (part, of_part) in enumerate(zip(last[0].parts, output.sampled_token_ids, strict=True))
            if of_part or output.refusal(index) is not None
        }
        parts = [
            part._replace(token_ids=(*part.token_ids[:-1], tokens[part.sequence_key])) if _has_unknown(part) else part
            for part in step.parts
        ]
        return StepInput(tuple(parts), step.copies)

    def filling(self, packed: Sequence[StepPart]) -> Filling | None:
        """Returns what the unknown tokens of the next step, whose parts are packed so, are on the device; None: there
        are none, or they have come to the host, where `filled` finds them.
        """
        if self._last is None or not isinstance(launched := self._last[1], DeviceStep):
            return None
        place_of = {key: place for place, key in enumerate(launched.sequence_keys)}
        places, sources, end = [], [], 0
        for part in packed:
            end += len(part.token_ids)
            if _has_unknown(part):
                places.append(end - 1)
                sources.append(place_of[part.sequence_key])
        return Filling(torch.tensor(places), torch.tensor(sources), launched.tokens) if places else None


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step that a device computes, without drafts, scores and what else only the host could sample."""

    step: StepInput
    sequence_keys: Sequence[int]
    """The sequences of the parts that sample, in the order of `tokens`."""
    tokens: torch.Tensor
    """`[parts that sample]`, on the device."""
    copied: CopiedTokens

    @classmethod
    def of(cls, step: StepInput, sampling: Sequence[StepPart], tokens: torch.Tensor) -> DeviceStep:
        """Returns a step all of whose work is on its way.

        Args:
            sampling: the parts that sample, in the order of `tokens`.
        """
        return cls(step, [part.sequence_key for part in sampling], tokens, CopiedTokens.of(tokens))

    def collect(self) -> StepOutput:
        """See `LaunchedStep.collect`."""
        tokens = dict(zip(self.sequence_keys, self.copied.wait(), strict=True))
        sampled = [tokens[part.sequence_key] for part in self.step.parts if part.sample]
        return StepOutput.of(self.step, Drawn.one_each(Sampled(sampled)))


@dataclass(frozen=True, slots=True)
class CopiedTokens:
    """Tokens on their way to the host, behind all that their device was asked for before."""

    tokens: torch.Tensor
    """`[tokens]`, in pinned memory."""
    done: torch.cuda.Event | None
    """None: they are there."""

    @classmethod
    def of(cls, tokens: torch.Tensor) -> CopiedTokens:
        """Begins to copy tokens, and does not wait for them."""
        if tokens.device.type != "cuda":
            return cls(tokens, None)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        return cls(host, torch.cuda.current_stream(tokens.device).record_event())

    def wait(self) -> list[int]:
        """Returns the tokens once they are there, and with them all that comes before them."""
        if self.done is not None:
            self.done.synchronize()
        found: list[int] = self.tokens.tolist()
        return found


def _has_unknown(part: StepPart) -> bool:
    return part.token_ids[-1] == UNKNOWN_TOKEN

"""A step as every rank computes it: the packed order of its parts, and tokens that only the device knows yet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from baton.scores import Sampled
from engine.core.runner import UNKNOWN_TOKEN, BlockCopy, Drawn, LaunchedStep, StepInput, StepOutput, StepPart
from engine.uploads import StepNumbers

SOME_TOKEN = 0
"""Token that every vocabulary has."""


class RankStep(NamedTuple):
    """The computation of every rank.

    `parts` are in packed order. Those in `sampling` need the logits of their last known token and of their drafts; each
    part needs those of its first `num_scored` tokens.
    """

    parts: Sequence[StepPart]
    sampling: Sequence[int]
    copies: Sequence[BlockCopy] = ()
    num_scored: Sequence[int] = ()
    """Number of scored tokens of each part; empty: none are scored."""
    is_ready: bool = False
    """True if the blocks that it starts are zeroed already."""

    @property
    def logit_rows(self) -> list[int]:
        """Indices of the packed tokens whose logits are needed: first those of `sampling`, then the scored ones."""
        ends = list(itertools.accumulate([len(part.token_ids) for part in self.parts]))
        drafts = [part.num_drafts for part in self.parts]
        if any(drafts):
            rows = [row for index in self.sampling for row in range(ends[index] - 1 - drafts[index], ends[index])]
        else:
            rows = [ends[index] - 1 for index in self.sampling]
        for part, end, number in zip(self.parts, ends, self.num_scored, strict=False):
            begin = end - len(part.token_ids)
            rows += range(begin, begin + number)
        return rows


def order_for_packing(parts: Sequence[StepPart]) -> list[int]:
    """Return the parts' indices in packed order: segments first, then decodes with their drafts.

    Decodes of equal length are adjacent, and among them those with the same adapter.
    """
    lengths = [length if (length := len(p.token_ids)) == p.num_drafts + 1 else 0 for p in parts]
    adapters = [part.adapter for part in parts]
    if any(adapters):
        return sorted(range(len(parts)), key=list(zip(lengths, adapters, strict=True)).__getitem__)
    return sorted(range(len(parts)), key=lengths.__getitem__)


class Filling(NamedTuple):
    """Tokens that are known only on the device."""

    places: torch.Tensor
    """Indices of the tokens among the packed tokens of a step, `[tokens]`."""
    sources: torch.Tensor
    """The index of each in `tokens`, `[tokens]`."""
    tokens: torch.Tensor
    """`[tokens of the step before]`, on the device."""

    def put_by(self, numbers: StepNumbers) -> Filling:
        """Return the same with all tensors on the device, once the numbers have been sent."""
        return Filling(numbers.put(self.places), numbers.put(self.sources), self.tokens)

    def fill(self, token_ids: torch.Tensor) -> None:
        """Write them into the packed tokens, `[tokens]` on the device."""
        token_ids.index_copy_(0, self.places, self.tokens.index_select(0, self.sources))


class LastTokens:
    """Tokens that the last launched step has sampled, for a step that was planned before they were known.

    On a device they need not be copied to the host first: they are written into the next step's token ids.
    """

    def __init__(self) -> None:
        self._last: tuple[StepInput, LaunchedStep] | None = None

    def keep(self, step: StepInput, launched: LaunchedStep) -> None:
        """Remember a step that was launched."""
        self._last = step, launched

    def filled(self, step: StepInput) -> StepInput:
        """Return the next step with all its tokens, waiting for them. The step before is forgotten.

        A sequence that the step before has ended (`StepOutput.refusal`) gets an arbitrary token; its result is dropped.
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
        """Return the unknown tokens of the next step, whose parts are packed like this, on the device.

        None: there are none, or they are on the host, where `filled` finds them.
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
    """Step that a device computes, without drafts, scores or anything that needs sampling on the host."""

    step: StepInput
    sequence_keys: Sequence[int]
    """Keys of the parts that sample, in the order of `tokens`."""
    tokens: torch.Tensor
    """`[parts that sample]`, on the device."""
    copied: CopiedTokens

    @classmethod
    def of(cls, step: StepInput, sampling: Sequence[StepPart], tokens: torch.Tensor) -> DeviceStep:
        """Return a step whose work has been submitted.

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
    """Tokens that are being copied to the host, in order after all earlier work of their device."""

    tokens: torch.Tensor
    """`[tokens]`, in pinned memory."""
    done: torch.cuda.Event | None
    """Event after the copy; None: the tokens are already there."""

    @classmethod
    def of(cls, tokens: torch.Tensor) -> CopiedTokens:
        """Start to copy tokens, without waiting for them."""
        if tokens.device.type != "cuda":
            return cls(tokens, None)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        return cls(host, torch.cuda.current_stream(tokens.device).record_event())

    def wait(self) -> list[int]:
        """Return the tokens once the copy, and all earlier work, is done."""
        if self.done is not None:
            self.done.synchronize()
        found: list[int] = self.tokens.tolist()
        return found


def _has_unknown(part: StepPart) -> bool:
    return part.token_ids[-1] == UNKNOWN_TOKEN

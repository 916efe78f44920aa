"""What an engine asks of a model: compute one step over a KV cache.

A step is a value. `StepInput` says what to compute and holds nothing that changes, so a runner may read it while the
event loop goes on, in another thread or process. `StepOutput` says what was sampled and how far computing got.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from baton.cluster import Computes
from baton.errors import BatonError, InvalidRequest, TooLarge
from baton.sampling import SamplingParams
from baton.scores import NO_SCORES, Candidates, Drawn, Sampled, TokenScores
from engine.core.kv_spec import BlockTables, KVSpec

T = TypeVar("T")
UNKNOWN_TOKEN = -1
"""Stands in `StepPart.token_ids` of a step that is planned while the one before runs, for the token which that one
samples for the sequence. A runner that allows it keeps the tokens it has sampled, by `sequence_key`, and fills them in.
The engine knows no token id below 0."""


class Fence(Protocol):
    """What must have happened before KV is read. A `torch.cuda.Event` is one; a handle of another process may be."""

    def wait(self, stream: Any) -> None:
        """Makes `stream`, the reader's CUDA stream, wait until the KV is there."""
        ...


OnLayerDone = Callable[[int, Fence | None], None]
"""Receives a layer's index once K and V of all layers up to that one, for all tokens of the step, are in all ranks'
caches, for a reader that has waited for the fence (None: at once)."""


def ignore_layer(layer: int, fence: Fence | None) -> None:
    """The `OnLayerDone` of a caller who only wants the whole step. A runner that is given it spares the fences."""


class NotedLayers:
    """Passes on what a step reports of its layers, and notes whether it has begun to.

    Attributes:
        report: to be given to the step in place of the other. Nothing is noted of a step that reports to nobody.
        has_begun: whether a layer was reported.
    """

    def __init__(self, on_layer_done: OnLayerDone) -> None:
        self._on_layer_done = on_layer_done
        self.report: OnLayerDone = ignore_layer if on_layer_done is ignore_layer else self._note
        self.has_begun = False

    def _note(self, layer: int, fence: Fence | None) -> None:
        self.has_begun = True
        self._on_layer_done(layer, fence)


class StepPart(NamedTuple):
    """What a step computes of one sequence: `token_ids`, at the positions from `num_computed_tokens` on.

    known  [ computed before the step | token_ids: the last known one | drafts ]
    sampled                                                 after it, | after each draft that proved right

    A named tuple, because a step makes one per sequence: a frozen dataclass takes three times as long.
    """

    sequence_key: int
    """Identifies the sequence within its engine."""
    token_ids: tuple[int, ...]
    """Known tokens, and behind them drafts."""
    num_computed_tokens: int
    """Leading tokens whose KV is in the blocks before the step."""
    block_ids: BlockTables
    """The sequence's block tables; they may be longer than this step needs."""
    num_kv_tokens: tuple[int, ...]
    """Tokens in each table's blocks after the step."""
    sample: bool
    """Whether the known tokens end here, so that this step yields the next one."""
    is_decoding: bool
    """Whether this is one known token of a sequence that has begun to answer."""
    sampling: SamplingParams
    choice_index: int
    """Part of the counter of the random number that draws the next token, with `sampling.seed` and the position."""
    num_prompt_tokens: int
    """Tokens of the sequence that are not the answer's."""
    history: tuple[int, ...] = ()
    """All known tokens, where the step samples by parameters that look at them (`SamplingParams.needs_history`), or
    scores the prompt."""
    scores_prompt: bool = False
    """Whether the log probabilities of its prompt tokens are asked for."""
    num_drafts: int = 0
    """The last of `token_ids` that are guesses. The step samples after the last known token, and after each draft for
    as long as they are what was sampled: the first token that differs is taken in its place. Only a part that samples
    has any."""
    proposal: Proposal | None = None
    """What a draft model computes for it before the step; None: nothing."""

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """The number of its tokens that are no drafts."""
        return len(self.token_ids) - self.num_drafts

    @property
    def scored_token_ids(self) -> tuple[int, ...]:
        """The prompt tokens that follow the step's first tokens, one each: those whose scores the step gives."""
        if not self.scores_prompt:
            return ()
        return self.history[self.num_computed_tokens + 1 : min(self.end + 1, self.num_prompt_tokens)]

    @property
    def end(self) -> int:
        """One past the last position that the step computes."""
        return self.num_computed_tokens + len(self.token_ids)

    @property
    def known_end(self) -> int:
        """One past the last known position that the step computes: the position of the first token that is sampled."""
        return self.num_computed_tokens + len(self.token_ids) - self.num_drafts


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a draft model, which has a KV cache of its own, computes for a part before its step.

    Where drafts are wanted they stand as `UNKNOWN_TOKEN` in the step's part, and those that the draft model draws take
    their place: as many, or fewer where what it draws would end the answer.
    """

    part: StepPart
    """Known tokens that the draft model has not computed, in its own block tables."""
    num_drafts: int
    """Drafts that are wanted; 0: it catches up with the known tokens, and no more."""


class Proposed(NamedTuple):
    """What came of the proposals of a step."""

    counts: Mapping[int, int]
    """Drafts that were proposed, by the part's index."""
    rounds: tuple[tuple[StepInput, float], ...]
    """The draft model's steps and the seconds that each took: the first one computes known tokens, and each one after
    it a draft of the one before."""

    @property
    def took_s(self) -> float:
        """Seconds of all its steps."""
        return sum(took_s for _, took_s in self.rounds)


class BlockCopy(NamedTuple):
    """A block whose content goes into another one, in every layer of a group and on every rank."""

    group: int
    """Index into the block tables."""
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step of an engine."""

    parts: tuple[StepPart, ...]
    copies: tuple[BlockCopy, ...] = ()
    """Copies to perform, in order, before anything is computed."""

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(len(part.token_ids) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What came of a step: one entry per part, in the order of `StepInput.parts`."""

    sampled_token_ids: tuple[tuple[int, ...], ...]
    """The sequence's next tokens, none to several."""
    num_computed_tokens: tuple[int, ...]
    """Leading tokens of the sequence whose KV is in its blocks now."""
    scores: tuple[TokenScores, ...] | None = None
    """What the model thought of each part's sampled tokens; None: no part asks for that."""
    prompt_scores: tuple[TokenScores, ...] | None = None
    """Scores of each part's `scored_token_ids`; None: there are none."""
    failures: Mapping[int, str] | None = None
    """Why parts have no token and cannot go on, by their index: what their clients asked cannot be served. None: all
    go on."""

    candidates: Mapping[int, Candidates] | None = None
    """The likeliest next tokens of the parts that a beam search computes, by their index; they sample none. None: no
    search is in the step."""
    too_large: frozenset[int] = frozenset()
    """Indices of parts that cannot go on: alone they need more memory than the device has. None of their tokens
    counts as computed."""
    proposed: Proposed | None = None
    """What a draft model did before the step; None: it had nothing to do."""

    @property
    def proposing_s(self) -> float:
        """Seconds of the step that a draft model took."""
        return 0.0 if self.proposed is None else self.proposed.took_s

    def refusal(self, index: int) -> BatonError | None:
        """Returns why a part cannot go on; None: it can."""
        if self.failures and index in self.failures:
            return InvalidRequest(self.failures[index])
        return TooLarge() if index in self.too_large else None

    def num_drafts(self, index: int, part: StepPart) -> int:
        """Returns how many drafts of a part were checked."""
        return part.num_drafts if self.proposed is None else self.proposed.counts.get(index, part.num_drafts)

    @classmethod
    def of(cls, step: StepInput, drawn: Drawn, prompt_scores: Sequence[TokenScores] | None = None) -> StepOutput:
        """Returns the output of a step that has computed every token.

        What follows the last token that was drawn for a part is no part of its sequence.

        Args:
            step: the step.
            drawn: what came of each part that samples.
            prompt_scores: of each part; None: none scores its prompt.
        """
        token_ids, scores = iter(drawn.token_ids), iter(drawn.scores or ())
        all_sample = len(drawn.token_ids) == len(step.parts)
        sampled = tuple(drawn.token_ids if all_sample else [next(token_ids) if p.sample else () for p in step.parts])
        return cls(
            sampled_token_ids=sampled,
            num_computed_tokens=tuple(
                [
                    part.num_computed_tokens + (len(token_ids) if part.num_drafts else len(part.token_ids))
                    for part, token_ids in zip(step.parts, sampled, strict=True)
                ]
            ),
            scores=tuple([next(scores) if part.sample else NO_SCORES for part in step.parts]) if drawn.scores else None,
            prompt_scores=tuple(prompt_scores) if prompt_scores else None,
            failures=_by_part(step, drawn.failures) if drawn.failures else None,
            candidates=_by_part(step, drawn.candidates) if drawn.candidates else None,
        )

    @classmethod
    def one_each(cls, step: StepInput, sampled: Sampled) -> StepOutput:
        """Returns the output of a step without drafts that has computed every token.

        Args:
            step: the step.
            sampled: a row for each part that samples.
        """
        return cls.of(step, Drawn.one_each(sampled))


def _by_part(step: StepInput, found: Mapping[int, T]) -> dict[int, T]:
    sampling = [index for index, part in enumerate(step.parts) if part.sample]
    return {sampling[place]: value for place, value in found.items()}


class LaunchedStep(Protocol):
    """A step that is under way."""

    def collect(self) -> StepOutput:
        """Waits for the step, in any thread, and returns what came of it: what `execute` returns, or raises."""
        ...


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step that its launch has computed."""

    output: StepOutput

    def collect(self) -> StepOutput:
        """See `LaunchedStep.collect`."""
        return self.output


class Runner(Protocol):
    """A model bound to a KV cache."""

    spec: KVSpec
    """Shape of each rank's cache."""
    num_blocks: tuple[int, ...]
    """Blocks for each block table; of the states' table, the sequences that can have one at a time."""
    max_model_len: int
    """Longest sequence the model and the cache can hold, in tokens."""
    vocab_size: int
    """Rows of the embedding: a token id is less."""
    eos_token_ids: frozenset[int]
    name: str
    """The engine that computes, as other workers see it."""
    sampler: str
    """The contract of its random numbers: samplers of one name draw the same token from the same logits, seed, choice
    and position."""

    computes: Computes
    """What it computes with, as far as the runner knows."""
    runs_ahead: bool
    """Whether what `launch` begins goes on by itself, on a device."""
    token_s: float
    """Seconds that a token took in the first step, with which the runner was tried; 0: that says nothing of others."""

    @property
    def caches(self) -> Sequence[Any]:
        """Every rank's cache, each with its part of the heads, in a type of the runner's that the KV transfer knows.
        Block ids mean the same in all of them.
        """
        ...

    def prepare(self, params: SamplingParams) -> None:
        """Does what sequences with structured answers need before their first step, in up to a second. It is called in
        any thread.

        Raises:
            InvalidRequest: such answers cannot be served.
        """
        ...

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        """Computes a step: performs its copies, writes its KV into the caches and samples.

        States of a sequence that begins (`num_computed_tokens` 0) are zeroed first. It is called from one thread at a
        time, never the event loop's. `on_layer_done` is called in that thread, with rising layers, as often as the
        runner can: at best once per layer, possibly not at all. On return all KV and states are in the caches, also for
        readers that wait for no fence.

        Where a token is unknown (`UNKNOWN_TOKEN`), it is the one that the step before has sampled for the sequence. No
        such step follows one that has failed.
        """
        ...

    def launch(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> LaunchedStep:
        """Begins what `execute` does, behind the steps that were launched before, and in the same thread as these.

        A runner that `runs_ahead` has then only put it on its way; the fences of `on_layer_done` say how far it is.
        Another one has computed it.
        """
        ...

    def recover(self) -> None:
        """Gives back what a failed step has left on the device, and asks the device for a sign of life. No step runs.

        Raises:
            Exception: the device gives none. It computes nothing more in this process.
        """
        ...

    def close(self) -> None:
        """Ends the processes that it has started. No step runs, and none comes."""
        ...

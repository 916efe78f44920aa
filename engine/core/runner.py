"""Interface of a model to the engine: computes one step over a KV cache.

A step is an immutable value: `StepInput` says what to compute, so a runner may read it in another thread or process
while the event loop continues. `StepOutput` holds the sampled tokens and how far each sequence is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from baton.adapters import AdapterFacts
from baton.cluster import Computes
from baton.errors import BatonError, ImagesMissing, InvalidRequest, TooLarge
from baton.messages import Adapter, PlacedImage
from baton.sampling import SamplingParams
from baton.scores import NO_SCORES, Candidates, Drawn, Sampled, TokenScores
from engine.core.image_store import ImageStore
from engine.core.kv_spec import BlockTables, KVSpec

T = TypeVar("T")
UNKNOWN_TOKEN = -1
"""Placeholder in `StepPart.token_ids` for a token that the running step samples, if the part's step is planned ahead. A
runner that supports this keeps its sampled tokens by `sequence_key` and fills them in. Token ids are never below 0."""


class Fence(Protocol):
    """Condition to wait for before KV is read. A `torch.cuda.Event` is one; a handle of another process may be one."""

    def wait(self, stream: Any) -> None:
        """Make `stream`, the reader's CUDA stream, wait until the KV is there."""
        ...


OnLayerDone = Callable[[int, Fence | None], None]
"""Callback with a layer's index: K and V of all layers up to it, for all tokens of the step, are in all ranks' caches.
A reader must wait for the fence first (None: may read at once)."""


def ignore_layer(layer: int, fence: Fence | None) -> None:
    """Do nothing: the `OnLayerDone` for callers that wait for the end of the step. Runners then record no fences."""


class NotedLayers:
    """Forwards the layer reports of a step and records whether there were any.

    Attributes:
        report: the callback to give to the step instead. It records nothing if the original is `ignore_layer`.
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
    """One sequence's part of a step: `token_ids`, at the positions from `num_computed_tokens` on.

    known  [ computed before the step | token_ids: the last known one | drafts ]
    sampled                                                 after it, | after each accepted draft

    A named tuple, because a step makes one per sequence: a frozen dataclass takes three times as long.
    """

    sequence_key: int
    """Identifies the sequence within its engine."""
    token_ids: tuple[int, ...]
    """Known tokens, followed by drafts."""
    num_computed_tokens: int
    """Leading tokens whose KV is in the blocks before the step."""
    block_ids: BlockTables
    """The sequence's block tables; they may be longer than this step needs."""
    num_kv_tokens: tuple[int, ...]
    """Tokens in each table's blocks after the step."""
    sample: bool
    """True if the part ends with the last known token, so that this step yields the next one."""
    is_decoding: bool
    """True if this is one known token of a sequence that has already generated tokens."""
    sampling: SamplingParams
    choice_index: int
    """Part of the counter of the random number that draws the next token, with `sampling.seed` and the position."""
    num_prompt_tokens: int
    """Tokens of the sequence before its output."""
    history: tuple[int, ...] = ()
    """All known tokens, if the step samples by parameters that need them (`SamplingParams.needs_history`) or scores the
    prompt."""
    scores_prompt: bool = False
    """True if the log probabilities of its prompt tokens are requested."""
    num_drafts: int = 0
    """Number of drafts at the end of `token_ids`. The step samples after the last known token, and after each draft
    while the drafts match the sampled tokens: the first token that differs replaces its draft. Only a part that samples
    has drafts."""
    proposal: Proposal | None = None
    """Draft model's work for this part before the step; None: nothing."""
    adapter: int = 0
    """Slot of the sequence's adapter; 0: it has none."""
    images: tuple[PlacedImage, ...] = ()
    """All images of the sequence's prompt, from which positions follow, wherever the part is."""

    @property
    def num_scheduled_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_known_tokens(self) -> int:
        """Number of its tokens that are not drafts."""
        return len(self.token_ids) - self.num_drafts

    @property
    def scored_token_ids(self) -> tuple[int, ...]:
        """The prompt tokens that the step scores: those that follow each of its tokens."""
        if not self.scores_prompt:
            return ()
        return self.history[self.num_computed_tokens + 1 : min(self.end + 1, self.num_prompt_tokens)]

    @property
    def end(self) -> int:
        """One past the last position that the step computes."""
        return self.num_computed_tokens + len(self.token_ids)

    @property
    def known_end(self) -> int:
        """One past the last known position that the step computes: the position of the first sampled token."""
        return self.num_computed_tokens + len(self.token_ids) - self.num_drafts


@dataclass(frozen=True, slots=True)
class Proposal:
    """Work of a draft model, which has its own KV cache, for a part before its step.

    Requested drafts stand as `UNKNOWN_TOKEN` in the step's part. The draft model's tokens replace them: as many, or
    fewer if one of them would end the response.
    """

    part: StepPart
    """Known tokens that the draft model has not computed, in its own block tables."""
    num_drafts: int
    """Number of requested drafts; 0: the model only catches up with the known tokens."""


class Proposed(NamedTuple):
    """Result of a step's proposals."""

    counts: Mapping[int, int]
    """Numbers of proposed drafts, by part index."""
    took_s: float
    """Duration of the draft model's steps, in seconds."""


class BlockCopy(NamedTuple):
    """Copy of one block to another, in every layer of a group and on every rank."""

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
    """Result of a step: one entry per part, in the order of `StepInput.parts`."""

    sampled_token_ids: tuple[tuple[int, ...], ...]
    """The sequence's next tokens, none to several."""
    num_computed_tokens: tuple[int, ...]
    """Leading tokens of the sequence whose KV is in its blocks now."""
    scores: tuple[TokenScores, ...] | None = None
    """Log probabilities of each part's sampled tokens; None: no part requests them."""
    prompt_scores: tuple[TokenScores, ...] | None = None
    """Scores of each part's `scored_token_ids`; None: there are none."""
    failures: Mapping[int, str] | None = None
    """Errors of parts that have no token and cannot continue, by part index: the request cannot be served. None: all
    continue."""

    candidates: Mapping[int, Candidates] | None = None
    """Likeliest next tokens for the parts of beam searches, by part index; such parts sample no token. None: the step
    has no beam search."""
    too_large: frozenset[int] = frozenset()
    """Indices of parts that cannot continue, because even alone they need more memory than the device has. None of
    their tokens counts as computed."""
    missing_images: frozenset[int] = frozenset()
    """Indices of parts that cannot continue, because they compute images that the runner does not hold. None of their
    tokens counts as computed."""
    proposed: Proposed | None = None
    """Result of the draft model's work before the step; None: it had nothing to do."""

    @property
    def proposing_s(self) -> float:
        """Seconds of the step that the draft model took."""
        return 0.0 if self.proposed is None else self.proposed.took_s

    def refusal(self, index: int) -> BatonError | None:
        """Return why a part cannot continue; None: it can."""
        if self.failures and index in self.failures:
            return InvalidRequest(self.failures[index])
        if index in self.missing_images:
            return ImagesMissing()
        return TooLarge() if index in self.too_large else None

    def num_drafts(self, index: int, part: StepPart) -> int:
        """Return how many drafts of a part were checked."""
        return part.num_drafts if self.proposed is None else self.proposed.counts.get(index, part.num_drafts)

    def with_missing(self, step: StepInput, missing: frozenset[int]) -> StepOutput:
        """Return the output of a step, given that of its other parts.

        Args:
            step: the whole step.
            missing: indices of the parts that were left out; see `missing_images`.
        """
        others = [index for index in range(len(step.parts)) if index not in missing]

        def spread(found: Sequence[T], filling: Callable[[StepPart], T]) -> tuple[T, ...]:
            of_others = dict(zip(others, found, strict=True))
            return tuple(of_others[i] if i in of_others else filling(part) for i, part in enumerate(step.parts))

        def moved(found: Mapping[int, T] | None) -> dict[int, T] | None:
            return None if found is None else {others[index]: value for index, value in found.items()}

        return StepOutput(
            sampled_token_ids=spread(self.sampled_token_ids, lambda part: ()),
            num_computed_tokens=spread(self.num_computed_tokens, lambda part: part.num_computed_tokens),
            scores=None if self.scores is None else spread(self.scores, lambda part: NO_SCORES),
            prompt_scores=None if self.prompt_scores is None else spread(self.prompt_scores, lambda part: NO_SCORES),
            failures=moved(self.failures),
            candidates=moved(self.candidates),
            too_large=frozenset(others[index] for index in self.too_large),
            missing_images=missing,
        )

    @classmethod
    def of(cls, step: StepInput, drawn: Drawn, prompt_scores: Sequence[TokenScores] | None = None) -> StepOutput:
        """Return the output of a step that has computed every token.

        Tokens after the last one drawn for a part do not belong to its sequence.

        Args:
            step: the step.
            drawn: sampling result of each part that samples.
            prompt_scores: prompt scores of each part; None: no part scores its prompt.
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
        """Return the output of a step without drafts that has computed every token.

        Args:
            step: the step.
            sampled: one row for each part that samples.
        """
        return cls.of(step, Drawn.one_each(sampled))


def _by_part(step: StepInput, found: Mapping[int, T]) -> dict[int, T]:
    sampling = [index for index, part in enumerate(step.parts) if part.sample]
    return {sampling[place]: value for place, value in found.items()}


class LaunchedStep(Protocol):
    """A step that is being computed."""

    def collect(self) -> StepOutput:
        """Wait for the step, in any thread. Return the result of `execute`, or raise its error."""
        ...


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """Step that was computed at its launch."""

    output: StepOutput

    def collect(self) -> StepOutput:
        """See `LaunchedStep.collect`."""
        return self.output


class Runner(Protocol):
    """A model bound to a KV cache."""

    spec: KVSpec
    """Shape of each rank's cache."""
    num_blocks: tuple[int, ...]
    """Blocks for each block table; for the states' table, the number of sequences that can have a state at a time."""
    max_model_len: int
    """Longest sequence that the model and the cache can hold, in tokens."""
    vocab_size: int
    """Rows of the embedding; token ids must be less."""
    eos_token_ids: frozenset[int]
    name: str
    """Name of the engine that computes, as shown to other workers."""
    sampler: str
    """Name of the random number contract: samplers with the same name draw the same token from the same logits, seed,
    choice and position."""

    computes: Computes
    """Hardware and data types of the computation, as far as the runner knows."""
    runs_ahead: bool
    """True if a launched step continues by itself, on a device."""
    images: ImageStore | str
    """Images of its sequences' prompts; a text: the reason why it takes none."""
    num_start_tokens: int
    """Tokens at the end of a prompt with which the decoder starts, if an encoder reads the others; 0: no encoder."""
    canvas_length: int
    """Tokens of a canvas: blocks of so many are drawn together, over several steps in which the sequence has no new
    token and its last one does not become computed; 0: each step draws a token."""
    token_s: float
    """Seconds per token in the runner's first trial step; 0: that says nothing about later steps."""
    max_adapters: int
    """Number of slots for adapters, which count from 1; 0: it computes none."""

    @property
    def expert_tokens(self) -> Sequence[int]:
        """Tokens that the model has sent to each expert, over all layers; empty: not counted."""
        ...

    @property
    def caches(self) -> Sequence[Any]:
        """Every rank's cache, each with its share of the heads, in a type of the runner that the KV transfer supports.

        Block ids mean the same in all of them.
        """
        ...

    def prepare(self, params: SamplingParams) -> None:
        """Do the preparation for a sequence with structured output before its first step, in up to a second.

        May be called in any thread.

        Raises:
            InvalidRequest: the structure cannot be supported.
        """
        ...

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        """Compute a step: perform its copies, write its KV into the caches and sample.

        States of a new sequence (`num_computed_tokens` 0) are zeroed first. The method is called from one thread at a
        time, never the event loop's. `on_layer_done` is called in that thread, with ascending layers, as often as the
        runner can: at best once per layer, possibly not at all. On return all KV and states are in the caches, also for
        readers that wait for no fence.

        An unknown token (`UNKNOWN_TOKEN`) is the one that the step before has sampled for the sequence. No such step
        follows a failed one.
        """
        ...

    def launch(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> LaunchedStep:
        """Start what `execute` does, after the steps launched before, and in the same thread.

        With `runs_ahead` the step is only submitted, and the fences of `on_layer_done` show its progress. Otherwise the
        step has been computed on return.
        """
        ...

    def check_adapter(self, path: str) -> AdapterFacts:
        """Read an adapter's folder and compare it with the model, in any thread.

        Raises:
            OSError: it cannot be read.
            InvalidRequest: it is no adapter that fits this model; the message says why.
        """
        ...

    def read_adapter(self, adapter: Adapter) -> Callable[[int], None]:
        """Read and check an adapter. Return a function that puts it into a slot, on every rank.

        Steps that are launched after this function has returned may use the slot. Both functions are called in one
        thread at a time, but also while a step runs that does not use the slot.

        Raises:
            AdapterUnreadable: this worker cannot read it.
            InvalidRequest: its folder does not hold what was registered.
        """
        ...

    def recover(self) -> None:
        """Free what a failed step has left on the device, and test that the device responds. No step runs.

        Raises:
            Exception: the device does not respond. It cannot compute in this process any more.
        """
        ...

    def close(self) -> None:
        """Stop the processes that the runner has started. No step runs, and none follows."""
        ...

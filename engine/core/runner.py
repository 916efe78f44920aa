"""Interface of a model to the engine: computes one step over a KV cache, whose shape `KVSpec` describes.

A step is an immutable value: `StepInput` says what to compute, so a runner may read it in another thread or process
while the event loop continues. `StepOutput` holds the sampled tokens and how far each sequence is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar

from baton.adapters import AdapterFacts
from baton.blocks import HASH_BLOCK
from baton.cluster import Computes
from baton.costs import StepSize
from baton.errors import BatonError, ImagesMissing, InvalidRequest, TooLarge
from baton.messages import Adapter, PlacedImage
from baton.sampling import SamplingParams
from baton.scores import NO_SCORES, Candidates, Sampled, TokenScores
from engine.core.image_store import ImageStore

T = TypeVar("T")
UNKNOWN_TOKEN = -1
"""Placeholder in `StepPart.token_ids` for a token that the running step samples, if the part's step is planned ahead. A
runner that supports this keeps its sampled tokens by `sequence_key` and fills them in. Token ids are never below 0."""
BlockTables = tuple[tuple[int, ...], ...]
"""Block ids in sequence order, one table per layer group, then the states' table if the model has states."""

EMPTY_PLACE = -1
"""Entry of a block table without a block: its tokens have left the layers' window, or no token is computed yet, so
there is no state. It is never read."""

DTYPE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Bytes per element, by torch's name of the data type without `torch.`."""


INT8 = "int8"
"""Data type of quantized pages: value = scale times code, with one scale per token and head of K and of V."""
FP8 = "float8_e4m3fn"
"""Data type of pages of 8-bit floats, whose maximum is 448. They have no scale, like vLLM's by default."""
INT8_SCALE_BYTES = 4
"""Bytes of a float32 scale. It is stored after a token's codes and counts among the dimensions of K and of V."""


class PageOrder(StrEnum):
    """The order of values within one KV head of a block."""

    K_THEN_V = "k_then_v"
    """The K of all tokens, then the V of all tokens."""
    BY_TOKEN = "by_token"
    """The K and V of one token side by side, token after token."""
    OPAQUE = "opaque"
    """Layout known only to the engine, identified by a tag. Blocks are copied whole, between equal groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers whose KV has the same shape, and the blocks that hold it.

    Raises:
        ValueError: the block size is not a multiple of 16, or the data type is unknown.
    """

    name: str
    layers: tuple[int, ...]
    """The model's layer indices, ascending."""
    block_size: int
    """Tokens per block, a multiple of 16. Groups of one model may differ."""
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    """A key of `DTYPE_BYTES`."""
    page_order: PageOrder = PageOrder.K_THEN_V
    tag: str = ""
    """Name of an opaque page order; empty for the others."""
    strides: tuple[int, int] = (0, 0)
    """Elements from one layer to the next and from one block to the next; 0: contiguous."""
    window: int = 0
    """Number of tokens that a token attends to, itself included; 0: all tokens before it."""
    is_replicated: bool = False
    """True if each of several ranks holds all KV heads of the model."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size % HASH_BLOCK:
            raise ValueError(f"block_size must be a multiple of {HASH_BLOCK}, got {self.block_size}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if (self.page_order is PageOrder.OPAQUE) != bool(self.tag):
            raise ValueError(f"an opaque page order needs a tag, and only that: {self.page_order}, {self.tag!r}")

    @property
    def page_dims(self) -> tuple[int, ...]:
        """Elements per token of each page of a head: of K and of V, or of both if they are interleaved."""
        is_apart = self.page_order is PageOrder.K_THEN_V
        return (self.k_dim, self.v_dim) if is_apart else (self.k_dim + self.v_dim,)

    @property
    def page_numel(self) -> int:
        """Elements of one head's K and V in a block."""
        return self.block_size * (self.k_dim + self.v_dim)

    @property
    def row_numel(self) -> int:
        """Elements of one block of one layer."""
        return self.num_kv_heads * self.page_numel

    @property
    def row_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.row_numel * DTYPE_BYTES[self.dtype]

    def first_block(self, num_tokens: int) -> int:
        """Return the index of the first block that is needed after `num_tokens` tokens.

        The last of these tokens may be computed again, and attends to the window that ends with it.
        """
        return max(0, num_tokens - self.window) // self.block_size if self.window else 0


@dataclass(frozen=True, slots=True)
class StateSpec:
    """Named tensor of fixed size that every sequence of a model with recurrent layers has."""

    name: str
    shape: tuple[int, ...]
    """`(layers, ...)` of a real model: the states of one kind of all layers are one tensor."""
    dtype: str
    """A key of `DTYPE_BYTES`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of a KV cache in plain values: the same on every worker of a model with equal settings.

    The layers of a model form groups whose KV has the same shape and window. Each sequence has a block table and a
    token count for every group. A dense model is one group; a model without attention has one group without layers,
    whose blocks take no memory and only name prefixes.

    Recurrent layers also keep a state of fixed size. All states of a sequence together are a row of the states' pool. A
    step reads a sequence's row and writes another one, and never changes the row that it reads. So a step can be
    computed again, and a row can be shared and cached like a full block.

        block_ids      ( table of group 0, table of group 1, ..., table of the states )   the last only with states
        states' table  ( row after the computed tokens, row that the next step writes )   first EMPTY_PLACE: no state
    """

    groups: tuple[LayerGroup, ...]
    states: tuple[StateSpec, ...] = ()
    reads: tuple[tuple[int, int], ...] = ()
    """Layers without KV of their own, each with the layer whose KV it reads."""
    whole_prompts: bool = False
    """True if a prompt must be computed in one step: the model cannot continue a state by several tokens, or an encoder
    reads the prompt in both directions."""

    @property
    def block_size(self) -> int:
        """Tokens of the shortest prefix that whole blocks of every group hold: the unit of prefix reuse."""
        return math.lcm(*(group.block_size for group in self.groups))

    @property
    def num_layers(self) -> int:
        """The model's layers up to and including the last one with KV."""
        return 1 + max((layer for group in self.groups for layer in group.layers), default=-1)

    @property
    def num_tables(self) -> int:
        """Block tables of a sequence."""
        return len(self.groups) + bool(self.states)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of every group, over all layers."""
        return sum(len(group.layers) * group.row_bytes for group in self.groups)

    @property
    def supports_prefix_reuse(self) -> bool:
        """True if a prompt can be continued from a cached prefix."""
        return not self.whole_prompts

    @property
    def state_bytes(self) -> int:
        """Bytes of one row of the states' pool."""
        return sum(state.num_bytes for state in self.states)

    @property
    def resumes_anywhere(self) -> bool:
        """True if a sequence can continue after each of its cached blocks: there are neither states nor windows."""
        return not self.states and not any(group.window for group in self.groups)

    def describe(self) -> str:
        """Return a one-line description of everything that two workers must agree on."""
        sizes = "/".join(str(size) for size in sorted({group.block_size for group in self.groups}))
        groups = "; ".join(
            f"{g.name}: {len(g.layers)} layers x {g.num_kv_heads} heads x ({g.k_dim}+{g.v_dim}) {g.dtype}"
            f"{f' window {g.window}' if g.window else ''}"
            f"{'' if g.page_order is PageOrder.K_THEN_V else f' {g.page_order} {g.tag}'.rstrip()}"
            for g in self.groups
        )
        states = "".join(f"; state {s.name}{list(s.shape)}" for s in self.states)
        return f"block size {sizes}; {groups}{states}"


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

    def size(self, *, denoises: bool = False) -> StepSize:
        """Return the size of the step.

        Args:
            denoises: whether the model denoises canvases: each step of one counts as decoding, also of the first one.
        """
        num_new = num_pairs = num_decoding = num_kv_tokens = num_drafts = 0
        for part in self.parts:
            num_tokens, start = len(part.token_ids) - part.num_drafts, part.num_computed_tokens
            num_new += num_tokens
            num_drafts += part.num_drafts
            if part.is_decoding or (denoises and part.sample and num_tokens == 1):
                num_decoding += 1
                num_kv_tokens += start + 1
            else:
                num_pairs += num_tokens * (2 * start + num_tokens) // 2
        return StepSize(
            num_new=num_new,
            num_pairs=num_pairs,
            num_decoding=num_decoding,
            num_kv_tokens=num_kv_tokens,
            num_drafts=num_drafts,
        )


class Drawn(NamedTuple):
    """Results of the parts of a step that sample."""

    token_ids: list[tuple[int, ...]]
    """Tokens of each part; none for a part that failed or belongs to a beam search."""
    scores: list[TokenScores] | None = None
    """Scores of each part's tokens; None: no part asks for them."""
    failures: Mapping[int, str] = {}
    """Reasons why parts have no token, by part."""
    candidates: Mapping[int, Candidates] = {}
    """Next tokens of the parts of beam searches, by part."""

    @classmethod
    def one_each(cls, sampled: Sampled) -> Drawn:
        """Return the results of parts that have one row each."""
        without = sampled.candidates
        token_ids: list[tuple[int, ...]] = [(token_id,) for token_id in sampled.token_ids]
        for row in without:
            token_ids[row] = ()
        return cls(token_ids, sampled.scores, sampled.failures, without)

    def in_order(self, parts: Sequence[int]) -> Drawn:
        """Return the results with the parts reordered: the first one is the part of the first index, and so on."""
        return Drawn(
            [self.token_ids[part] for part in parts],
            [self.scores[part] for part in parts] if self.scores else None,
            {place: self.failures[part] for place, part in enumerate(parts) if part in self.failures},
            {place: self.candidates[part] for place, part in enumerate(parts) if part in self.candidates},
        )


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

"""Common part of runners whose models give logits: KV caches, the order of a step, and the sampler."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from baton.adapters import AdapterFacts
from baton.cluster import Computes
from baton.errors import ConfigError, ModelLoadError, in_one_line
from baton.memory import GIB, PROCESS_BYTES, Room, adapters_bytes, available_memory, weights_bytes
from baton.messages import Adapter
from baton.sampling import SamplingParams
from baton.scores import NO_SCORES, Sampled, TokenScores
from baton.tokenizer_file import end_of_sequence_ids
from engine.core.faults import Fault, fault_of
from engine.core.image_store import ImageStore
from engine.core.pool_sizes import ROWS_PER_SEQUENCE, PoolNeeds, pool_bytes, sizes_within, table_sizes
from engine.core.runner import (
    FP8,
    BlockCopy,
    ComputedStep,
    Drawn,
    LaunchedStep,
    NotedLayers,
    OnLayerDone,
    StepInput,
    StepOutput,
    StepPart,
    ignore_layer,
)
from engine.model.kv_cache import KVCache
from engine.model.rank_step import LastTokens, RankStep, order_for_packing
from engine.model.self_check import tables_of
from engine.model.shapes import ModelShape, arithmetic_dtype, longest_sequence, report_longest
from engine.sampling.pipeline import SAMPLER, Sampler
from engine.sampling.scores import scores_of
from engine.sampling.steps import Row
from engine.sampling.structure import Structures

if TYPE_CHECKING:
    from baton.config import EngineConfig, ModelConfig


WARM_UP_TOKENS = 64
NO_SAMPLING = SamplingParams(temperature=0.0)
"""Parameters of a part whose tokens are not sampled by a request."""
OF_PACKED_STEPS = (
    "tensor_parallel", "expert_parallel", "batch_invariant", "attention", "draft_model", "max_adapters",
)  # fmt: skip
"""Settings that need packed steps over the pages, which runners with passes of their own do not have."""
logger = logging.getLogger(__name__)
Execute = Callable[[StepInput, OnLayerDone, bool], StepOutput]
"""Executes a step. The last argument says whether its blocks are ready: those that it starts are zeroed already."""
SampleRows = Callable[[Sequence[int], Sequence[Row]], Sampled]
"""Samples from the rows of logits with these indices; each row is used at most once."""


class LogitsRunner(ABC):
    """Causal language model with its KV caches: a `Runner` whose subclass computes the logits.

    Args:
        shape: the model's configuration, and the attention of its layers.
        devices: one for each rank.
        num_blocks: blocks of temporary first caches, which the subclass replaces (`_make_caches`); 0: the caches are
            final.

    Raises:
        ModelLoadError: the KV pool is too small, or sequences cannot have the configured length; the message says why.
        ConfigError: there is no room for the KV pool.
    """

    name: str
    """See `Runner.name`."""
    runs_ahead = False
    images: ImageStore | str = "only the transformers runner computes them"
    """See `Runner.images`."""
    num_start_tokens = 0
    """See `Runner.num_start_tokens`."""
    canvas_length = 0
    """See `Runner.canvas_length`."""
    token_s = 0.0
    """See `Runner.token_s`."""
    max_adapters = 0
    """See `Runner.max_adapters`."""
    row_by_row: Callable[[], AbstractContextManager[object]] = staticmethod(contextlib.nullcontext)
    """Context manager in which a step's tokens and scores are computed."""
    _set_aside = 0
    """Bytes of each GPU that are reserved for transfers and not used by the pool."""
    _image_bytes = 0
    """Bytes of the host that are reserved for images."""
    _canvas_bytes = 0
    """Bytes of the device that are reserved for the logits of canvases."""

    @property
    def expert_tokens(self) -> Sequence[int]:
        """See `Runner.expert_tokens`."""
        return ()

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        shape: ModelShape,
        devices: Sequence[torch.device],
        *,
        num_blocks: int = 0,
    ) -> None:
        config = shape.config
        self.batch = engine.batch(on_gpu=devices[0].type == "cuda")
        self.dtype = arithmetic_dtype(config, model.dtype, devices[0].type == "cuda")
        kv_dtype = {"auto": self.dtype, "fp8": FP8}.get(engine.kv_dtype, engine.kv_dtype)
        self.spec = shape.cache_spec(engine.block_size, kv_dtype, len(devices), self.dtype)
        pages = self.spec.groups[0].dtype
        self.computes = Computes(num_ranks=len(devices), dtype=self.dtype, weights=model.weights, kv_dtype=pages)
        self._model_len = longest_sequence(config, engine.max_model_len)
        report_longest(config, engine.max_model_len, self._model_len)
        self._needs = PoolNeeds(
            max_num_seqs=self.batch.max_num_seqs, max_tokens=self._model_len, snapshot_tokens=engine.snapshot_tokens
        )
        if not engine.num_blocks:  # refuse before minutes are spent on loading
            pool_gib = self._pool_gib(model, engine, devices)
        fixed = num_blocks or engine.num_blocks
        self._make_caches(self._sizes_of(fixed) if fixed else self._sizes_within(pool_gib), devices)
        self.sampler = SAMPLER
        self.vocab_size: int = config.vocab_size  # loading refuses an embedding of another size
        self.eos_token_ids = frozenset(end_of_sequence_ids(Path(model.path)))
        eos_token_ids = [token for token in self.eos_token_ids if 0 <= token < self.vocab_size]
        tokenizer = Path(model.path) / "tokenizer.json"
        self._structures = Structures(tokenizer if tokenizer.exists() else None, self.vocab_size, eos_token_ids)
        self._sampler = Sampler(eos_token_ids, self._structures)
        self._last_tokens = LastTokens()
        self._steps = SmallerSteps(self._executed, self._copy_blocks, self.recover)

    def _pool_gib(self, model: ModelConfig, engine: EngineConfig, devices: Sequence[torch.device]) -> float:
        """Return the size of each rank's pool next to the weights, in GiB.

        Raises:
            ConfigError: there is no room for it.
        """
        share = engine.memory_share if engine.kv_cache_gib == "auto" else 1.0
        kept = "fp8" if model.weights == "fp8" else self.dtype
        weights = weights_bytes(Path(model.path), kept) // len(devices)
        adapters = adapters_bytes(Path(model.path), engine.max_adapters, engine.max_adapter_rank, self.dtype)
        others = adapters + self._canvas_bytes
        if devices[0].type == "cuda":
            free, total = torch.cuda.mem_get_info(devices[0])
            free = min(free, int(share * total))
            others //= len(devices)
            room = Room(free=free, num_pools=1, needed=weights, others=others, on_gpu=True, set_aside=self._set_aside)
        else:
            free, needed = available_memory(share), weights + PROCESS_BYTES + self._image_bytes
            room = Room(free=free, num_pools=len(devices), needed=needed, others=others)
        return room.pool_gib(engine.kv_cache_gib)

    def _sizes_of(self, num_blocks: int) -> tuple[int, ...]:
        """Return the sizes of the block tables of a pool with this many blocks."""
        return table_sizes(self.spec, num_blocks, self._needs)

    def _sizes_within(self, pool_gib: float) -> tuple[int, ...]:
        """Return the sizes of the block tables of a pool of this size."""
        return sizes_within(self.spec, int(pool_gib * GIB), self._needs)

    def _make_caches(self, sizes: tuple[int, ...], devices: Sequence[torch.device]) -> None:
        """Create a cache for each rank, replacing the existing ones.

        Args:
            sizes: blocks of each block table.

        Raises:
            ModelLoadError: there are too few blocks, or not enough memory.
        """
        spec = self.spec
        if min(sizes) < ROWS_PER_SEQUENCE:
            row = f", and a sequence's states are {spec.state_bytes}" if spec.states else ""
            raise ModelLoadError(
                f"a KV pool of {min(sizes)} blocks is too small (a block is {spec.block_bytes} bytes{row}); "
                "raise engine.kv_cache_gib or engine.num_blocks"
            )
        if len(devices) > 1 and devices[0].type == "cpu":
            _require_shared_memory((len(devices) - 1) * pool_bytes(spec, sizes))
        try:
            self.caches = tuple(
                KVCache(spec, sizes, self.batch.max_num_seqs, device, shared=rank > 0)
                for rank, device in enumerate(devices)
            )
        except torch.OutOfMemoryError as error:
            raise ModelLoadError(
                f"a KV pool of {pool_bytes(spec, sizes) / GIB:.1f} GiB does not fit into memory: lower "
                f"engine.kv_cache_gib or engine.num_blocks ({in_one_line(error)})"
            ) from error
        self.cache = self.caches[0]
        self.num_blocks = self.cache.table_sizes
        self.max_model_len = min(self._model_len, min(sizes[: len(spec.groups)]) * spec.block_size)

    def _take_prompts_whole(self) -> None:
        """Limit sequences to the length that fits into one step together with a token of every other sequence."""
        self.spec = replace(self.spec, whole_prompts=True)
        for cache in self.caches:
            cache.spec = self.spec
        most = self.batch.max_num_batched_tokens - self.batch.max_num_seqs + 1
        self.max_model_len = min(self.max_model_len, most)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        self.cache.copy_blocks(copies)

    @abstractmethod
    def _compute(self, step: RankStep, on_layer_done: OnLayerDone) -> torch.Tensor:
        """Compute a step, as `ModelRank.compute` does; its KV is in the caches of all ranks afterwards."""

    @abstractmethod
    def close(self) -> None:
        """See `Runner.close`."""

    def check_adapter(self, path: str) -> AdapterFacts:
        """See `Runner.check_adapter`; only called if there are slots."""
        raise NotImplementedError

    def read_adapter(self, adapter: Adapter) -> Callable[[int], None]:
        """See `Runner.read_adapter`; only called if there are slots."""
        raise NotImplementedError

    def recover(self) -> None:
        """See `Runner.recover`."""
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize(self.cache.device)
            torch.cuda.empty_cache()

    def prepare(self, params: SamplingParams) -> None:
        """See `Runner.prepare`."""
        self._structures.prepare(params)

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        """See `Runner.execute`."""
        step = self._last_tokens.filled(step)
        with self._held_images(step) as missing:
            if missing:
                output = self._executed_without(step, missing, on_layer_done)
            else:
                output = self._steps.execute(step, on_layer_done)
        self._last_tokens.keep(step, ComputedStep(output))
        return output

    def _held_images(self, step: StepInput) -> AbstractContextManager[frozenset[int]]:
        """Context manager: keep the images that a step needs. Return the indices of the parts whose images are missing,
        because the runner does not hold them.
        """
        return contextlib.nullcontext(frozenset())

    def _executed_without(self, step: StepInput, missing: frozenset[int], on_layer_done: OnLayerDone) -> StepOutput:
        """Execute a step without some of its parts."""
        others = tuple(part for index, part in enumerate(step.parts) if index not in missing)
        if others:
            output = self._steps.execute(StepInput(others, step.copies), on_layer_done)
        else:
            self._copy_blocks(step.copies)
            output = StepOutput(sampled_token_ids=(), num_computed_tokens=())
        return output.with_missing(step, missing)

    def launch(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> LaunchedStep:
        """See `Runner.launch`."""
        return ComputedStep(self.execute(step, on_layer_done))

    def _executed(self, step: StepInput, on_layer_done: OnLayerDone, is_ready: bool) -> StepOutput:
        order = order_for_packing(step.parts)
        packed = [step.parts[index] for index in order]
        sampling = [row for row, part in enumerate(packed) if part.sample]
        parts = [packed[row] for row in sampling]
        rows = rows_of(parts)
        self._sampler.begin(rows)
        scored = [part.scored_token_ids for part in packed]
        num_scored = [len(token_ids) for token_ids in scored] if any(scored) else []
        logits = self._compute(RankStep(packed, sampling, step.copies, num_scored, is_ready), on_layer_done)
        num_rows = len(parts) + sum(part.num_drafts for part in parts)
        with self.row_by_row():
            prompts = self._prompt_scores(logits[num_rows:], packed, order) if num_scored else None
        if not sampling:
            self._wait_for_stream()  # otherwise reading a sampled token waits for the step
            return StepOutput.of(step, Drawn([]), prompts)

        def sample(places: Sequence[int], rows: Sequence[Row]) -> Sampled:
            is_all = len(places) == num_rows and not num_scored
            asked = logits if is_all else logits[list(places)]
            with self.row_by_row():
                return self._sampler.sample_and_score(asked, rows)

        found = drawn(parts, rows, sample)
        place_of = {order[row]: place for place, row in enumerate(sampling)}
        places = [place_of[index] for index in sorted(place_of)]
        return StepOutput.of(step, found.in_order(places), prompts)

    def _prompt_scores(
        self, logits: torch.Tensor, packed: Sequence[StepPart], order: Sequence[int]
    ) -> list[TokenScores]:
        """Return the scores of each part, in the order of the step, from the logits of all scored tokens."""
        found = [NO_SCORES] * len(packed)
        begin = 0
        for row, part in enumerate(packed):
            if token_ids := part.scored_token_ids:
                end = begin + len(token_ids)
                found[order[row]] = scores_of(logits[begin:end], token_ids, part.sampling.prompt_logprobs or 0)
                begin = end
        return found

    def _warm_up(self, compute: Callable[[RankStep, OnLayerDone], torch.Tensor]) -> list[torch.Tensor]:
        """Compute a prompt and a step of decoding, in unused blocks, and return their logits.

        A process's first step loads kernels, which takes seconds on a GPU. It must neither delay a client's first token
        nor count among the step costs.

        Raises:
            ModelLoadError: the step fails, for example because the device has too little memory.
        """
        num_tokens = min(WARM_UP_TOKENS, self.max_model_len)
        token_ids = tuple(place % self.vocab_size for place in range(num_tokens))
        logits = []
        began_s = time.monotonic()
        try:
            for number, begin in enumerate((0, num_tokens - 1)):
                tables = tables_of(self.spec, num_tokens, number)
                part = StepPart(
                    sequence_key=0,
                    token_ids=token_ids[begin:],
                    num_computed_tokens=begin,
                    block_ids=tables,
                    num_kv_tokens=(num_tokens,) * len(tables),
                    sample=True,
                    is_decoding=begin > 0,
                    sampling=NO_SAMPLING,
                    choice_index=0,
                    num_prompt_tokens=num_tokens,
                )
                logits.append(compute(RankStep([part], [0]), ignore_layer).clone())
                if begin == 0 and self.cache.device.type == "cpu":  # on a GPU this includes loading the kernels
                    self.token_s = (time.monotonic() - began_s) / num_tokens
            self._wait_for_stream()
        except Exception as error:  # the model's own code
            raise ModelLoadError(f"the model cannot compute a first step: {in_one_line(error)}") from error
        return logits

    def _wait_for_stream(self) -> None:
        if self.cache.device.type == "cuda":
            torch.cuda.current_stream(self.cache.device).synchronize()


def refuse_settings(engine: EngineConfig, models: str) -> None:
    """Raise ConfigError for settings that runners with passes of their own do not support.

    Args:
        models: the models that such a runner computes, in words.
    """
    engine.refuse_unknown(OF_PACKED_STEPS, models)
    if engine.kv_dtype in ("int8", "fp8"):
        raise ConfigError(f"engine.kv_dtype {engine.kv_dtype} is not supported by {models}; set it to auto")


def _require_shared_memory(num_bytes: int, folder: Path = Path("/dev/shm")) -> None:
    """Raise ModelLoadError unless the other ranks' caches fit into shared memory."""
    if not folder.is_dir():
        return
    found = os.statvfs(folder)
    if (free := found.f_bavail * found.f_frsize) < num_bytes:
        raise ModelLoadError(
            f"the KV caches of the other ranks need {num_bytes / 2**20:.0f} MiB of shared memory and {folder} has "
            f"{free / 2**20:.0f} left; make it larger, or lower engine.kv_cache_gib"
        )


class SmallerSteps:
    """Executes steps, in halves if the device runs out of memory.

        step        | a | b | c | d |    out of memory
        halves      | a | b |            computed
                            | c |        computed
                                | d |    out of memory alone: `d` ends, and no other worker retries it

    A failed step leaves nothing that a retry would not write again: KV of the same tokens in the same blocks. A retry
    must not zero blocks of which a layer has been reported, since a transfer may be reading them.

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


def rows_of(parts: Sequence[StepPart]) -> list[Row]:
    """Return the first row of each part, all of which sample."""
    row = Row.__new__  # see `Sequence.part`
    return [
        row(
            Row,
            p.sampling,
            p.choice_index,
            p.num_computed_tokens + len(p.token_ids) - p.num_drafts,
            p.num_prompt_tokens,
            p.history,
            p.sequence_key,
        )
        for p in parts
    ]


def drawn(parts: Sequence[StepPart], first: Sequence[Row], sample: SampleRows) -> Drawn:
    """Return the sampled tokens of parts, in their order, row by row.

    A part with drafts has a row of logits after its last known token and one after each draft. The first is always
    valid; the row after a draft is valid if all drafts up to it match the sampled tokens. So rows are sampled in order:
    first rows of all parts together, then the second rows of the parts whose first draft matched, and so on. Each draw
    depends only on the tokens before it and its own random number, so the result is that of single-token steps, for all
    parameters.

    Args:
        first: the parts' first rows.
        sample: samples rows; its indices count the rows of each part, one part after the other.
    """
    if not any(part.num_drafts for part in parts):
        return Drawn.one_each(sample(range(len(parts)), first))
    begins = list(accumulate((1 + part.num_drafts for part in parts), initial=0))
    found = Drawn.one_each(sample(begins[:-1], first))
    token_ids = [list(of_part) for of_part in found.token_ids]
    scores = [[of_part] for of_part in found.scores] if found.scores else [list[TokenScores]() for _ in parts]
    going_on = [index for index in range(len(parts)) if index not in found.failures]
    count = 1
    while going_on := [index for index in going_on if _has_come(parts[index], token_ids[index], count)]:
        rows = [_after_drafts(first[index], parts[index], count) for index in going_on]
        more = sample([begins[index] + count for index in going_on], rows)
        for place, index in enumerate(going_on):
            if place in more.failures:  # its next step reports it, after the tokens that it has
                continue
            token_ids[index].append(more.token_ids[place])
            if more.scores:
                scores[index].append(more.scores[place])
        count += 1
    joined = [TokenScores.joined(of_part) for of_part in scores] if found.scores else None
    return found._replace(token_ids=[tuple(of_part) for of_part in token_ids], scores=joined)


def _has_come(part: StepPart, token_ids: Sequence[int], count: int) -> bool:
    """Return whether a part's first `count` drafts match the sampled tokens."""
    is_drafted = len(token_ids) == count <= part.num_drafts
    return is_drafted and token_ids[-1] == part.token_ids[len(part.token_ids) - part.num_drafts + count - 1]


def _after_drafts(first: Row, part: StepPart, num_drafts: int) -> Row:
    """Return the row after a part's first `num_drafts` drafts, given the part's first row."""
    history = first.history
    if history:
        begin = len(part.token_ids) - part.num_drafts
        history += part.token_ids[begin : begin + num_drafts]
    return first._replace(position=first.position + num_drafts, history=history)

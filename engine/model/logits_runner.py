"""Common part of runners whose models give logits: KV caches, the order of a step, and the sampler."""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from baton.adapters import AdapterFacts
from baton.cluster import Computes
from baton.errors import ConfigError, ModelLoadError, in_one_line
from baton.memory import GIB, PROCESS_BYTES, Room, adapters_bytes, available_memory, weights_bytes
from baton.messages import Adapter
from baton.sampling import SamplingParams
from baton.scores import NO_SCORES, Drawn, Sampled, TokenScores
from baton.tokenizer_file import end_of_sequence_ids
from engine.core.image_store import ImageStore
from engine.core.kv_spec import FP8
from engine.core.pool_sizes import ROWS_PER_SEQUENCE, PoolNeeds, pool_bytes, sizes_within, table_sizes
from engine.core.runner import (
    BlockCopy,
    ComputedStep,
    LaunchedStep,
    OnLayerDone,
    StepInput,
    StepOutput,
    StepPart,
    ignore_layer,
)
from engine.model.kv_cache import KVCache
from engine.model.last_tokens import LastTokens
from engine.model.rank_step import RankStep, order_for_packing
from engine.model.rows import drawn, rows_of
from engine.model.self_check import tables_of
from engine.model.shapes import ModelShape, arithmetic_dtype, longest_sequence, report_longest
from engine.model.smaller_steps import SmallerSteps
from engine.sampling.pipeline import SAMPLER, Sampler
from engine.sampling.row import Row
from engine.sampling.scores import scores_of
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

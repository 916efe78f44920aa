"""Runner of the native step over the paged KV cache: the caches, sampler and results of transformers, but faster.

Transformers loads the weights, because it supports every checkpoint format, and its model computes the first steps.
Then the weights are packed, and the native step computes the same steps. If the results differ, the model runs on
transformers. Packed weights that pass are kept together with a digest of the logits: later starts map them, compute
these logits again, and do not need transformers.
"""

from __future__ import annotations

import ctypes
import logging
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch

from baton.blocks import num_blocks_for
from baton.config import EngineConfig, ModelConfig
from baton.errors import NotNative
from baton.own_files import ForeignFile
from engine.core.runner import OnLayerDone
from engine.model.kv_cache import KVCache
from engine.model.logits_runner import WARM_UP_TOKENS, LogitsRunner
from engine.model.rank_step import RankStep
from engine.model.shapes import longest_sequence
from engine.native import build, layout
from engine.native.model import PackedModel, pack_model
from engine.native.quantized import quantized
from engine.native.spec import describe
from engine.native.weights import PackedWeights
from engine.native.weights_cache import KeptModel, StoredConfig, WeightsCache, logits_digest

logger = logging.getLogger(__name__)
TOLERANCE = 1e-3
"""Maximum difference between the two computations of a logit, as a share of the largest logit. Rounding in different
orders may cause it."""
ROUNDED_TOLERANCE = 0.5
"""Maximum difference between the logits of converted weights and those of the exact ones, as a share of the latter's
variation, both as root mean squares. Two unrelated computations give 1.4."""


class NativeRunner(LogitsRunner):
    """Runner of a model that `step.c` computes, on a CPU in float32.

    Args:
        folder: cache folder for built libraries and packed weights.

    Raises:
        NotNative: model, machine or settings are not supported; the message says why.
        ModelLoadError: the folder is not a model this engine runs, the KV pool is too small, or the model cannot
            compute a first step.
        ConfigError: there is no room for the KV pool.
    """

    name = "native"

    def __init__(self, model: ModelConfig, engine: EngineConfig, folder: Path) -> None:
        _require_settings(model, engine)
        variant = build.variant_of(build.cpu_flags())
        torch.set_num_threads(engine.num_threads)
        self._step: int | None = None
        self._engine = engine
        cache = WeightsCache(folder, Path(model.path), model.weights)
        with cache.opened() as kept:
            config = _load_config(model.path) if kept is None else kept.config
            self._description = describe(config)
            self._library = _load_library(folder, variant)
            super().__init__(model, engine, self._description.shape(config), [torch.device("cpu")])
            self.computes = replace(self.computes, attention="native")
            self._first_cache = self._make_first_cache(config)
            if kept is None or not self._opens(kept):
                self._pack(model, config, cache)
        if self._first_cache is not self.cache:
            self._first_cache = self.cache
            self._open(self._weights)
        self._structures.load()
        held = self._model.describe_memory()
        logger.info("the native step for %s holds the weights (%s) in %s", variant, model.weights, held)

    def close(self) -> None:
        """See `Runner.close`."""
        if self._step is not None:
            self._library.baton_close(self._step)
            self._step = None

    def _make_first_cache(self, config: Any) -> KVCache:
        """Return the cache of the first steps, with float32 pages.

        In narrower pages, different orders of summation would sometimes round to different values.
        """
        if self.spec.groups[0].dtype == "float32":
            return self.cache
        size = self._engine.block_size
        return KVCache(
            self._description.shape(config).cache_spec(size, "float32", 1), num_blocks_for(WARM_UP_TOKENS, size), 1
        )

    def _pack(self, model: ModelConfig, config: Any, cache: WeightsCache) -> None:
        """Load and check the weights with transformers, convert them to the format of `model.weights`, and keep them
        packed.

        Raises:
            NotNative: the native step does not compute the same.
        """
        # Imported here: cached weights need no transformers, whose import takes seconds and 100 MB.
        from engine.model.transformers_model import ModelRank

        rank = ModelRank(model, self._engine, self._first_cache)
        expected = self._warm_up(rank.compute)
        num_positions = max(self.max_model_len, longest_sequence(config, 0))
        weights = pack_model(self._description, rank.model, num_positions)
        del rank
        self._open(weights)
        found = self._warm_up(self._compute)
        self._require_equal(found, expected)
        if model.weights != "exact":
            weights = quantized(weights, model.weights)
            self._open(weights)
            exact, found = found, self._warm_up(self._compute)
            self._require_near(found, exact)
        if (stored := self._stored(config)) is None:
            return
        kept = cache.keep(KeptModel(config=stored, weights=weights, logits=logits_digest(found)))
        if kept is not None and not self._opens(kept):
            self._open(weights)

    def _opens(self, kept: KeptModel) -> bool:
        """Open cached weights. Return whether they can be used: they cover the sequence length and give the recorded
        logits.
        """
        if len(kept.weights.cos) < self.max_model_len:
            return False
        self._open(kept.weights)
        if logits_digest(self._warm_up(self._compute)) == kept.logits:
            return True
        logger.warning("the packed weights do not give the logits recorded when they were packed, and are made anew")
        return False

    def _open(self, weights: PackedWeights) -> None:
        self.close()
        self._weights = weights
        self._model = PackedModel(self._description, weights, self._first_cache, self.max_model_len)
        self._memory = torch.empty(self.batch.max_num_seqs, self._model.num_logits)
        # Views by the number of rows. Torch takes 0.1 ms to create one after a step has evicted the CPU's caches.
        self._logits = [self._memory[:count, : self.vocab_size] for count in range(len(self._memory) + 1)]
        max_tokens = max(self.batch.max_num_batched_tokens, WARM_UP_TOKENS)
        self._struct = self._model.struct(max_tokens, self._engine.num_threads)
        self._step = self._library.baton_open(ctypes.byref(self._struct))

    def _stored(self, config: Any) -> StoredConfig | None:
        """Return the configuration in the form of the cache, if that form has the same meaning."""
        try:
            stored = StoredConfig.of(config)
            means_the_same = describe(stored) == self._description and (
                longest_sequence(stored, 0) == longest_sequence(config, 0)
            )
        except (AttributeError, TypeError, NotNative) as error:
            logger.warning("the packed weights are not kept, since config.json cannot be kept: %s", error)
            return None
        return stored if means_the_same else None

    def _require_equal(self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
        """Raise NotNative unless the first steps' logits are those of transformers."""
        for one, other in zip(found, expected, strict=True):
            difference = float((one - other).abs().max() / other.abs().max().clamp(min=1e-6))
            if not difference <= TOLERANCE:
                self.close()
                raise NotNative(f"the first step's logits differ from transformers' by a share of {difference:.1e}")

    def _require_near(self, found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> None:
        """Raise NotNative unless the first steps' logits are close to those of the exact weights."""
        for one, other in zip(found, exact, strict=True):
            difference = float((one - other).norm() / (other - other.mean()).norm().clamp(min=1e-6))
            if not difference <= ROUNDED_TOLERANCE:
                self.close()
                raise NotNative(f"the first step's logits are not near those of the exact weights: {difference:.1e}")

    def _compute(self, step: RankStep, on_layer_done: OnLayerDone) -> torch.Tensor:
        if step.copies:
            self.cache.copy_blocks(step.copies)
        batch, numbers, logits = self._batch(step)
        last = self._model.description.num_layers
        # A prompt's KV is reported layer by layer. That of single tokens is small, so one call computes all layers.
        has_prompt = any(len(part.token_ids) - part.num_drafts > 1 for part in step.parts)
        calls = range(last) if has_prompt else (last - 1,)
        begin = 0
        for layer in calls:
            fault = self._library.baton_step(self._step, ctypes.byref(batch), begin, layer + 1)
            if fault:
                raise AssertionError(f"a step has {layout.FAULTS[fault]}")
            begin = layer + 1
            on_layer_done(layer, None)
        del numbers
        return logits

    def _batch(self, step: RankStep) -> tuple[layout.BatchStruct, array[int], torch.Tensor]:
        """Return the step as the structure for `step.c`, the memory that it points to, and the tensor of the logits."""
        parts = step.parts
        stride = max(len(part.block_ids[0]) for part in parts)
        tables: list[int] = []
        for part in parts:
            tables += part.block_ids[0]
            tables += [-1] * (stride - len(part.block_ids[0]))
        counts = [len(part.token_ids) for part in parts]
        rows = step.logit_rows
        fields = (
            [token_id for part in parts for token_id in part.token_ids],
            [part.num_computed_tokens for part in parts],
            counts,
            tables,
            rows,
        )
        # One plain array: five numpy arrays would cost a hundredth of a step of one stream.
        numbers = array("i", list(chain.from_iterable(fields)))
        address, _ = numbers.buffer_info()
        pointers = [address + numbers.itemsize * begin for begin in accumulate(map(len, fields[:-1]), initial=0)]
        if len(rows) < len(self._logits):
            logits, memory = self._logits[len(rows)], self._memory
        else:
            memory = torch.empty(len(rows), self._model.num_logits)
            logits = memory[:, : self.vocab_size]
        batch = layout.BatchStruct(len(parts), sum(counts), stride, len(rows), *pointers, memory.data_ptr())
        return batch, numbers, logits


def _require_settings(model: ModelConfig, engine: EngineConfig) -> None:
    """Raise NotNative for settings of another device, data type or number of ranks."""
    if engine.tensor_parallel > 1:
        raise NotNative(f"engine.tensor_parallel is {engine.tensor_parallel}, and the native step has one rank")
    if engine.max_adapters:
        raise NotNative(f"engine.max_adapters is {engine.max_adapters}, and the native step computes no adapters")
    if model.device == "cuda" or (model.device == "auto" and torch.cuda.is_available()):
        raise NotNative("the native step computes on CPUs, and this model is on a GPU")
    if model.dtype not in ("auto", "float32"):
        raise NotNative(f"model.dtype is {model.dtype}, and the native step computes in float32")
    values = {"model.weights": model.weights, "engine.kv_dtype": engine.kv_dtype, "engine.attention": engine.attention}
    for name, value in values.items():
        if value in ("fp8", "flashinfer"):
            raise NotNative(f"{name} is {value}, which the native step does not support")


def _load_library(folder: Path, variant: str) -> ctypes.CDLL:
    try:
        try:
            return layout.load(build.library(folder, variant))
        except ForeignFile as error:
            logger.warning("the native step is built for this process alone, since %s", error)
            with tempfile.TemporaryDirectory(prefix="baton-native-") as own:
                return layout.load(build.library(Path(own), variant))
    except OSError as error:
        raise NotNative(f"the library of the native step cannot be loaded: {error}") from error


def _load_config(path: str) -> Any:
    # Imported here: see `NativeRunner._pack`.
    from engine.model.transformers_model import load_config

    return load_config(path)

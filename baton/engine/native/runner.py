"""Runs a model by `step.c` over the paged KV cache: the same caches, sampler and answers as transformers', faster.

The weights are loaded by transformers, which knows every form of checkpoint, and its model computes the first steps.
They are packed then, and the native step computes the same again: a model for which the two differ is left to
transformers.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from baton.config import EngineConfig, ModelConfig
from baton.engine.core.runner import OnLayerDone
from baton.engine.model.logits_runner import WARM_UP_TOKENS, LogitsRunner
from baton.engine.model.transformers_model import ModelRank, RankStep, load_config
from baton.engine.native import build, layout
from baton.engine.native.model import PackedModel
from baton.engine.native.spec import describe
from baton.errors import NotNative

logger = logging.getLogger(__name__)
TOLERANCE = 1e-3
"""Largest difference between the two computations of a logit, as a share of the largest logit, for which the rounding
of different orders may account."""


class NativeRunner(LogitsRunner):
    """A model that `step.c` computes, on a CPU in float32.

    Args:
        folder: where libraries that were built are kept.

    Raises:
        NotNative: model, machine or settings are none for it; the message says why.
        ModelLoadError: the folder is not a model this engine runs, the KV pool is too small, or the model cannot
            compute a first step.
        ConfigError: there is no room for the KV pool.
    """

    name = "native"

    def __init__(self, model: ModelConfig, engine: EngineConfig, folder: Path) -> None:
        _require_settings(model, engine)
        description = describe(load_config(model.path))
        variant = build.variant_of(build.cpu_flags())
        try:
            self._library = layout.load(build.library(folder, variant))
        except OSError as error:
            raise NotNative(f"the library of the native step cannot be loaded: {error}") from error
        super().__init__(model, engine, [torch.device("cpu")])
        self._step: int | None = None
        rank = ModelRank(model, engine, self.cache)
        expected = self._warm_up(rank.compute)
        self._model = PackedModel(description, rank.model, self.cache, self.max_model_len)
        del rank
        self._max_rows = engine.max_num_seqs
        self._logits = torch.empty(self._max_rows, self._model.num_logits)
        self._struct = self._model.struct(max(engine.max_num_batched_tokens, WARM_UP_TOKENS), engine.num_threads)
        self._step = self._library.baton_open(ctypes.byref(self._struct))
        self._require_equal(expected)
        self._structures.load()
        logger.info("the native step for %s holds the weights in %s", variant, self._model.describe_memory())

    def close(self) -> None:
        """See `Runner.close`."""
        if self._step is not None:
            self._library.baton_close(self._step)
            self._step = None

    def _require_equal(self, expected: Sequence[torch.Tensor]) -> None:
        """Raises NotNative unless the first steps' logits are those of transformers."""
        found = self._warm_up(self._compute)
        for one, other in zip(found, expected, strict=True):
            difference = float((one - other).abs().max() / other.abs().max().clamp(min=1e-6))
            if not difference <= TOLERANCE:
                self.close()
                raise NotNative(f"the first step's logits differ from transformers' by a share of {difference:.1e}")

    def _compute(self, step: RankStep, on_layer_done: OnLayerDone) -> torch.Tensor:
        self.cache.copy_blocks(step.copies)
        batch, keep, logits = self._batch(step)
        last = self._model.description.num_layers
        # A prompt's KV goes on its way layer by layer; of single tokens it is small, and one call computes them.
        calls = range(last) if any(len(part.token_ids) > 1 for part in step.parts) else (last - 1,)
        begin = 0
        for layer in calls:
            fault = self._library.baton_step(self._step, ctypes.byref(batch), begin, layer + 1)
            if fault:
                raise AssertionError(f"a step has {layout.FAULTS[fault]}")
            begin = layer + 1
            on_layer_done(layer, None)
        del keep
        return logits[:, : self.vocab_size]

    def _batch(self, step: RankStep) -> tuple[layout.BatchStruct, Any, torch.Tensor]:
        """Returns the step as `step.c` sees it, what it points to, and where the logits will be."""
        parts = step.parts
        counts = [len(part.token_ids) for part in parts]
        token_ids = np.fromiter(chain.from_iterable(part.token_ids for part in parts), np.int32, sum(counts))
        begins = np.fromiter((part.num_computed_tokens for part in parts), np.int32, len(parts))
        count = np.array(counts, np.int32)
        stride = max(len(part.block_ids[0]) for part in parts)
        tables = np.full((len(parts), stride), -1, np.int32)
        for table, part in zip(tables, parts, strict=True):
            table[: len(part.block_ids[0])] = part.block_ids[0]
        ends = np.cumsum(count)
        rows = [int(ends[index]) - 1 for index in step.sampling]
        if step.num_scored:
            firsts = ends - count
            rows += [int(firsts[index]) + k for index, num in enumerate(step.num_scored) for k in range(num)]
        row = np.array(rows, np.int32)
        logits = (
            self._logits[: len(rows)] if len(rows) <= self._max_rows else torch.empty(len(rows), self._model.num_logits)
        )
        keep = (token_ids, begins, count, tables, row)
        pointers = [array.ctypes.data for array in keep]
        batch = layout.BatchStruct(len(parts), len(token_ids), stride, len(rows), *pointers, logits.data_ptr())
        return batch, keep, logits


def _require_settings(model: ModelConfig, engine: EngineConfig) -> None:
    """Raises NotNative for settings of another device, type or number of ranks."""
    if engine.tensor_parallel > 1:
        raise NotNative(f"engine.tensor_parallel is {engine.tensor_parallel}, and the native step has one rank")
    if model.device == "cuda" or (model.device == "auto" and torch.cuda.is_available()):
        raise NotNative("the native step computes on CPUs, and this model is on a GPU")
    if model.dtype not in ("auto", "float32"):
        raise NotNative(f"model.dtype is {model.dtype}, and the native step computes in float32")

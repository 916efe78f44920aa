"""Runs unmodified transformers models over the paged KV cache, on one device or several."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from baton.adapters import AdapterFacts, load_registered, read_adapter
from baton.blocks import num_blocks_for
from baton.cluster import Computes, fallback
from baton.errors import ConfigError, ModelLoadError, in_one_line
from baton.memory import GIB
from baton.messages import Adapter
from baton.sampling import SamplingParams
from engine.core.faults import Fault, fault_of
from engine.core.runner import (
    EMPTY_PLACE,
    INT8,
    ComputedStep,
    Fence,
    KVSpec,
    LaunchedStep,
    NotedLayers,
    OnLayerDone,
    StepInput,
    StepPart,
    ignore_layer,
)
from engine.core.scheduler import MAX_SCORED
from engine.model import device_memory
from engine.model.adapters import AdapterForRanks, AdapterWeights
from engine.model.asking import require_known_rope
from engine.model.attention_choice import SEVERAL_RANKS
from engine.model.batch_invariance import RowByRow, refuse_unkept
from engine.model.fp8_linear import refuse_fp8
from engine.model.images import RankImages
from engine.model.logits_runner import NO_SAMPLING, LogitsRunner, rows_of
from engine.model.pretrained import ask_folder
from engine.model.rank_step import DeviceStep, Filling, RankStep, order_for_packing
from engine.model.ranks import OtherRanks
from engine.model.shapes import arithmetic_dtype, longest_sequence
from engine.model.transformers_model import ModelRank, load_config

if TYPE_CHECKING:
    from baton.config import EngineConfig, ModelConfig
    from engine.model.image_reader import ProcessedImages

logger = logging.getLogger(__name__)
PROBE_BLOCKS = 2
"""Blocks of the temporary cache with which the largest step is computed; all its sequences share them."""
LARGEST_SAMPLING = SamplingParams(
    temperature=1.0, seed=0, top_p=0.9, typical_p=0.9, repetition_penalty=1.1, logprobs=20, prompt_logprobs=1
)
"""Sampling parameters with the largest memory use."""


class TransformersRunner(LogitsRunner):
    """Runner of a transformers model. This process is rank 0, which samples; it starts the other ranks.

    Args:
        set_aside: bytes of each GPU that are reserved for transfers.
        keeps_all: types of models whose layers keep the KV of all tokens in one group, although some have a window.

    Raises:
        ModelLoadError: the folder is not a model this engine runs, the KV pool is too small, the ranks do not suit
            model or machine, or the model cannot compute a first step; the message says why.
        ConfigError: there is no room for the KV pool, or transformers does not support a setting.
    """

    name = "transformers"

    def __init__(
        self, model: ModelConfig, engine: EngineConfig, set_aside: int = 0, keeps_all: Collection[str] = ()
    ) -> None:
        _refuse_settings(model, engine)
        self._set_aside = set_aside
        self.max_adapters = engine.max_adapters
        devices = _devices(model.device, engine.tensor_parallel)
        config = load_config(model.path)
        text = config.get_text_config(decoder=True)
        if model.weights == "fp8":
            refuse_fp8(devices[0], arithmetic_dtype(text, model.dtype, devices[0].type == "cuda"), engine)
        if engine.batch_invariant:
            self.row_by_row = RowByRow
            refuse_unkept(devices[0], model.weights)
        measures = len(devices) == 1 and devices[0].type in device_memory.MEASURED_DEVICES
        reader = _reader_of(model, engine, config)
        if not isinstance(reader, str):
            self._image_bytes = int(2 * engine.image_cache_gib * GIB)
        asked = ask_folder(Path(model.path), config, sees=not isinstance(reader, str))
        asked.shape.require_divisible(engine.tensor_parallel, by_experts=engine.expert_parallel)
        if asked.shape.states:
            _refuse_for_states(model, engine)
        shape = asked.shape.without_windows() if text.model_type in keeps_all else asked.shape
        super().__init__(model, engine, shape, devices, num_blocks=PROBE_BLOCKS * measures)
        self._others = OtherRanks(model, engine, self.caches) if len(self.caches) > 1 else None
        self.runs_ahead = devices[0].type == "cuda" and self._others is None
        try:
            self.rank = ModelRank(model, engine, self.cache, asked, reader)
            self.images = self.rank.images if isinstance(self.rank.images, str) else self.rank.images.store
            if self._others is not None:
                self._others.wait_ready()
            if measures:
                self._make_measured_caches(engine, devices)
            if self.rank.needs_whole_prompts:
                self._compute_prompts_whole()
            self._warm_up(self._compute)
            self._structures.load()
            self.computes = self._completed(self.rank.computes)
        except (ConfigError, ModelLoadError):
            self.close()
            raise

    @property
    def expert_tokens(self) -> Sequence[int]:
        """See `Runner.expert_tokens`."""
        return () if self.rank.expert_load is None else self.rank.expert_load.num_tokens

    def _compute_prompts_whole(self) -> None:
        """See `LogitsRunner._take_prompts_whole`."""
        self._take_prompts_whole()
        logger.warning(
            "prompts are computed whole, since transformers loses the states of this model between parts of a prompt: "
            "prompts never continue from a cached prefix, and max_model_len is %d, at most "
            "engine.max_num_batched_tokens (%d) - engine.max_num_seqs (%d) + 1",
            self.max_model_len,
            self.batch.max_num_batched_tokens,
            self.batch.max_num_seqs,
        )

    def _completed(self, chosen: Computes) -> Computes:
        """Return what the runner computes with, given its rank's choices."""
        own, fallbacks = self.computes, list(chosen.fallbacks)
        if chosen.gpu and not self.runs_ahead:
            fallbacks.append(fallback("steps are not launched ahead", SEVERAL_RANKS))
        return replace(
            chosen,
            num_ranks=own.num_ranks,
            dtype=own.dtype,
            weights=own.weights,
            kv_dtype=own.kv_dtype,
            fallbacks=tuple(fallbacks),
        )

    def _make_measured_caches(self, engine: EngineConfig, devices: Sequence[torch.device]) -> None:
        """Create the final caches, sized by the GPU memory that the weights and the largest steps leave.

        Raises:
            ModelLoadError: the largest step does not fit next to the weights, or the pool next to both.
            ConfigError: there is no room for the configured pool.
        """
        steps = [largest_step(engine, self._model_len, self.spec, is_scored=each) for each in (True, False)]

        num_beside = 0
        if isinstance(images := self.rank.images, RankImages):
            images.encode_largest()  # a first time, since what does not fit must not be measured
            num_beside = device_memory.taken_by(devices[0], images.encode_largest)

        def compute() -> None:
            beside = torch.empty(num_beside, dtype=torch.uint8, device=devices[0])  # images are encoded beside steps
            for step in steps:
                self._executed(step, ignore_layer, False)
            del beside

        try:
            memory = device_memory.measured(devices[0], compute)
        except Exception as error:  # the model's own code
            if fault_of(error) is not Fault.OUT_OF_MEMORY:
                raise ModelLoadError(f"the model cannot compute a first step: {in_one_line(error)}") from error
            raise ModelLoadError(
                f"the largest step, with {steps[0].num_scheduled_tokens} tokens of {len(steps[0].parts)} sequences and "
                f"a context of {self._model_len}, does not fit into the GPU's memory next to the weights: lower "
                "engine.max_num_batched_tokens, engine.max_num_seqs or engine.max_model_len, or put fewer workers on a "
                f"GPU ({in_one_line(error)})"
            ) from error
        room = memory.room(engine.memory_share, self._set_aside)
        pool_gib = room.pool_gib(engine.kv_cache_gib) if not engine.num_blocks else 0.0
        sizes = self._sizes_of(engine.num_blocks) if engine.num_blocks else self._sizes_within(pool_gib)
        self._make_caches(sizes, devices)
        self.rank.use(self.cache)

    def launch(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> LaunchedStep:
        """See `Runner.launch`. A step whose logits the host needs has been computed on return."""
        if not self.runs_ahead or not all(_samples_on_device(part) for part in step.parts):
            return super().launch(step, on_layer_done)
        with self._held_images(step) as missing:
            if not missing:
                return self._launched_or_divided(step, on_layer_done)
        return super().launch(step, on_layer_done)

    def _launched_or_divided(self, step: StepInput, on_layer_done: OnLayerDone) -> LaunchedStep:
        filling = self._last_tokens.filling([step.parts[index] for index in order_for_packing(step.parts)])
        if filling is None:
            step = self._last_tokens.filled(step)
        launched: LaunchedStep
        layers = NotedLayers(on_layer_done)
        try:
            launched = self._launched(step, layers.report, filling)
        except Exception as error:
            step = self._last_tokens.filled(step)
            launched = ComputedStep(self._steps.divided(step, error, layers.has_begun))
        self._last_tokens.keep(step, launched)
        return launched

    def _held_images(self, step: StepInput) -> AbstractContextManager[frozenset[int]]:
        if not (isinstance(self.rank.images, RankImages) and any(part.images for part in step.parts)):
            return super()._held_images(step)
        return self.rank.images.held(step.parts)

    def _launched(self, step: StepInput, on_layer_done: OnLayerDone, filling: Filling | None) -> DeviceStep:
        packed = [step.parts[index] for index in order_for_packing(step.parts)]
        sampling = [row for row, part in enumerate(packed) if part.sample]
        parts = [packed[row] for row in sampling]
        logits = self.rank.compute(RankStep(packed, sampling, step.copies), on_layer_done, filling)
        with self.row_by_row():
            tokens = self._sampler.tokens(logits[: len(parts)], rows_of(parts))
        return DeviceStep.of(step, parts, tokens)

    def check_adapter(self, path: str) -> AdapterFacts:
        """See `Runner.check_adapter`."""
        assert self.rank.adapters is not None, "this runner has no adapters"
        facts = read_adapter(path)
        self.rank.adapters.require_fit(facts)
        return facts

    def read_adapter(self, adapter: Adapter) -> Callable[[int], None]:
        """See `Runner.read_adapter`."""
        assert self.rank.adapters is not None, "this runner has no adapters"
        facts, content = load_registered(adapter)
        self.rank.adapters.require_fit(facts)
        weights = AdapterWeights.of(facts, content, self.rank.model.dtype)
        kept = b"" if self._others is None else content
        return lambda slot: self._put_adapter(slot, facts, kept, weights)

    def _put_adapter(self, slot: int, facts: AdapterFacts, content: bytes, weights: AdapterWeights) -> None:
        assert self.rank.adapters is not None
        if self._others is not None:
            self._others.load_adapter(AdapterForRanks(slot, facts, content))
        self.rank.adapters.load(slot, weights)

    def close(self) -> None:
        """See `Runner.close`."""
        if self._others is not None:
            self._others.close()

    def _compute(self, step: RankStep, on_layer_done: OnLayerDone) -> torch.Tensor:
        if self._others is None:
            return self.rank.compute(step, on_layer_done)
        stripped = [part._replace(sampling=NO_SAMPLING, history=()) for part in step.parts]
        with self._others.computing(RankStep(stripped, step.sampling, step.copies, step.num_scored)):
            reports = _one_behind(on_layer_done) if self.rank.meets_in_layers else ignore_layer
            logits = self.rank.compute(step, reports)
            self._wait_for_stream()
        if last := self.spec.num_layers:
            on_layer_done(last - 1, None)
        return logits


def _reader_of(model: ModelConfig, engine: EngineConfig, config: Any) -> ProcessedImages | str:
    """See `image_reader.reader_of`. Pillow is imported only for models that may take images."""
    if getattr(config, "vision_config", None) is None:
        return "the model takes text only"
    from engine.model.image_reader import reader_of

    text = config.get_text_config(decoder=True)
    require_known_rope(text)
    return reader_of(model, engine, config, longest_sequence(text, engine.max_model_len))


def largest_step(engine: EngineConfig, model_len: int, spec: KVSpec, *, is_scored: bool = True) -> StepInput:
    """Return one of the two steps that need the most memory.

    Both have the maximum numbers of tokens and sequences; all sequences sample, at the end of the longest prompt. Their
    block tables contain only the first two blocks, and their states are in the first two rows.

    Args:
        spec: spec of the model's caches.
        is_scored: whether it is the step with the most rows of logits: prompts with scores, of each of which a step
            computes at most `MAX_SCORED` tokens. In the other step the longest prompt has all tokens that the others
            leave.
    """
    num_sequences, num_tokens, _ = engine.batch(on_gpu=True)
    num_sequences = min(num_sequences, num_tokens)
    most, num_left = min(MAX_SCORED if is_scored else num_tokens, model_len), num_tokens - num_sequences
    parts = []
    for number in range(num_sequences):
        num_tokens = 1 + min(most - 1, num_left)
        num_left -= num_tokens - 1
        end = model_len if num_tokens > 1 else min(engine.block_size, model_len)
        parts.append(_largest_part(number, num_tokens, end, spec, is_scored=is_scored and num_tokens > 1))
        if not is_scored:
            num_left = 0
    return StepInput(tuple(parts))


def _largest_part(number: int, num_tokens: int, end: int, spec: KVSpec, *, is_scored: bool) -> StepPart:
    tables = [
        tuple(place % PROBE_BLOCKS for place in range(num_blocks_for(end, group.block_size))) for group in spec.groups
    ]
    rows = [(0 if end > num_tokens else EMPTY_PLACE, 1)] * bool(spec.states)
    return StepPart(
        sequence_key=-1 - number,  # the sampler keeps no state for them
        token_ids=(0,) * num_tokens,
        num_computed_tokens=end - num_tokens,
        block_ids=(*tables, *rows),
        num_kv_tokens=(end,) * spec.num_tables,
        sample=True,
        is_decoding=num_tokens == 1,
        sampling=LARGEST_SAMPLING,
        choice_index=0,
        num_prompt_tokens=end,
        history=(0,) * end,
        scores_prompt=is_scored,
    )


def _refuse_settings(model: ModelConfig, engine: EngineConfig) -> None:
    """Raise ConfigError for settings that transformers does not support, or not together."""
    if engine.kv_dtype == INT8:
        raise ConfigError("engine.kv_dtype int8 needs the native step; set float32, bfloat16, fp8 or auto")
    if engine.max_adapters and model.weights == "fp8":
        raise ConfigError(
            f"engine.max_adapters {engine.max_adapters} is not supported with model.weights fp8, whose products "
            "are computed from rounded inputs; set one of them to its default"
        )


def _refuse_for_states(model: ModelConfig, engine: EngineConfig) -> None:
    """Raise ConfigError for settings that models with recurrent layers do not support."""
    values = {
        "engine.batch_invariant": engine.batch_invariant,
        "engine.attention flashinfer": engine.attention == "flashinfer",
        "model.weights fp8": model.weights == "fp8",
    }
    for name, is_set in values.items():
        if is_set:
            raise ConfigError(f"{name} is not supported for models with recurrent layers; set it to its default")


def _samples_on_device(part: StepPart) -> bool:
    """Return whether a part can be sampled entirely on the device."""
    asked = part.sampling
    on_host = asked.is_structured or asked.wants_scores or asked.use_beam_search
    return not (part.num_drafts or part.scores_prompt or on_host)


def _one_behind(on_layer_done: OnLayerDone) -> OnLayerDone:
    """Report each layer when the next one starts, unless there is no receiver.

    By then the ranks have summed the results of the attention over it, and each rank had written its KV before that.
    The last layer is left to the caller, which waits for the step.
    """
    if on_layer_done is ignore_layer:
        return ignore_layer

    def next_began(layer: int, fence: Fence | None) -> None:
        if layer > 0:
            on_layer_done(layer - 1, fence)

    return next_began


def _devices(name: str, num_ranks: int) -> list[torch.device]:
    """Return one device per rank. Raise ModelLoadError if there are too few."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        if num_ranks > 1 and torch.cuda.is_available():
            raise ModelLoadError(
                "transformers divides a model among the GPUs that it sees; for several ranks on CPUs, set "
                "CUDA_VISIBLE_DEVICES to an empty string"
            )
        return [torch.device("cpu")] * num_ranks
    if not torch.cuda.is_available():
        raise ModelLoadError(
            "model.device is cuda, and torch sees no GPU here; `baton doctor --part worker` on this machine says why"
        )
    if num_ranks == 1:
        return [torch.device("cuda")]
    if num_ranks > torch.cuda.device_count():
        raise ModelLoadError(
            f"engine.tensor_parallel is {num_ranks}, but this worker has {torch.cuda.device_count()} GPUs; "
            "each rank needs its own GPU"
        )
    return [torch.device("cuda", rank) for rank in range(num_ranks)]

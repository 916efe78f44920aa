"""One rank's part of a transformers model: loads it, and computes steps with it.

Weights are divided by transformers' own tensor-parallel plan for the model type: projections by head and by hidden
unit, so that a layer has two all-reduces, after attention and after the MLP (Shoeybi et al., 2019, Megatron-LM). A rank
has only the KV of its heads. All ranks compute the same steps in the same order.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from baton.blocks import num_blocks_for
from baton.cluster import Computes, fallback
from baton.errors import ModelLoadError, in_one_line
from baton.memory import GIB
from baton.model_files import require_runnable
from engine.core.faults import Fault, fault_of
from engine.core.runner import OnLayerDone, StepPart, ignore_layer
from engine.model import pretrained, self_check
from engine.model.adapters import AdapterRows, ModelAdapters, rows_with_adapters
from engine.model.asking import AskedModel
from engine.model.attention import ATTENTION_NAME, begun_blocks, entered_blocks, set_step
from engine.model.attention_choice import AttentionWish, TorchAttention, attention_of, decode_graphs
from engine.model.attention_step import Attention, AttentionStep
from engine.model.batch_invariance import make_invariant
from engine.model.expert_load import ExpertLoad
from engine.model.fp8_linear import quantize
from engine.model.fused_model import Fused, fuse
from engine.model.images import RankImages, StepImages
from engine.model.kv_cache import KVCache, torch_dtype
from engine.model.latent import EXPAND, absorb, release
from engine.model.rank_step import Filling, RankStep
from engine.model.recurrent import (
    OF_RECURRENT,
    Pass,
    PassStates,
    StateRows,
    Wanted,
    cache_argument,
    passes_of,
    places_of,
)
from engine.model.shapes import Division, arithmetic_dtype, longest_sequence
from engine.model.table_rows import TableRoom
from engine.uploads import StepNumbers

if TYPE_CHECKING:
    from baton.config import EngineConfig, ModelConfig
    from engine.model.decode_graphs import DecodeGraphs
    from engine.model.image_reader import ProcessedImages

logger = logging.getLogger(__name__)


class _Prepared(NamedTuple):
    """Tensors of one forward pass, valid once the step's numbers have been sent."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    """Tokens whose logits are needed."""
    states: StateRows | None
    """None: the model has no states."""
    attention: AttentionStep
    adapters: AdapterRows | None
    """Tokens with adapters; None: there are none."""


NO_INPUTS: Mapping[str, torch.Tensor] = {}
OF_QUANTIZED = ("weight_scale", "weight_scale_inv", "_blocks", "_scales", "qweight")
"""Ends of the names of tensors without which quantized weights mean nothing."""
NUM_NAMED = 3
"""Maximum number of tensors that a message names."""


class ModelRank:
    """Weights and KV cache of one rank, on the cache's device.

    With several ranks, this process's default process group must be that of the ranks.

    Args:
        asked: the model's answers, if it has been asked in this process.
        reader: reader of the model's images; a text: the reason why there is none.

    Attributes:
        needs_whole_prompts: see `KVSpec.whole_prompts`.
        images: its images; a text: the reason why it takes none.

    Raises:
        ModelLoadError: the weights cannot be loaded, the checkpoint is incomplete, `engine.batch_invariant` is not
            supported, or the model's own attention gives other logits.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        cache: KVCache,
        asked: AskedModel | None = None,
        reader: ProcessedImages | str = "",
    ) -> None:
        torch.set_num_threads(engine.num_threads)
        # cuDNN's attention plans for each new shape, which takes from 70 ms to over a second; most steps have one
        torch.backends.cuda.enable_cudnn_sdp(False)
        transformers_logging.set_verbosity_error()  # it warns of generation settings that are not used here
        transformers_logging.disable_progress_bar()
        self._engine = engine
        config = load_config(model.path)
        asked = asked or pretrained.ask_folder(Path(model.path), config)
        self.images: RankImages | str
        try:
            self.model = self._load(model, cache.device, config, asked, sees=not isinstance(reader, str))
        except ModelLoadError as error:
            if isinstance(reader, str):
                raise
            reader = str(error)
            self.model = self._load(model, cache.device, config, asked, sees=False)
        self.images = (
            reader if isinstance(reader, str) else RankImages(self.model, reader, int(engine.image_cache_gib * GIB))
        )
        self._numbers = StepNumbers(cache.device)
        self.meets_in_layers = engine.tensor_parallel == 1 or asked.shape.division is not Division.NONE
        """True if the ranks sum the results of each layer's attention. Else they only meet at the end of a step."""
        self._meeting = torch.zeros(1, device=cache.device)
        self._last_keys = frozenset[int]()
        """Keys of the sequences in the previous step."""
        self._shape = asked.shape
        self._cache_argument = cache_argument(self.model)
        self._places = places_of(asked.shape.states)
        self._takes_rows = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        attentions = {m.layer_idx: m for m in self.model.modules() if hasattr(m, EXPAND)}
        self._latent = {i: attentions[i] for i, layer in asked.shape.layers.items() if layer.is_latent}
        self.expert_load: ExpertLoad | None = None
        """None: no rank has experts of its own, or another rank counts."""
        if engine.expert_parallel and dist.get_rank() == 0:
            self.expert_load = ExpertLoad(self.model, self.model.ep_plan, asked.shape.num_experts)
        self._absorb()
        self.adapters = ModelAdapters.of(self.model, engine)
        self.needs_whole_prompts = self._require_own_logits()
        self._check_images(asked)
        self._fused = self._with_replaced_modules(model, engine)
        self.use(cache)

    def _with_replaced_modules(self, model: ModelConfig, engine: EngineConfig) -> Fused:
        """Replace modules of the checked model as settings and device allow."""
        fused = self._fuse()
        if model.weights == "fp8":
            quantize(self.model)
        if engine.batch_invariant:
            make_invariant(self.model)
        if self.adapters is not None:
            self.adapters.make()
        return fused

    def _load(self, model: ModelConfig, device: torch.device, config: Any, asked: AskedModel, *, sees: bool) -> Any:
        """Return transformers' model of a folder, on a device.

        Args:
            sees: see `pretrained.load_model`.

        Raises:
            ModelLoadError: the weights cannot be loaded, or the checkpoint is incomplete.
        """
        placed: dict[str, Any] = {}
        if self._engine.tensor_parallel > 1:
            num_ranks = self._engine.tensor_parallel
            experts = num_ranks if self._engine.expert_parallel else None
            placed["distributed_config"] = DistributedConfig(tp_size=num_ranks, tp_plan="auto", ep_size=experts)
        elif device.type != "cpu":
            placed["device_map"] = {"": device}  # tensor by tensor, so the host never holds the whole model
        try:
            loaded, report = pretrained.load_model(
                Path(model.path),
                config,
                asked,
                ATTENTION_NAME,
                sees=sees,
                dtype=torch_dtype(arithmetic_dtype(config, model.dtype, device.type == "cuda")),
                **placed,
            )
        except ModelLoadError:
            raise
        except Exception as error:  # the library raises no narrower class
            if fault_of(error) is Fault.OUT_OF_MEMORY:
                raise ModelLoadError(
                    f"the weights in {model.path} do not fit into the GPU's memory: take a narrower model.dtype, a "
                    f"larger engine.tensor_parallel or fewer workers on a GPU ({in_one_line(error)})"
                ) from error
            raise ModelLoadError(f"cannot load the weights in {model.path}: {in_one_line(error)}") from error
        require_complete(model.path, type(loaded).__name__, report, () if sees else asked.unused)
        return loaded.to(device).eval()

    def use(self, cache: KVCache) -> None:
        """Replace the cache by one of the same shape on the same device. The old one must not be in use any more."""
        self.cache = cache
        self._graphs: DecodeGraphs | None = None  # free the memory of the old cache's graphs first
        wish = AttentionWish(self._engine.batch_invariant, self._engine.attention == "flashinfer")
        batch = self._engine.batch(on_gpu=cache.device.type == "cuda")
        room = TableRoom(batch.max_num_seqs, longest_sequence(self._shape.config, self._engine.max_model_len))
        self._attention = attention_of(cache, self._shape, self.model.dtype, room, wish)
        has_states = bool(self._shape.states)
        self._found_graphs = decode_graphs(self.model, self._attention, self._engine, has_states=has_states)
        self._graphs = None if isinstance(self._found_graphs, str) else self._found_graphs

    @property
    def computes(self) -> Computes:
        """Implementations that were chosen by tests on this device."""
        device = self.cache.device
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        found = chosen(gpu, self._attention, self._found_graphs, self._fused)
        if self.adapters is None or not found.num_graphs:
            return found
        slower = fallback("decode steps with adapters are no CUDA graphs", "the adapters of a step are not in a graph")
        return replace(found, fallbacks=(*found.fallbacks, slower))

    def _fuse(self) -> Fused:
        num_ranks, has_states = self._engine.tensor_parallel, bool(self._shape.states)
        if isinstance(self.images, str):
            return fuse(self.model, num_ranks, has_states=has_states)
        # The encoder's modules are computed by transformers: fused ones are checked for one row of tokens.
        keeps_layers = self.images.has_features
        return fuse(self.model.get_decoder(), num_ranks, has_states=has_states, keeps_layers=keeps_layers)

    @torch.inference_mode()
    def compute(self, step: RankStep, on_layer_done: OnLayerDone, filling: Filling | None = None) -> torch.Tensor:
        """Perform the copies, write the KV of this rank's heads and return logits.

        On a GPU the results are valid in the order of its current stream.

        Args:
            filling: tokens of the step that are only on the device.

        Returns:
            `[rows or 1, vocabulary]`: the logits of `logit_rows`.
        """
        self.cache.copy_blocks(step.copies)
        logits = self._by_graph(step, on_layer_done, filling)
        if logits is None:
            logits = self._forward(step, on_layer_done, filling)
        if not self.meets_in_layers:
            dist.all_reduce(self._meeting)  # by then every rank has written the step's KV
        if self.expert_load is not None:
            self.expert_load.publish()
        return logits

    def _by_graph(self, step: RankStep, on_layer_done: OnLayerDone, filling: Filling | None) -> torch.Tensor | None:
        """Compute a step by a CUDA graph; None: none computes it."""
        if self._graphs is None or any(part.adapter for part in step.parts):
            return None
        positions = self._decode_positions(step.parts)
        if positions is not None and len(positions) != len(step.parts):
            return None
        return self._graphs.compute(step, on_layer_done, filling, self._numbers, positions)

    def _decode_positions(self, parts: Sequence[StepPart]) -> list[int] | None:
        """Return the position of each part's only token, if the sequence of one of them has images; else None.

        The list is empty if there are placeholders or longer parts: no graph computes such steps.
        """
        if not (isinstance(self.images, RankImages) and any(part.images for part in parts)):
            return None
        if any(len(part.token_ids) > 1 for part in parts) or self.images.has_placeholders(parts):
            return []
        return [self.images.decode_position(part) for part in parts]

    def _forward(self, step: RankStep, on_layer_done: OnLayerDone, filling: Filling | None = None) -> torch.Tensor:
        """Compute a step, whose copies have been performed, without a graph."""
        parts, numbers = step.parts, self._numbers
        token_ids = numbers.put(torch.tensor([token for part in parts for token in part.token_ids]))
        images = None
        if isinstance(self.images, RankImages):
            self.images.begin_step()
        if isinstance(self.images, RankImages) and any(part.images for part in parts):
            images = self.images.of_step(parts, numbers)
            positions = numbers.put(self.images.step_positions(parts))
        else:
            positions = numbers.put(torch.cat([torch.arange(p.num_computed_tokens, p.end) for p in parts]))
        to_clear = begun_blocks(self.cache, parts) if self._attention.needs_numbers and not step.is_ready else ()
        begun = [numbers.put(torch.tensor(blocks, dtype=torch.int64)) for blocks in to_clear]
        filling = None if filling is None else filling.put_by(numbers)
        passes = list(passes_of(parts)) if self._shape.states else [Pass(parts, 0, len(token_ids), False)]
        wanted = Wanted.of(step, passes)
        last = len(passes) - 1
        prepared = [
            _Prepared(
                token_ids[each.begin : each.end],
                positions[..., each.begin : each.end],
                # Without a row to sample from, one unused row of logits is computed: none would mean all of them.
                numbers.put(torch.tensor(rows or [0])),
                StateRows.of(each.parts, numbers) if self._shape.states else None,
                # A layer is done for all tokens of the step in the last pass only.
                self._attention.step(each.parts, on_layer_done if index == last else ignore_layer, numbers),
                None if self.adapters is None else rows_with_adapters(each.parts, numbers),
            )
            for index, (each, rows) in enumerate(zip(passes, wanted.rows, strict=True))
        ]
        numbers.send()
        if filling is not None:
            filling.fill(token_ids)
        if self._attention.needs_numbers:
            self.cache.clear_blocks(begun)
            self._clear_entered(step)
        return wanted.joined([self._logits(each, with_, images) for each, with_ in zip(passes, prepared, strict=True)])

    def _logits(self, each: Pass, prepared: _Prepared, images: StepImages | None) -> torch.Tensor:
        """Compute one forward pass of a step and return the logits of the prepared rows, `[rows, vocabulary]`."""
        shape = (-1, 1) if each.is_stacked else (1, -1)
        given: dict[str, Any] = {"use_cache": prepared.states is not None}
        if images is None:
            given["input_ids"] = prepared.token_ids.view(shape)
        else:
            assert isinstance(self.images, RankImages)
            given["inputs_embeds"] = self.images.inputs(images, prepared.token_ids, each.begin, shape)
        if self._cache_argument != OF_RECURRENT:
            positions = prepared.positions
            given["position_ids"] = positions.view(*positions.shape[:-1], *shape)
        if takes_rows := self._takes_rows and not each.is_stacked:
            given["logits_to_keep"] = prepared.rows
        set_step(prepared.attention)
        if self.adapters is not None:
            self.adapters.begin(prepared.adapters, len(prepared.token_ids))
        if prepared.states is None:
            logits: torch.Tensor = self.model(**given).logits
        else:
            begin = each.parts[0].num_computed_tokens
            states = PassStates(self.cache, self._places, prepared.states, begin)
            logits = self.model(**given, **{self._cache_argument: states}).logits
            states.store()
        rows = logits.flatten(0, 1)
        return rows if takes_rows else rows[prepared.rows]

    @torch.inference_mode()
    def _require_own_logits(self) -> bool:
        """Check the model as it was loaded, on every rank; see `self_check`.

        What later replaces parts of it is checked by itself.

        Returns:
            Whether prompts must be computed whole, because layers lose their states between chunks.
        """
        dtype, device = self.model.dtype, self._numbers.device
        name = str(dtype).removeprefix("torch.")
        spec = self._shape.cache_spec(16, name, self._engine.tensor_parallel, name)
        config = self._shape.config
        num_tokens = longest_sequence(config, self._engine.max_model_len)
        tokens = self_check.probe_tokens(config.vocab_size, num_tokens)
        self.cache = KVCache(spec, num_blocks_for(len(tokens), 16), 2, device)
        self._attention = TorchAttention(self.cache)
        try:
            self._compare(list(self_check.steps(tokens, spec)), tokens)
        except ModelLoadError:
            if not spec.states:
                raise
            self._compare(list(self_check.steps(tokens, spec, self_check.WHOLE_ENDS)), tokens)
            return True
        return False

    def _check_images(self, asked: AskedModel) -> None:
        """Check the model with a test image. If it differs, the worker serves text only, without the encoder."""
        if isinstance(self.images, RankImages):
            try:
                self._require_own_images(self.images)
                logger.info("this worker takes images")
                return
            except Exception as error:  # the model's own code
                reason = str(error) if isinstance(error, ModelLoadError) else in_one_line(error)
                self.images = f"a test image is computed otherwise than by transformers, or not at all: {reason}"
            logger.warning("this worker takes no images: %s", self.images)
            for name in asked.unused:
                owner, _, attribute = name.rpartition(".")
                setattr(self.model.get_submodule(owner), attribute, None)
        elif asked.unused and self.images:
            logger.info("this worker takes no images: %s", self.images)
        if asked.unused:
            logger.info("this worker serves text: %s of the checkpoint are not loaded", ", ".join(asked.unused))

    @torch.inference_mode()
    def _require_own_images(self, images: RankImages) -> None:
        """Check the loaded model with an image between tokens, parts of which start and end inside the image.

        Raises:
            ModelLoadError: the model's own attention gives other logits, or sequences are too short for an image.
            Exception: the image cannot be encoded.
        """
        name = str(self.model.dtype).removeprefix("torch.")
        spec = self._shape.cache_spec(16, name, 1, name)
        probe = images.probe(self._shape.config.vocab_size)
        if len(probe.token_ids) > longest_sequence(self._shape.config, self._engine.max_model_len):
            raise ModelLoadError(f"sequences are shorter than {len(probe.token_ids)} tokens, that of a test image")
        self.cache = KVCache(spec, num_blocks_for(len(probe.token_ids), 16), 2, self._numbers.device)
        self._attention = TorchAttention(self.cache)
        ends = probe.whole_ends if self.needs_whole_prompts else probe.ends
        steps = list(self_check.steps(probe.token_ids, spec, ends, probe.images))
        self._compare(steps, probe.token_ids, probe.inputs)
        images.end_probe()

    def _compare(
        self, steps: Sequence[RankStep], token_ids: list[int], inputs: Mapping[str, torch.Tensor] = NO_INPUTS
    ) -> None:
        """Require that steps over all tokens compute what the model's own attention computes.

        Args:
            inputs: what the model needs for the images among the tokens.

        Raises:
            ModelLoadError: they differ, or cannot be computed.
        """
        parts = self_check.Parts(self.model)
        try:
            with parts.recorded(), self.adapters.watched() if self.adapters is not None else nullcontext():
                found = torch.cat([self._forward(step, ignore_layer) for step in steps])
        except ModelLoadError:
            raise
        except Exception as error:  # the model's own code
            raise ModelLoadError(f"the model cannot compute a first step: {in_one_line(error)}") from error
        for module in self._latent.values():
            release(module)
        with parts.given():
            sees = isinstance(self.images, RankImages)
            expected = self_check.own_logits(self.model, token_ids, sees=sees, **inputs)
        self._absorb()
        parts.require_equal(found, expected, self.model.dtype, self._shape.config.model_type)

    def _absorb(self) -> None:
        """Make latent layers attend in their latent space."""
        for index, module in self._latent.items():
            layer = self._shape.layers[index]
            absorb(module, layer.k_dim, layer.v_dim)

    def _clear_entered(self, step: RankStep) -> None:
        """Zero the places after the computed tokens of sequences that were not in the previous step.

        Another worker may have started the block, whose rest may then hold any content. Repeating it is harmless.
        """
        keys = frozenset(part.sequence_key for part in step.parts)
        if not step.is_ready:
            entered = [part for part in step.parts if part.sequence_key not in self._last_keys]
            for group, block, begin in entered_blocks(self.cache, entered):
                self.cache.clear_places(group, block, begin)
        self._last_keys = keys


def chosen(gpu: str, attention: Attention, graphs: DecodeGraphs | str, fused: Fused) -> Computes:
    """Return the implementations that a rank computes with.

    Args:
        gpu: name of the GPU; empty: it computes on CPUs, where no fallback is reported.
        attention: the rank's attention.
        graphs: graphs of its decode steps, or the reason why there are none.
        fused: result of the replacement of its model's modules.
    """
    slower = {
        "attention is by torch": [attention.reason] if isinstance(attention, TorchAttention) else [],
        "decode steps are no CUDA graphs": [graphs] if isinstance(graphs, str) else [],
        "layers are by transformers' own modules": fused.kept,
    }
    return Computes(
        gpu=gpu,
        attention=attention.name,
        num_graphs=0 if isinstance(graphs, str) else len(graphs.sizes),
        num_fused=fused.num_fused,
        fallbacks=tuple(fallback(what, each) for what, reasons in slower.items() for each in reasons) if gpu else (),
    )


def load_config(path: str) -> Any:
    """Read a model folder's configuration.

    Raises:
        ModelLoadError: the folder does not hold a model that this engine supports.
    """
    require_runnable(Path(path))
    try:
        config = pretrained.read_config(path)
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises no narrower class
        raise ModelLoadError(
            f"{path} is not a model folder that transformers can read: {in_one_line(error)}"
        ) from error
    for part in (config, config.get_text_config(decoder=True)):
        if isinstance(quantization := getattr(part, "quantization_config", None), dict):
            quantization["dequantize"] = True  # on every device: transformers itself has no fp8 kernels
    return config


def load_whole(path: str, config: Any, asked: AskedModel, attention: str, dtype: str) -> Any:
    """Return transformers' model of a folder, whole, on the CPU.

    Args:
        path: the model folder.
        config: see `load_config`.
        asked: the model's answers.
        attention: name of the attention function.
        dtype: torch's name of the data type of the weights.

    Raises:
        ModelLoadError: the weights cannot be loaded, or the checkpoint is incomplete.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        model, report = pretrained.load_model(Path(path), config, asked, attention, dtype=torch_dtype(dtype))
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises no narrower class
        raise ModelLoadError(f"cannot load the weights in {path}: {in_one_line(error)}") from error
    require_complete(path, type(model).__name__, report, asked.unused)
    return model.eval()


def require_complete(path: str, name: str, report: dict[str, Any], left_out: Sequence[str] = ()) -> None:
    """Refuse a checkpoint without some of the model's tensors: they would be random, and differ between workers.

    Unused tensors are logged; transformers ignores them.

    Args:
        left_out: submodules that are not loaded on purpose.

    Raises:
        ModelLoadError: tensors are missing, or have other shapes than the model's.
    """
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(f"the checkpoint in {path} lacks {_some(missing)}, which a {name} needs")
    mismatched = sorted(
        f"{key} of shape {list(there)} instead of {list(wanted)}" for key, there, wanted in report["mismatched_keys"]
    )
    if mismatched:
        raise ModelLoadError(f"the checkpoint in {path} does not fit its config.json: it holds {_some(mismatched)}")
    if scales := [key for key in report["unexpected_keys"] if key.endswith(OF_QUANTIZED)]:
        raise ModelLoadError(
            f"the checkpoint in {path} holds {_some(sorted(scales))}, which belong to quantized weights, and its "
            "config.json has no quantization_config that says how to read them"
        )
    beginnings = tuple(f"{each}." for each in left_out)
    if unexpected := sorted(key for key in report["unexpected_keys"] if not key.startswith(beginnings)):
        logger.warning("a %s does not use all tensors of the checkpoint in %s: %s", name, path, _some(unexpected))


def _some(names: Sequence[str]) -> str:
    rest = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")

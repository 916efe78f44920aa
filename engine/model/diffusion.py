"""Runs models that draw their response by diffusion, block by block, like DiffusionGemma.

Such a model has two halves with the same weights. The encoder reads the prompt and the finished blocks from left to
right, and its K and V are kept like those of any other model. The decoder sees a canvas, a block of tokens that starts
as noise, with attention in both directions over the canvas and to the kept K and V before it. Each pass of the decoder
makes the canvas less noisy (`canvas`); then the encoder reads the finished canvas, and the next one begins.

    tokens    [ prompt, finished canvases          ] [ canvas              ]
    encoder   [ K, V in the pages, causal          ]
    decoder                    reads <----------------- K, V of the canvas, not kept

So prompts are computed in chunks, reused and transferred as usual. A step of the engine encodes the new tokens of its
parts and takes one step of each canvas, all canvases in one pass. Until its canvas is finished, a sequence has no new
token, and its last token counts as not computed, although its K and V are in the pages. A canvas is lost if its
sequence misses a step, because it was preempted: it then starts again from the same noise. The same happens on another
worker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name the field uses
from transformers import DynamicCache

from baton.errors import ModelLoadError, in_one_line
from engine.core.image_store import ImageStore
from engine.core.runner import OnLayerDone, StepInput, StepOutput, StepPart, ignore_layer
from engine.model import pretrained
from engine.model.attention import ATTENTION_NAME, set_step
from engine.model.attention_step import AttentionTerms
from engine.model.canvas import SAMPLER, Canvas, NoiseKey, Schedule
from engine.model.logits_runner import LogitsRunner, refuse_settings
from engine.model.pages import Pages
from engine.model.rank_step import RankStep
from engine.model.self_check import ENDS, TOLERANCE, probe_tokens, shares, steps
from engine.model.transformers_model import load_config, load_whole
from engine.sampling.steps import MIN_TEMPERATURE

if TYPE_CHECKING:
    from baton.config import EngineConfig, ModelConfig

logger = logging.getLogger(__name__)
WORDS = "models that denoise a canvas"
OWN_ATTENTION = "eager"
"""Transformers' attention that the pages are compared with."""
NUM_LOGITS = 6
"""Tensors of a canvas's logits in float32 that exist at a time while it is denoised."""
ROUNDED_TOLERANCE = 0.1
"""Largest difference from the model's own logits with 16-bit weights; see `self_check.TOLERANCE`."""


class DiffusionRunner(LogitsRunner):
    """Runner of a transformers model that denoises canvases, on one device.

    Raises:
        ModelLoadError: the engine does not support the model in the folder, or the model computes other logits over the
            KV cache.
        ConfigError: the memory does not suffice for the KV pool, or a setting is not supported for these models.
    """

    name = "transformers"
    images: ImageStore | str = "the prompts of models that denoise a canvas are read as text alone"
    """See `Runner.images`."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, set_aside: int = 0) -> None:
        refuse_settings(engine, WORDS)
        self._set_aside = set_aside
        folder, config = Path(model.path), load_config(model.path)
        self._schedule = Schedule.of_folder(folder)
        asked = pretrained.ask_folder(folder, config)
        self.canvas_length: int = config.canvas_length
        self._canvas_bytes = NUM_LOGITS * 4 * self.canvas_length * asked.shape.config.vocab_size
        self._canvases: dict[int, Canvas] = {}
        """Canvases of the sequences in the last step, by sequence key."""
        self._next: dict[int, Canvas] = {}
        """Canvases of the step that is being executed."""
        on_gpu = model.device != "cpu" and torch.cuda.is_available()
        super().__init__(model, engine, asked.shape, [torch.device("cuda" if on_gpu else "cpu")])
        self.sampler = SAMPLER
        torch.set_num_threads(engine.num_threads)
        self._model: Any = load_whole(model.path, config, asked, ATTENTION_NAME, self.dtype)
        self._model.to(self.cache.device)
        self._layers = {
            layer: (group, Pages(self.cache, group, index))
            for group, layers in enumerate(self.spec.groups)
            for index, layer in enumerate(layers.layers)
        }
        self._require_own_logits()
        self._warm_up(self._compute)

    def close(self) -> None:
        """See `Runner.close`."""

    def execute(self, step: StepInput, on_layer_done: OnLayerDone = ignore_layer) -> StepOutput:
        """See `Runner.execute`."""
        self._next = {}
        try:
            return super().execute(step, on_layer_done)
        finally:  # also after a failure: a sequence that was not in this step may have other blocks in the next one
            self._canvases = self._next

    @torch.inference_mode()
    def _executed(self, step: StepInput, on_layer_done: OnLayerDone, is_ready: bool) -> StepOutput:
        self.cache.copy_blocks(step.copies)
        sampling = [part for part in step.parts if part.sample]
        begun = {part.sequence_key: self._canvas_of(part) for part in sampling}
        self._encode([part for part in step.parts if not (part.sample and begun[part.sequence_key].likeliest)])
        canvases = [begun[part.sequence_key] for part in sampling]
        found = dict(zip(begun, self._denoised(sampling, canvases), strict=True))
        self._next |= {key: canvas for key, canvas in found.items() if not canvas.is_finished}
        finished = [found.get(part.sequence_key) if part.sample else None for part in step.parts]
        return StepOutput(
            sampled_token_ids=tuple(
                canvas.result if canvas is not None and canvas.is_finished else () for canvas in finished
            ),
            num_computed_tokens=tuple(
                part.end if canvas is None or canvas.is_finished else part.end - 1
                for part, canvas in zip(step.parts, finished, strict=True)
            ),
        )

    def _canvas_of(self, part: StepPart) -> Canvas:
        """Return the canvas after a part's last token: the one of the step before, or a new one."""
        if (found := self._canvases.get(part.sequence_key)) is not None and len(part.token_ids) == 1:
            return found
        params = part.sampling
        is_drawn = params.temperature > 0
        key = NoiseKey((params.seed or 0) if is_drawn else 0, part.choice_index, part.end)
        noise = key.of_step(0, self.canvas_length, self.vocab_size).token_ids.to(self.cache.device)
        return Canvas(key=key, token_ids=noise, num_left=self._schedule.num_steps, is_drawn=is_drawn)

    def _encode(self, parts: Sequence[StepPart]) -> None:
        """Compute the tokens of parts and write their K and V."""
        if not parts:
            return
        device = self.cache.device
        rows = [_Row(part, device, part.num_computed_tokens, part.end) for part in parts]
        set_step(_PageAttention(self._layers, rows, keeps=True))
        token_ids = torch.tensor([[token for part in parts for token in part.token_ids]], device=device)
        self._model.model.encoder.language_model(
            input_ids=token_ids,
            position_ids=_positions(rows, device),
            past_key_values=_NoCache(self.spec.num_layers, self._model.model.decoder.norm.weight),
        )

    def _denoised(self, parts: Sequence[StepPart], canvases: Sequence[Canvas]) -> Iterator[Canvas]:
        """Take a step of canvases, all in one pass, and yield them."""
        if not parts:
            return
        for part, canvas, hidden in zip(parts, canvases, self._decoded(parts, canvases), strict=True):
            temperature = self._schedule.temperature(canvas.num_left) * (part.sampling.temperature or 1.0)
            logits = self._logits(hidden).div_(max(temperature, MIN_TEMPERATURE))
            after = canvas.denoised(logits, self._schedule)
            yield after if after.is_finished else replace(after, conditioning=self._mean_embeddings(logits))

    def _decoded(self, parts: Sequence[StepPart], canvases: Sequence[Canvas]) -> torch.Tensor:
        """Return the decoder's output for canvases, `[canvases, places, hidden]`."""
        device, decoder = self.cache.device, self._model.model.decoder
        rows = [_Row(part, device, part.end, part.end + self.canvas_length) for part in parts]
        none = torch.zeros(self.canvas_length, decoder.norm.weight.shape[0], dtype=self._model.dtype, device=device)
        before = torch.cat([none if each.conditioning is None else each.conditioning for each in canvases])
        set_step(_PageAttention(self._layers, rows, keeps=False))
        # The model computes this input from logits, which take as many numbers as the vocabulary for each place.
        hook = decoder.self_conditioning.register_forward_pre_hook(lambda module, args: (args[0], before[None]))
        try:
            hidden: torch.Tensor = decoder(
                decoder_input_ids=torch.cat([canvas.token_ids for canvas in canvases])[None],
                decoder_position_ids=_positions(rows, device),
                past_key_values=_NoCache(self.spec.num_layers, before),
            ).last_hidden_state
        finally:
            hook.remove()
        return hidden.view(len(parts), self.canvas_length, -1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of a canvas, `[places, vocabulary]` in float32, as the model's `forward` computes them."""
        most: float | None = self._model.final_logit_softcapping
        logits: torch.Tensor = self._model.lm_head(hidden).float()
        return logits.div_(most).tanh_().mul_(most) if most else logits

    def _mean_embeddings(self, logits: torch.Tensor) -> torch.Tensor:
        """Return `Canvas.conditioning`, as the model's decoder computes it from these logits."""
        embedding = self._model.model.decoder.embed_tokens
        dtype = embedding.weight.dtype
        if dtype == torch.float16:  # at low temperatures its range is too small; the softmax stays the same
            logits = logits - logits.amax(-1, keepdim=True)
        weights = logits.to(dtype).softmax(-1, dtype=torch.float32).to(dtype)
        found: torch.Tensor = weights @ embedding.weight * embedding.embed_scale.to(dtype)
        return found

    @torch.inference_mode()
    def _compute(self, step: RankStep, on_layer_done: OnLayerDone) -> torch.Tensor:
        """Encode the parts. Return the logits of new canvases after those that sample, `[places, vocabulary]`."""
        self._encode(step.parts)
        sampling = [step.parts[row] for row in step.sampling]
        hidden = self._decoded(sampling, [self._canvas_of(part) for part in sampling])
        return torch.cat([self._logits(each) for each in hidden])

    def _require_own_logits(self) -> None:
        """Require that a canvas after tokens that were encoded in parts has the logits of the model without pages.

        Raises:
            ModelLoadError: they differ, or cannot be computed.
        """
        tokens = probe_tokens(self.vocab_size, self.max_model_len)
        try:
            parts = [step.parts[0] for step in steps(tokens, self.spec, ENDS)]
            found = [self._compute(RankStep([part], [0]), ignore_layer) for part in parts]
            for part, logits in zip(parts, found, strict=True):
                self._require_equal(logits, self._own_logits(tokens[: part.end], part))
        except ModelLoadError:
            raise
        except Exception as error:  # the model's own code
            raise ModelLoadError(f"the model cannot compute a first step: {in_one_line(error)}") from error

    @torch.inference_mode()
    def _own_logits(self, tokens: list[int], part: StepPart) -> torch.Tensor:
        """Return the model's own logits of a new canvas after these tokens."""
        device = self.cache.device
        self._model.set_attn_implementation(OWN_ATTENTION)
        try:
            logits: torch.Tensor = self._model(
                input_ids=torch.tensor([tokens], device=device),
                decoder_input_ids=self._canvas_of(part).token_ids[None],
                past_key_values=DynamicCache(config=self._model.config.get_text_config(decoder=True)),
            ).logits[0]
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)
        return logits

    def _require_equal(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        difference = float(shares(found, expected).median() if self._is_rounded else shares(found, expected).max())
        if not difference <= (ROUNDED_TOLERANCE if self._is_rounded else TOLERANCE):
            raise ModelLoadError(
                f"models of type {self._model.config.model_type!r} are not supported: over the KV cache this model "
                f"computes the logits of a canvas otherwise than without it, by a share of {difference:.2g}"
            )

    @property
    def _is_rounded(self) -> bool:
        """True if the arithmetic has 16 bits."""
        return int(self._model.dtype.itemsize) < 4


class _Row:
    """One sequence of a pass: the block tables as tensors, and the positions of the tokens that are computed."""

    def __init__(self, part: StepPart, device: torch.device, begin: int, end: int) -> None:
        self.tables = [torch.tensor(table, device=device) for table in part.block_ids]
        self.begin, self.end = begin, end


class _NoCache:
    """Stands in for a cache of transformers, which would keep a step's K and V of all layers to the step's end.

    It is and stays empty: the attention writes K and V into the pages, and reads them there.

    Args:
        like: tensor of the data type and device of K and V.
    """

    is_compileable = False

    def __init__(self, num_layers: int, like: torch.Tensor) -> None:
        empty = like.new_empty(0)
        self.layers = [SimpleNamespace(keys=empty, values=empty)] * num_layers

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V that the encoder has computed, for the attention."""
        return keys, values


class _PageAttention:
    """Attention of one pass over packed rows: an `AttentionStep`.

    Args:
        layers: each layer's block table and pages.
        rows: the sequences in packed order.
        keeps: True for the encoder: K and V are written, and a token sees those up to itself. False for the decoder:
            each token sees what is in the pages before the canvas, and the whole canvas.
    """

    def __init__(self, layers: Mapping[int, tuple[int, Pages]], rows: Sequence[_Row], *, keeps: bool) -> None:
        self._layers, self._rows, self._keeps = layers, rows, keeps

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: AttentionTerms
    ) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        group, pages = self._layers[layer]
        out, at = list[torch.Tensor](), 0
        for row in self._rows:
            packed = slice(at, at + row.end - row.begin)
            own = [each[None, :, packed] for each in (key, value)]
            first = max(0, row.begin - terms.sliding_window + 1) if terms.sliding_window else 0
            before = [each.to(query.dtype) for each in pages.read(row.tables[group], first, row.begin)]
            if self._keeps:
                pages.write(row.tables[group], row.begin, *own)
            keys, values = (torch.cat(pair, dim=2)[0] for pair in zip(before, own, strict=True))
            mask = self._mask(row, first, terms.sliding_window, query.device) if self._keeps else None
            out.append(_attended(query[:, packed], keys, values, mask, terms.scaling))
            at = packed.stop
        return torch.cat(out)

    @staticmethod
    def _mask(row: _Row, first: int, window: int | None, device: torch.device) -> torch.Tensor:
        """Return which of the tokens from `first` on each token of a row sees, `[tokens, places]`."""
        places = torch.arange(first, row.end, device=device)
        own = places[row.begin - first :, None]
        seen = places <= own
        return seen if window is None else seen & (places > own - window)


def _attended(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float | None
) -> torch.Tensor:
    """Return the attention of queries, `[heads, rows, k_dim]`, over `[kv_heads, places, dim]`: `[rows, heads, v_dim]`.

    Query heads that share a KV head form its entry of the batch, so K and V are not repeated.
    """
    grouped = query.view(len(keys), -1, *query.shape[1:])
    keys, values = (each[:, None].expand(-1, grouped.shape[1], -1, -1) for each in (keys, values))
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return out.flatten(0, 1).transpose(0, 1)


def _positions(rows: Sequence[_Row], device: torch.device) -> torch.Tensor:
    """Return the positions of the packed tokens, `[1, tokens]`."""
    return torch.cat([torch.arange(row.begin, row.end) for row in rows])[None].to(device)

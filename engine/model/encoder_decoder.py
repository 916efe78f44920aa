"""Runs models with an encoder for the prompt and a decoder for the response, like T5 (Raffel et al., 2020) and BART.

The encoder reads the whole prompt in both directions. The decoder's layers attend to the encoder's output
(cross-attention), whose K and V they compute once, and to the decoder's own tokens. Both kinds of K and V have the same
shape, so the pages of a sequence hold both:

    tokens   [ prompt, for the encoder      | start tokens, response: for decoder ]
    pages    [ K, V of the encoder's output | K, V of the decoder's own tokens    ]
             0                              E                                     end

So a sequence has one block table, and a KV transfer works as for other models. The prompt is computed in one step. Each
sequence of a step is a forward pass of its own, because the decoders of these models count one position per call. The
pass gathers the sequence's K and V from the pages, and writes the new ones back.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from baton.errors import ModelLoadError, in_one_line
from baton.model_files import decoder_start_ids
from engine.core.runner import OnLayerDone, StepPart, ignore_layer
from engine.model import pretrained
from engine.model.logits_runner import LogitsRunner, refuse_settings
from engine.model.pages import Pages
from engine.model.rank_step import RankStep
from engine.model.self_check import ENDS, TOLERANCE, own_pair_logits, probe_tokens, shares, steps
from engine.model.transformers_model import load_config, load_whole

if TYPE_CHECKING:
    from baton.config import EngineConfig, ModelConfig

logger = logging.getLogger(__name__)
ATTENTION = "eager"
"""Implementation of transformers' attention that all these models support, including their position biases."""
DEFAULT_LENGTH = 512
"""Maximum number of tokens of models without a limit of their own, such as T5."""
ROUNDED_TOLERANCE = 0.1
"""Largest difference from the model's own logits with 16-bit weights; see `self_check.TOLERANCE`."""


class EncoderDecoderRunner(LogitsRunner):
    """Runner of a transformers model with an encoder and a decoder, on one device.

    Raises:
        ModelLoadError: the engine does not support the model in the folder, or the model computes other logits over the
            KV cache.
        ConfigError: the memory does not suffice for the KV pool, or a setting is not supported for these models.
    """

    name = "transformers"

    def __init__(self, model: ModelConfig, engine: EngineConfig, set_aside: int = 0) -> None:
        refuse_settings(engine, "models with an encoder and a decoder")
        self._set_aside = set_aside
        folder, config = Path(model.path), load_config(model.path)
        if not getattr(config, "max_position_embeddings", None):
            config.max_position_embeddings = engine.max_model_len or getattr(config, "n_positions", 0) or DEFAULT_LENGTH
        asked = pretrained.ask_folder(folder, config)
        on_gpu = model.device != "cpu" and torch.cuda.is_available()
        super().__init__(model, engine, asked.shape, [torch.device("cuda" if on_gpu else "cpu")])
        self.num_start_tokens = len(decoder_start_ids(folder))
        self._take_prompts_whole()
        torch.set_num_threads(engine.num_threads)
        self._model = load_whole(model.path, config, asked, ATTENTION, self.dtype).to(self.cache.device)
        self._pages = [Pages(self.cache, 0, index) for index in range(len(self.spec.groups[0].layers))]
        self._require_own_logits()
        self._warm_up(self._compute)
        self._structures.load()

    def close(self) -> None:
        """See `Runner.close`."""

    @torch.inference_mode()
    def _compute(self, step: RankStep, on_layer_done: OnLayerDone) -> torch.Tensor:
        self.cache.copy_blocks(step.copies)
        found, end = dict[int, torch.Tensor](), 0
        for part in step.parts:
            logits, end = self._decoded(part), end + len(part.token_ids)
            found |= enumerate(logits, end - len(logits))  # the prompt's tokens have no logits
        if not step.logit_rows:
            return torch.zeros(1, self.vocab_size, device=self.cache.device)
        return torch.stack([found[row] for row in step.logit_rows])

    def _decoded(self, part: StepPart) -> torch.Tensor:
        """Compute one sequence's part and return the logits of the decoder's tokens, `[tokens, vocabulary]`."""
        num_encoded, begin = part.num_prompt_tokens - self.num_start_tokens, part.num_computed_tokens
        table = torch.tensor(part.block_ids[0], device=self.cache.device)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        is_new = begin < num_encoded
        assert not (is_new and begin), "an encoder reads a prompt in one step"
        encoding = torch.zeros(1, num_encoded, 1, device=self.cache.device)  # only its length matters
        if is_new:
            ids = torch.tensor([part.token_ids[:num_encoded]], device=self.cache.device)
            encoding = self._model.get_encoder()(input_ids=ids).last_hidden_state
        else:
            self._fill(cache, table, num_encoded, begin)
        own = torch.tensor([part.token_ids[num_encoded if is_new else 0 :]], device=self.cache.device)
        logits: torch.Tensor = self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoding),
            decoder_input_ids=own,
            past_key_values=cache,
            use_cache=True,
        ).logits[0]
        for pages, crossed, kept in zip(
            self._pages, cache.cross_attention_cache.layers, cache.self_attention_cache.layers, strict=True
        ):
            if is_new:
                pages.write(table, 0, crossed.keys, crossed.values)
            new = slice(-own.shape[1], None)
            pages.write(table, max(begin, num_encoded), kept.keys[:, :, new], kept.values[:, :, new])
        return logits

    def _fill(self, cache: EncoderDecoderCache, table: torch.Tensor, num_encoded: int, end: int) -> None:
        """Copy K and V of a sequence's first `end` tokens into the cache that transformers uses in one pass."""
        for index, pages in enumerate(self._pages):
            crossed = [each.to(self._model.dtype) for each in pages.read(table, 0, num_encoded)]
            cache.cross_attention_cache.update(*crossed, index)
            cache.is_updated[index] = True
            if end > num_encoded:
                kept = [each.to(self._model.dtype) for each in pages.read(table, num_encoded, end)]
                cache.self_attention_cache.update(*kept, index)

    def _require_own_logits(self) -> None:
        """Require that steps over the KV cache compute the same logits as the model without a cache.

        Raises:
            ModelLoadError: they differ, or cannot be computed.
        """
        tokens = probe_tokens(self.vocab_size, self.max_model_len)
        num_encoded = ENDS[0]
        try:
            found = torch.cat([self._compute(step, ignore_layer) for step in self._probe_steps(tokens, num_encoded)])
            expected = own_pair_logits(self._model, tokens[:num_encoded], tokens[num_encoded:])
        except Exception as error:  # the model's own code
            raise ModelLoadError(f"the model cannot compute a first step: {in_one_line(error)}") from error
        difference = float(shares(found, expected).max())
        most = TOLERANCE if self._model.dtype.itemsize == 4 else ROUNDED_TOLERANCE
        if not difference <= most:
            raise ModelLoadError(
                f"models of type {self._model.config.model_type!r} are not supported: over the KV cache this model "
                f"computes the logits otherwise than without it, by a share of {difference:.2g}"
            )

    def _probe_steps(self, tokens: list[int], num_encoded: int) -> Iterator[RankStep]:
        """Yield steps over one sequence. The first contains the prompt and start tokens. Each returns all logits."""
        first = num_encoded + self.num_start_tokens
        for step in steps(tokens, self.spec, (first, first + 3, *range(first + 4, len(tokens) + 1))):
            (part,) = step.parts
            num_own = part.end - max(part.num_computed_tokens, num_encoded)
            part = part._replace(num_prompt_tokens=first, sample=True, num_drafts=num_own - 1)
            yield RankStep([part], [0])

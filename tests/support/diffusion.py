"""Tiny DiffusionGemma, and what transformers' own `generate` says with the random numbers of Baton."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

from engine.model.canvas import Noise, NoiseKey, draws
from tests.support.model_folders import backend

KIND, VOCAB_SIZE, LENGTH, WINDOW = "diffusion_gemma", 512, 16, 24
OF_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}
SHARPER = 16.0
"""Factor of the embeddings, and so of the logits: canvases converge."""
OF_IMAGES = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SIZES: dict[str, Any] = {"canvas_length": LENGTH, "text_config": OF_TEXT, "vision_config": OF_IMAGES}
KINDS = {KIND: SIZES}
GENERATION: dict[str, Any] = {
    "max_denoising_steps": 16,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 8.0},
    "t_min": 0.2,
    "t_max": 0.5,
    "stability_threshold": 1,
    "confidence_threshold": 1.0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def save_tiny(folder: Path) -> None:
    """Save a tiny model whose canvases change from step to step and end early now and then."""
    torch.manual_seed(3)
    model = AutoModelForMultimodalLM.from_config(
        AutoConfig.for_model(KIND, **SIZES), dtype=torch.float32, trust_remote_code=False
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3.0)
            else:
                weight.add_(0.2 * torch.randn_like(weight))
        model.model.decoder.embed_tokens.weight.mul_(SHARPER)
        for number, layer in enumerate((*model.model.encoder.language_model.layers, *model.model.decoder.layers)):
            layer.layer_scalar.fill_(0.8 + 0.05 * number)  # the halves share weights, and not these
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    backend(tuple(f"<|{number}|>" for number in range(VOCAB_SIZE - 256))).save(str(folder / "tokenizer.json"))


def load_reference(folder: Path) -> Any:
    """Return transformers' model."""
    torch.set_num_threads(1)
    return AutoModelForMultimodalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, trust_remote_code=False
    ).eval()


class _Numbers:
    """In place of torch's random numbers: those of the canvases after a prompt, in the order in which they are drawn.

    Args:
        is_drawn: whether tokens are drawn; else the likeliest one takes the place of each drawn one.
    """

    def __init__(self, seed: int, position: int, *, is_drawn: bool) -> None:
        self._seed, self._position, self._is_drawn = seed, position - LENGTH, is_drawn
        self._step, self._has_drawn = 0, False
        self.num_steps = 0

    @property
    def _noise(self) -> Noise:
        return NoiseKey(self._seed, 0, self._position).of_step(self._step, LENGTH, VOCAB_SIZE)

    def randint(self, **_: Any) -> torch.Tensor:
        if not self._has_drawn:  # a new canvas
            self._position, self._step = self._position + LENGTH, 0
        self._has_drawn = False
        return self._noise.token_ids[None]

    def multinomial(self, probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        self._has_drawn = True
        self._step, self.num_steps = self._step + 1, self.num_steps + 1
        if not self._is_drawn:
            return probabilities.argmax(-1, keepdim=True)
        return draws(probabilities.log(), self._noise.uniform)[:, None]


@contextmanager
def _numbers(numbers: _Numbers) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", numbers.randint)
        patch.setattr(torch, "multinomial", numbers.multinomial)
        patch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)  # it imports a compiler
        yield


def generated(
    model: Any, prompt: list[int], num_tokens: int, seed: int, *, is_drawn: bool = True, temperature: float = 1.0
) -> tuple[list[int], int]:
    """Return the tokens of `generate` after a prompt, without regard to end tokens, and the number of its steps."""
    numbers = _Numbers(seed, len(prompt), is_drawn=is_drawn)
    schedule: dict[str, Any]
    schedule = {"t_min": temperature * GENERATION["t_min"], "t_max": temperature * GENERATION["t_max"]}
    model.generation_config.eos_token_id = None
    with _numbers(numbers):
        out = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, **schedule)
    return out.sequences[0, len(prompt) :].tolist()[:num_tokens], numbers.num_steps

"""Tiny models with eyes, saved as they are published, and pictures for them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Idefics3ImageProcessorPil,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from baton.messages import SeenImage
from tests.integration.test_engine_models import SIZES, Reference
from tests.support.families import DELTA, HEADS
from tests.support.model_folders import backend

FAKE, GLOBAL, IMAGE = "<fake_token_around_image>", "<global-img>", "<image>"
MARKS = ("<|endoftext|>", FAKE, GLOBAL, IMAGE, *(f"<row_{r + 1}_col_{c + 1}>" for r, c in product(range(4), range(4))))
PLACEHOLDER = 500
TEXT = SIZES | {"pad_token_id": 0, "tie_word_embeddings": False}
TURNED = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10_000.0}}
IDS = {"image_token_id": 500, "vision_start_token_id": 501, "vision_end_token_id": 502, "video_token_id": 503}
QWEN = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
QWEN_SEES = QWEN | {
    "deepstack_visual_indexes": [0, 1], "depth": 3, "fullatt_block_indexes": [1], "hidden_size": 32,
    "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": 64, "window_size": 56,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 32, "image_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2,
    "patch_size": 8,
}  # fmt: skip
TILED = {"vision_config": SIGLIP, "image_token_id": MARKS.index(IMAGE), "scale_factor": 2}
KINDS: dict[str, dict[str, Any]] = {
    "smolvlm": TILED | {"text_config": TEXT | {"model_type": "llama"}},
    "idefics3": TILED | {"text_config": TEXT | {"model_type": "llama"}},
    "qwen2_vl": {
        "text_config": TEXT | HEADS | TURNED,
        "vision_config": QWEN | {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        **IDS,
    },
    "qwen2_5_vl": {"text_config": TEXT | HEADS | TURNED, "vision_config": QWEN_SEES, **IDS},
    "qwen3_vl": {"text_config": TEXT | HEADS | TURNED, "vision_config": QWEN_SEES, **IDS},
    "qwen3_5": {"text_config": TEXT | DELTA | TURNED, "vision_config": QWEN_SEES, **IDS},
}
TILES = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
PROCESSORS: dict[str, tuple[Any, dict[str, Any]]] = {
    "smolvlm": (SmolVLMImageProcessorPil, TILES),
    "idefics3": (Idefics3ImageProcessorPil, TILES),
}
MERGED = (Qwen2VLImageProcessorPil, {"size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 40}})


def processor_of(kind: str) -> Any:
    made, options = PROCESSORS.get(kind, MERGED)
    return made(**options)


def save_with_eyes(kind: str, folder: Path) -> Any:
    """Saves a checkpoint as it is published. Returns the whole model, which is the reference."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **KINDS[kind])
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight += torch.empty_like(weight).uniform_(-0.5, 0.5)
            elif any(part in name for part in ("language_model", "text_model", "lm_head")):
                weight.normal_(0, 0.25)
            else:
                weight.normal_(0, 0.1)
    model.save_pretrained(folder)
    made, options = PROCESSORS.get(kind, MERGED)
    described = {"image_processor_type": made.__name__.removesuffix("Pil")} | options
    (folder / "preprocessor_config.json").write_text(json.dumps(described))
    backend(MARKS).save(str(folder / "tokenizer.json"))
    return model


def picture(seed: int, width: int = 150, height: int = 100) -> bytes:
    """A PNG of noise in large squares, so that resizing leaves something of it."""
    squares = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    made = io.BytesIO()
    Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST).save(made, "PNG")
    return made.getvalue()


@dataclass(frozen=True)
class Prompt:
    """A prompt as transformers' own processor makes it."""

    token_ids: list[int]
    inputs: dict[str, torch.Tensor]


def written(kind: str, parts: Sequence[int | bytes]) -> Prompt:
    """The prompt of token ids and pictures; nothing of the engine takes part."""
    token_ids, pixels = list[int](), list[Any]()
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
            continue
        opened = Image.open(io.BytesIO(part)).convert("RGB")
        if kind in PROCESSORS:
            found = processor_of(kind)(images=[opened], return_tensors="pt", return_row_col_info=True)
            rows, columns = int(found["rows"][0][0]), int(found["cols"][0][0])
            text = get_image_prompt_string(rows, columns, 4, FAKE, IMAGE, GLOBAL)
            token_ids += backend(MARKS).encode(text, add_special_tokens=False).ids
        else:
            found = processor_of(kind)(images=[opened], return_tensors="pt")
            token_ids += [PLACEHOLDER] * (int(found["image_grid_thw"].prod()) // 4)
        pixels.append(found)
    inputs: dict[str, torch.Tensor] = {}
    if pixels and kind in PROCESSORS:
        inputs = {
            name: torch.cat([each[name] for each in pixels], 1) for name in ("pixel_values", "pixel_attention_mask")
        }
    elif pixels:
        inputs = {name: torch.cat([each[name] for each in pixels]) for name in ("pixel_values", "image_grid_thw")}
        inputs["mm_token_type_ids"] = (torch.tensor([token_ids]) == PLACEHOLDER).int()
    return Prompt(token_ids, inputs)


def refer(model: Any, prompt: Prompt, max_tokens: int) -> Reference:
    """The greedy answer of transformers."""
    token_ids = torch.tensor([prompt.token_ids])
    out = model.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        **prompt.inputs,
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = [logits[0].topk(2).values for logits in out.logits]
    return Reference(out.sequences[0, len(prompt.token_ids) :].tolist(), [float(a - b) for a, b in best])


def placed(parts: Sequence[int | SeenImage]) -> dict[str, Any]:
    """Fields of a sequence whose prompt has token ids, and images that a worker has seen."""
    token_ids, images = list[int](), []
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
        else:
            images.append(part.placed(len(token_ids)))
            token_ids += part.token_ids
    return {"token_ids": token_ids, "images": tuple(images)}

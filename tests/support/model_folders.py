"""Model folders made of nothing: a tokenizer in which every byte is a token, a chat template, a Llama of one layer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN = 32


def backend(marks: tuple[str, ...] = MARKS, **flags: bool) -> Tokenizer:
    """A tokenizer in which the marks are special tokens, with the lowest ids, and each byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate([*marks, *alphabet])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False, **flags) for text in marks])
    return made


def words(*pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A tokenizer of bytes with merges, by which one sees how texts are cut into words; marks have the last ids.

    Args:
        pre: further pre-tokenizers, before the one that makes letters of bytes.
    """
    merges = [
        ("1", "2"),
        ("12", "3"),
        ("Ġ", "h"),
        ("h", "i"),
        ("Ġh", "i"),
        ("Ġ", "Ġ"),
        ("Ċ", "Ċ"),
        ("!", "Ċ"),
        ("Ã", "©"),
    ]
    texts = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges))
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Sequence([*pre, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in MARKS])
    first = (MARKS[1], made.token_to_id(MARKS[1]))
    made.post_processor = processors.TemplateProcessing(single=f"{MARKS[1]} $A", special_tokens=[first])
    return made


def pieces(*marks: str, prefixed: bool = True) -> Tokenizer:
    """A tokenizer of SentencePiece's kind, as Llama 2 (prefixed) and Gemma have one: with `▁` for spaces, and bytes."""
    merges = [("▁", "h"), ("h", "i"), ("▁h", "i"), ("▁", "▁")]
    tokens = [
        *marks,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "h",
        "i",
        "x",
        *("".join(pair) for pair in merges),
    ]
    vocab = {text: i for i, text in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    made.add_special_tokens([AddedToken(text, normalized=False) for text in marks])
    made.post_processor = processors.TemplateProcessing(single=f"{marks[1]} $A", special_tokens=[(marks[1], 1)])
    return made


def unigram() -> Tokenizer:
    letters = [("<unk>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in "hix123")]
    made = Tokenizer(models.Unigram(letters, unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def write(folder: Path, name: str, value: Mapping[str, Any]) -> None:
    (folder / name).write_text(json.dumps(value))


def token(text: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": text, **plain, **flags}


Tensors = dict[str, torch.Tensor]


def tensors(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens": (16, HIDDEN), "lm_head": (16, HIDDEN), "model.norm": (HIDDEN,)}
    layer = "model.layers.0."
    shapes |= {f"{layer}self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj": (HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
    shapes |= {f"{layer}{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")}
    return {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def shards(folder: Path, files: Mapping[str, Tensors], index: Mapping[str, str] | None) -> None:
    write(folder, "config.json", {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "tie_word_embeddings": False, "max_position_embeddings": 64,
    })  # fmt: skip
    backend().save(str(folder / "tokenizer.json"))
    for name, values in files.items():
        save_file(values, folder / name, metadata={"format": "pt"})
    if index is not None:
        write(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": index})

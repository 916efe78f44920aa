"""Conversion of a GGUF file's tokenizer to tokenizer.json and tokenizer_config.json.

GGUF names the splitting of text before BPE (`tokenizer.ggml.pre`) but does not hold it, so each name needs its recipe
here. transformers' own GGUF loading ignores that name and leaves out the splitting of digits, so that "½ ²" becomes
other tokens than the model was trained on ("2024" does not: no merge joins 0 to 9). llama.cpp splits as we do
(`LLAMA_VOCAB_PRE_TYPE_SMOLLM`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.errors import ModelLoadError
from deploy.models.gguf_metadata import Metadata
from deploy.models.gguf_sentencepiece import sentencepiece
from deploy.models.gguf_tokens import add_tokens

SPECIAL_NAMES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""Hugging Face's name -> GGUF's."""


def write_tokenizer(metadata: Metadata, folder: Path, num_positions: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        num_positions: longest sequence of the model.

    Raises:
        ModelLoadError: a tokenizer other than SmolLM's byte-level BPE and Gemma's of SentencePiece.
        OSError: a file cannot be written.
    """
    text = build_tokenizer(metadata).to_str(pretty=True)
    (folder / "tokenizer.json").write_text(text, "utf-8")  # an error of the library's own `save` has no class
    config = tokenizer_config(metadata, num_positions)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def build_tokenizer(metadata: Metadata) -> Tokenizer:
    family, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "default")
    match family, pre:
        case "gpt2", "smollm":
            return _byte_level(metadata)
        case "llama", "default":
            return sentencepiece(metadata)
    raise ModelLoadError(
        f"The GGUF file has a {family} tokenizer of kind {pre}; known are gpt2 with smollm, llama with default."
    )


def _byte_level(metadata: Metadata) -> Tokenizer:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in metadata["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    add_tokens(tokenizer, tokens, metadata["tokenizer.ggml.token_type"])
    return tokenizer


def tokenizer_config(metadata: Metadata, num_positions: int) -> dict[str, Any]:
    """Return the configuration with which transformers' AutoTokenizer uses tokenizer.json unchanged."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    special = {
        f"{name}_token": tokens[token_id]
        for name, key in SPECIAL_NAMES.items()
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    template = metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": num_positions,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **special,
        **({"chat_template": template} if template else {}),
    }

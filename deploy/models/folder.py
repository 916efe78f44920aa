"""Checks of a model folder in Hugging Face's layout: completeness, and identity of the weights."""

from __future__ import annotations

import hashlib
from pathlib import Path

from baton.errors import ModelLoadError
from baton.model_files import named_code, read_json, require_runnable
from baton.weights_files import INDEX_FILE, loaded_files, placed_tensors

GGUF = ".gguf"
MISTRALS_TENSOR = "tok_embeddings.weight"
"""Tensor of every model in Mistral's and Meta's own layout, and of no model in Hugging Face's."""
MISTRALS_LAYOUT = (
    "have the original layout of Mistral or Meta (consolidated, params.json); give a folder in Hugging Face's layout, "
    "with config.json, model*.safetensors and tokenizer.json; most of these models are published in both"
)
NUM_SAMPLES = 64
SAMPLE_BYTES = 64 * 1024


def check_folder(folder: Path, advice: str = "", *, weights: bool = True, by_vllm: bool = False) -> None:
    """Check a model's folder and the completeness of its weights, without reading all of their bytes.

    Args:
        advice: fix for damaged weights; empty: the advice for a user's own folder.
        weights: the weights must be there. A router and the controller do not need them.
        by_vllm: see `require_runnable`.

    Raises:
        ModelLoadError: the first fault, with its fix.
    """
    ggufs = [folder] if folder.suffix == GGUF else sorted(folder.glob(f"*{GGUF}")) if folder.is_dir() else []
    if ggufs and ggufs[0].is_file() and not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"{ggufs[0]} is a GGUF file, which this version does not serve; give the folder of the model in Hugging "
            "Face's layout, with config.json, .safetensors files and tokenizer.json, from which it was made."
        )
    if folder.is_file():
        raise ModelLoadError(f"{folder} is a file; give the folder that holds the model.")
    if not folder.is_dir():
        raise ModelLoadError(f"The model folder {folder} does not exist.")
    if not (folder / "config.json").is_file():
        raise ModelLoadError(_without_config(folder))
    require_runnable(folder, by_vllm=by_vllm)
    if weights and MISTRALS_TENSOR in placed_tensors(folder, advice or "copy or download it again"):
        raise ModelLoadError(f"The weights in {folder} {MISTRALS_LAYOUT}.")
    if not (folder / "tokenizer.json").is_file():
        config = folder / "tokenizer_config.json"
        if named := named_code(read_json(config)):
            raise ModelLoadError(
                f"{config} names {named} as the tokenizer, which is code of the model's folder; Baton runs none of it, "
                "and needs a tokenizer.json."
            )
        raise ModelLoadError(
            f"The model folder {folder} has no tokenizer.json; write one with "
            "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), in an environment that has "
            "Baton's extra worker."
        )


def _without_config(folder: Path) -> str:
    """Describe a folder without config.json by its files, and say which folder to give instead."""
    if (adapter := folder / "adapter_config.json").is_file():
        base = str(read_json(adapter).get("base_model_name_or_path") or "another model")[:200]
        return (
            f"{folder} holds an adapter for {base} (adapter_config.json), and Baton cannot apply adapters; merge it "
            "into the model's weights (PEFT's merge_and_unload and save_pretrained), and give that folder."
        )
    if (folder / "params.json").is_file() or any(folder.glob("consolidated*")):
        return f"The model folder {folder} has no config.json: its files {MISTRALS_LAYOUT}."
    if not any(folder.iterdir()):
        return f"The model folder {folder} is empty; give the folder that holds config.json and the weights."
    return (
        f"The model folder {folder} has no config.json, so it is not a model in Hugging Face's layout; "
        "give the folder that holds config.json, the .safetensors files and tokenizer.json."
    )


def folder_revision(folder: Path) -> str:
    """Return the identity of the weights in a local folder: 32 hex digits.

    A digest over config.json, the index of the weights, and, for each weights file, its name, its size and 64 evenly
    spaced samples of 64 KiB. Reading whole files at every process start would take minutes for 100 GB on a network
    disk. The digest only has to distinguish another checkpoint, a fine-tune, another dtype or shard, each of which
    changes the header or practically every sample. It does not detect a deliberate change of a few bytes between the
    samples.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    if (index := folder / INDEX_FILE).is_file():
        digest.update(index.read_bytes())
    for path in loaded_files(folder):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for offset in sample_offsets(size):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def sample_offsets(size: int) -> list[int]:
    """Return the offsets of a file's samples, from its start to its end; they cover a small file completely."""
    if size <= NUM_SAMPLES * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    return [i * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1) for i in range(NUM_SAMPLES)]

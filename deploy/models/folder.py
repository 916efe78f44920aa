"""A model folder in Hugging Face's layout: is it whole, and which weights are these?"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from baton.errors import ModelLoadError
from baton.model_files import require_runnable

INDEX_FILE = "model.safetensors.index.json"
NUM_SAMPLES = 64
SAMPLE_BYTES = 64 * 1024


def check_folder(folder: Path, advice: str = "", *, weights: bool = True) -> None:
    """Checks a model's folder, and whether its weights are whole, but not each of their bytes.

    Args:
        advice: what to do about damaged weights; empty: what suits a folder of the user's.
        weights: whether they have to be there. A router and the controller do without them.

    Raises:
        ModelLoadError: the first problem, and what to do.
    """
    if not folder.is_dir():
        raise ModelLoadError(f"The model folder {folder} does not exist.")
    if not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"The model folder {folder} has no config.json, so it is not a model in Hugging Face's layout; "
            "give the folder that holds config.json, the .safetensors files and tokenizer.json."
        )
    require_runnable(folder)
    for path in weights_files(folder) if weights else ():
        if problem := _damage(path):
            raise ModelLoadError(f"{path} is damaged: {problem}; {advice or 'copy or download it again'}.")
    if not (folder / "tokenizer.json").is_file():
        raise ModelLoadError(
            f"The model folder {folder} has no tokenizer.json; write one with "
            "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )


def weights_files(folder: Path) -> list[Path]:
    """The folder's safetensors in order of their names.

    Raises:
        ModelLoadError: there are none, or a shard that the index names is missing.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(
            f"The model folder {folder} has no .safetensors file; Baton reads no other format of weights. "
            "Convert them with transformers' save_pretrained."
        )
    if (index := folder / INDEX_FILE).is_file():
        missing = sorted(set(_json(index)["weight_map"].values()) - {file.name for file in files})
        if missing:
            raise ModelLoadError(
                f"The model folder {folder} lacks {missing[0]}, which {INDEX_FILE} names ({len(missing)} missing in "
                "all); the download was probably interrupted, so fetch the model again."
            )
    return files


def _damage(path: Path) -> str:
    """Why the file is not what its header describes; empty: it is. A file that was cut short is the usual damage."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, size)))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        described = 8 + length + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error):
        return "it has no header of safetensors"
    return "" if size == described else f"it has {size:,} bytes, and its header describes {described:,}"


def folder_revision(folder: Path) -> str:
    """Identity of the weights in a local folder: 32 hex digits.

    A digest over config.json and, for each weights file, its name, its size and 64 evenly spaced samples of 64 KiB.
    Whole files would be read at every process start, which takes minutes for 100 GB on a network disk, and the digest
    only has to distinguish another checkpoint, a fine-tune, another dtype or shard, each of which changes the header or
    practically every sample. A deliberate change of a few bytes between the samples is not detected.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in weights_files(folder):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for offset in sample_offsets(size):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def sample_offsets(size: int) -> list[int]:
    """Offsets of a file's samples: the first at its start, the last at its end; a small file is read whole."""
    if size <= NUM_SAMPLES * SAMPLE_BYTES:
        return list(range(0, size, SAMPLE_BYTES))
    return [i * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1) for i in range(NUM_SAMPLES)]


def _json(path: Path) -> dict[str, dict[str, str]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("weight_map"), dict):
        raise ModelLoadError(f"{path} has no weight_map.")
    return value

"""Finds the local folder of the configured model, which the engine and the tokenizer load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from baton.config import ClusterConfig, ModelConfig
from baton.errors import ModelLoadError
from baton.spelling import nearest
from deploy.models.catalogue import CATALOGUE
from deploy.models.folder import check_folder, folder_revision
from deploy.models.progress import OnModelProgress, ignore_progress


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    path: Path
    """A folder in Hugging Face's layout: config.json, *.safetensors, tokenizer.json."""
    served_name: str
    """The id that clients use."""
    revision: str
    """Identity of the weights: two models with different weights never share one."""


def cache_dir(cluster: ClusterConfig) -> Path:
    """The folder of converted models: the configured one, else the user's cache folder."""
    if cluster.cache_dir:
        return Path(cluster.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def resolve(model: ModelConfig, cache_dir: Path, progress: OnModelProgress = ignore_progress) -> ResolvedModel:
    """The local folder of `model.path` or else `model.id`: a catalogue name, a local folder or a hub id, in that order.

    Downloads and converts what is missing; safe in several processes at once.

    Raises:
        ModelLoadError: the model cannot be obtained; the message says what to do.
    """
    if not model.path and model.id in CATALOGUE:
        # Imported on use: gguf is needed for the catalogue only.
        from deploy.models.wheel import catalogue_folder

        entry = CATALOGUE[model.id]
        path, revision = catalogue_folder(entry, cache_dir, progress), entry.revision
    elif model.path or _is_local(model.id):
        path = Path(model.path or model.id).expanduser().absolute()
        check_folder(path)
        revision = model.revision or folder_revision(path)
    elif model.id.count("/") == 1:
        # Imported on use: huggingface_hub takes 0.3 s, and most starts do without it.
        from deploy.models.hub import hub_folder

        path = hub_folder(model.id, model.revision, progress)
        check_folder(path, "delete what it links to in the hub's cache, and the next start downloads it again")
        revision = path.name
    else:
        meant = nearest(model.id, CATALOGUE)
        raise ModelLoadError(
            f"There is no model {model.id!r}. {f'Did you mean {meant}? Else give' if meant else 'Give'} a name of the "
            f"catalogue ({', '.join(sorted(CATALOGUE))}), a Hugging Face hub id such as org/name, or the path of a "
            "local folder."
        )
    served_name = model.served_name or Path(model.id).expanduser().absolute().name
    return ResolvedModel(path, served_name, revision)


def _is_local(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or Path(name).is_dir()

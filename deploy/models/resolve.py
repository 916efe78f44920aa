"""Finds the local folder of the configured model, which the engine and the tokenizer load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.cache_folder import cache_dir
from baton.cluster import Role
from baton.config import Config, ModelConfig
from baton.errors import ModelLoadError
from baton.spelling import nearest
from deploy.models.catalogue import CATALOGUE
from deploy.models.folder import GGUF, check_folder, folder_revision
from deploy.models.progress import OnModelProgress, ignore_progress
from deploy.models.wheel import catalogue_folder


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    path: Path
    """Folder in Hugging Face's layout: config.json, tokenizer.json and, if requested, *.safetensors."""
    served_name: str
    """Model id for clients."""
    revision: str
    """Identity of the weights: two models with different weights never share one."""
    weights_path: Path
    """Folder with the weights, on machines that have them."""


def resolve(
    model: ModelConfig,
    cache_dir: Path,
    progress: OnModelProgress = ignore_progress,
    *,
    weights: bool = True,
    by_vllm: bool = False,
) -> ResolvedModel:
    """Return the folder of `model.path` or `model.id`: a catalogue name, a local folder or a hub id, in this order.

    Downloads and converts missing files. Several processes may call it concurrently.

    Args:
        weights: whether they are wanted. Without, only configuration and tokenizer are fetched; a local folder has to
            have them even so, unless `model.revision` says which ones they are.
        by_vllm: see `require_runnable`.

    Raises:
        ModelLoadError: the model cannot be obtained; the message says what to do.
    """
    weights_path: Path | None = None
    if not model.path and model.id in CATALOGUE:
        entry = CATALOGUE[model.id]
        path, revision = catalogue_folder(entry, cache_dir, progress, weights=weights), entry.revision
        weights_path = path.with_name(entry.folder_name)
    elif model.path or is_local(model.id):
        path = Path(model.path or model.id).expanduser().absolute()
        check_folder(path, weights=weights, by_vllm=by_vllm)
        revision = model.revision or folder_revision(path)
    elif model.id.count("/") == 1:
        # Imported on use: huggingface_hub takes 0.3 s, and most starts do without it.
        from deploy.models.hub import hub_folder

        path = hub_folder(model.id, model.revision, progress, weights=weights, by_vllm=by_vllm)
        advice = "delete what it links to in the hub's cache, and the next start downloads it again"
        check_folder(path, advice, weights=weights, by_vllm=by_vllm)
        revision = path.name
    else:
        meant = nearest(model.id, CATALOGUE)
        raise ModelLoadError(
            f"There is no model {model.id!r}. {f'Did you mean {meant}? Else give' if meant else 'Give'} a name of the "
            f"catalogue ({', '.join(sorted(CATALOGUE))}), a Hugging Face hub id such as org/name, or the path of a "
            "local folder."
        )
    # Clients hold a hub id as a whole; of a folder, whose path is nobody's business, they get the name.
    name = Path(model.id).expanduser().absolute().name if is_local(model.id) else model.id
    served_name = model.served_name or name
    return ResolvedModel(path, served_name, revision, weights_path or path)


def with_models(config: Config, progress: OnModelProgress = ignore_progress, *, weights: bool = True) -> Config:
    """Return the configuration with the model's folder, name and revision; with weights also the draft model's folder.

    Raises:
        ModelLoadError: one of them cannot be obtained.
    """
    by_vllm = config.engine.runner == "vllm"
    model = resolve(config.model, cache_dir(config.cluster), progress, weights=weights, by_vllm=by_vllm)
    found = _found(config, model, model.path)
    if not weights:
        return found
    return _with_draft(found, lambda draft: resolve(draft, cache_dir(config.cluster), progress).path)


def with_places(config: Config, progress: OnModelProgress = ignore_progress) -> Config:
    """Return the configuration with the models' folders on the workers' machines.

    These folders have the weights, which are not downloaded here. Every machine has them at the same path.

    Raises:
        ModelLoadError: what a model is cannot be found out.
    """
    by_vllm = config.engine.runner == "vllm"
    model = resolve(config.model, cache_dir(config.cluster), progress, weights=False, by_vllm=by_vllm)
    found = _found(config, model, model.weights_path)
    return _with_draft(
        found, lambda draft: resolve(draft, cache_dir(config.cluster), progress, weights=False).weights_path
    )


def _found(config: Config, model: ResolvedModel, path: Path) -> Config:
    own = dataclasses.replace(config.model, path=str(path), served_name=model.served_name, revision=model.revision)
    return dataclasses.replace(config, model=own)


def _with_draft(config: Config, folder_of: Callable[[ModelConfig], Path]) -> Config:
    """Return the configuration with the folders of the pools' draft models, which may differ."""
    folders: dict[str, str] = {}
    for pool in Role:
        engine = config.engine_of(pool)
        if not engine.draft_model or engine.speculation == "off" or engine.draft_model in folders:
            continue
        try:
            folders[engine.draft_model] = str(folder_of(ModelConfig(id=engine.draft_model)))
        except ModelLoadError as error:
            raise ModelLoadError(f"{config.name_of(pool, 'draft_model')} {engine.draft_model}: {error}") from error
    if not folders:
        return config
    own = {
        pool: {"draft_model": folders[named]}
        for pool in Role
        if (named := config.pools.of(pool).engine.get("draft_model")) in folders
    }
    draft = folders.get(config.engine.draft_model, config.engine.draft_model)
    engine = dataclasses.replace(config.engine, draft_model=draft)
    return dataclasses.replace(config, engine=engine, pools=config.pools.with_engine(own))


def is_local(name: str) -> bool:
    """Return whether a model's name is the path of a folder."""
    return name.startswith(("/", "./", "../", "~")) or name.endswith(GGUF) or Path(name).is_dir()

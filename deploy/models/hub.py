"""Model of the Hugging Face hub, in the hub's own cache so that other tools share it."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils.tqdm import enable_progress_bars, tqdm

from baton.errors import ModelLoadError
from baton.model_files import require_runnable
from deploy.models.progress import OnModelProgress, Progress
from deploy.models.space import is_full

SMALL = ["*.json", "*.jinja"]
"""Configuration and tokenizer."""
WEIGHTS = "*.safetensors"
UNWANTED = ["*/*.safetensors", "*/*.json", "consolidated*.safetensors"]
"""Copies in other formats: onnx/, original/, openvino/, and Mistral's own next to the shards."""
INDEX = "*.safetensors.index.json"


def hub_folder(
    model_id: str, revision: str, progress: OnModelProgress, *, weights: bool = True, by_vllm: bool = False
) -> Path:
    """Return the snapshot folder, whose name is the commit. An empty `revision` is the main branch.

    Args:
        weights: download the weights too; otherwise only configuration and tokenizer.
        by_vllm: see `require_runnable`.

    Raises:
        ModelLoadError: no such model, no permission, no space; no hub in reach, and the model is not cached; or, before
            weights are fetched, a model that does not run.
    """
    progress(Progress(stage="download", done=0, total=0, detail=model_id))
    small = _fetched(model_id, revision, progress, SMALL, [*UNWANTED, INDEX])
    if not weights:
        return small
    require_runnable(small, by_vllm=by_vllm)
    return _fetched(model_id, revision, progress, [WEIGHTS, *SMALL], UNWANTED)


def _fetched(model_id: str, revision: str, progress: OnModelProgress, wanted: list[str], unwanted: list[str]) -> Path:
    if not constants.HF_HUB_DISABLE_PROGRESS_BARS:
        enable_progress_bars()  # transformers turns them off for the whole process, and ours are among them
    try:
        folder = huggingface_hub.snapshot_download(
            model_id,
            revision=revision or None,
            allow_patterns=wanted,
            ignore_patterns=unwanted,
            tqdm_class=_reporting_bar(model_id, progress),
        )
    except GatedRepoError as error:
        raise ModelLoadError(
            f"The hub gives {model_id} only to those who accepted its terms: accept them on "
            f"https://huggingface.co/{model_id}, then run `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"The hub model {model_id} has no revision {revision!r}.") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"The hub has no model {model_id}, or it is private (then run `hf auth login`); and there is no local "
            "folder of that name."
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        if is_full(str(error)):
            raise ModelLoadError(
                f"There is no space for {model_id} in {constants.HF_HUB_CACHE}: {_first_line(error)}. "
                "HF_HOME names another place."
            ) from error
        raise ModelLoadError(
            f"Cannot get {model_id} from the Hugging Face hub: {_first_line(error)}. Check the network and "
            "HF_ENDPOINT, or give the path of a local folder."
        ) from error
    return Path(folder)


def _reporting_bar(model_id: str, progress: OnModelProgress) -> Any:
    """Return a progress bar class for the hub's library that reports bytes to `progress` and draws nothing."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": False, "file": StringIO()})  # type: ignore[no-untyped-call]

        def display(self, *_: Any, **__: Any) -> None:
            if self.unit == "B" and self.total:
                progress(Progress(stage="download", done=int(self.n), total=int(self.total), detail=model_id))

    return Bar


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__

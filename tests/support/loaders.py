"""Every way by which a process of Baton reads a model's folder, and what comes of each.

    python -m tests.support.loaders CACHE FOLDER ...

prints for each folder a JSON object of entries: empty for what loads, else the error's class and message.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from baton.config import Config, EngineConfig, ModelConfig
from baton.errors import ModelLoadError
from baton.tokenizer_file import end_of_sequence_ids, read_vocabulary
from deploy.doctor import machine, preflight
from deploy.local.parts import with_model
from deploy.models import resolve, with_models, with_places
from engine.runners import make_runner
from router.prompt import Tokenizer

ENGINE = EngineConfig(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
QUIET = Console(quiet=True)


def loaders(folder: Path, cache: Path, sound: Path | None = None) -> dict[str, Callable[[], Any]]:
    """Returns the entries by name.

    Args:
        folder: the model's.
        cache: where what is made of it may be kept.
        sound: another model, for which this one drafts.
    """
    model = ModelConfig(id=str(folder), path=str(folder), device="cpu")
    config = Config(model=model)
    transformers = replace(ENGINE, runner="transformers")
    drafted = replace(transformers, draft_model=str(folder))
    target = replace(model, id=str(sound or folder), path=str(sound or folder))

    def hub() -> object:
        with mock.patch("huggingface_hub.snapshot_download", return_value=str(folder)):
            return resolve(ModelConfig(id="org/model"), cache)

    def doctor() -> None:
        for check in machine.model(config, is_needed=True):
            if check.state == "fail":
                raise ModelLoadError(check.found)

    return {
        "router": lambda: Tokenizer.load(resolve(replace(model, revision="r"), cache, weights=False).path),
        "up": lambda: preflight.with_kv_size(with_model(config, QUIET)),
        "download": hub,
        "places": lambda: with_places(config),
        "draft of up": lambda: with_models(replace(config, model=target, engine=drafted)),
        "doctor": doctor,
        "worker": lambda: make_runner(model, ENGINE, cache).close(),
        "worker on transformers": lambda: make_runner(model, transformers, cache).close(),
        "draft of a worker": lambda: make_runner(target, drafted, cache).close(),
        "grammars": lambda: (read_vocabulary(folder), end_of_sequence_ids(folder)),
    }


def outcome(entry: Callable[[], Any]) -> str:
    """Returns what comes of an entry, in words; empty: it loads."""
    try:
        entry()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    cache, *folders = map(Path, sys.argv[1:])
    for folder in folders:
        print(json.dumps({name: outcome(entry) for name, entry in loaders(folder, cache / folder.name).items()}))


if __name__ == "__main__":
    main()

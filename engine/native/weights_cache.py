"""Cache of packed weights in the user's cache folder: a file for each checkpoint folder.

    weights-FOLDER-KEY.packed    digests of the folder's path, with `model.weights` unless it is exact, and of
                                 everything that the weights depend on
    weights.lock                 held by the process that packs

The weights depend on the folder's files, identified by name, size, times and samples of their content; on the code that
packs; and on the libraries that load the weights and compute the rotary table. In addition, a file is used only if its
first steps' logits are bit-identical to those recorded when it was packed and compared with transformers.

When a file is written, others of the same folder with another key are removed, and so are those of deleted folders and
those that have not been used for a month. A process that has mapped a removed file keeps its content. If nothing can be
written, there is no cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import logging
import re
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.own_files import make_own
from engine.native import packed_file
from engine.native.spec import read_keys
from engine.native.unused import claim, remove_unused
from engine.native.weights import PackedWeights

logger = logging.getLogger(__name__)
CODE = ("weights_cache.py", "packed_file.py", "weights.py", "quantized.py", "model.py", "spec.py")
"""Source files in this folder on which packed weights depend."""
NAMES = re.compile(r"weights-[0-9a-f]{20}-[0-9a-f]{20}(\.packed|-\w+\.part)")
"""Names of the files, and of temporary files left by a process that ended while writing."""
NUM_SAMPLES = 64
SAMPLE_BYTES = 2**12
WHOLE_BYTES = 2**20
"""Leading bytes of a file that are hashed in full: config.json, and the header of a file of weights."""


class StoredConfig:
    """Transformers configuration restored from JSON: its fields as attributes, without transformers."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, as a transformers configuration does."""
        return dict(self.__dict__)

    @classmethod
    def of(cls, config: Any) -> StoredConfig:
        """Return a configuration after a round trip through JSON.

        All fields that transformers reads are there; methods and other fields are not.

        Raises:
            TypeError: a field cannot be represented in JSON.
        """
        read = read_keys(config)
        return cls(json.loads(json.dumps({key: value for key, value in config.to_dict().items() if key in read})))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """A model whose packed weights are cached."""

    config: StoredConfig
    weights: PackedWeights
    logits: str
    """Digest of the first steps' logits, which were verified."""


class WeightsCache:
    """Cache entry of one model.

    Args:
        folder: the cache folder.
        model: the checkpoint folder.
        mode: the weight format, as in `model.weights`. Each format of a model has its own file.
    """

    def __init__(self, folder: Path, model: Path, mode: str = "exact") -> None:
        self._folder, self._model = folder, model.resolve()
        kept = str(self._model) if mode == "exact" else f"{self._model}\0{mode}"
        self._prefix = f"weights-{_digest(kept.encode())}"
        self._path = self._path_now()

    @contextlib.contextmanager
    def opened(self) -> Generator[KeptModel | None]:
        """Context manager: yields the cached model, or None.

        If it yields None, it holds a lock: other processes wait until this one has packed, and then find the result.
        """
        kept = self.find()
        with contextlib.ExitStack() as stack:
            if kept is None:
                with contextlib.suppress(OSError):  # if nothing can be written, there is no lock to wait for
                    make_own(self._folder)
                    lock = stack.enter_context((self._folder / "weights.lock").open("w"))
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if (kept := self.find()) is not None:
                    stack.close()
            yield kept

    def find(self) -> KeptModel | None:
        """Return the cached model; None if there is no file, or if it is broken, which is logged as a warning."""
        try:
            if self._path is None or not claim(self._path):
                return None
            found = packed_file.read(self._path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("the packed weights in %s cannot be used and are made anew: %s", self._path, error)
            return None
        config = StoredConfig(found.about["config"])
        return KeptModel(config=config, weights=found.weights, logits=found.about["logits"])

    def keep(self, kept: KeptModel) -> KeptModel | None:
        """Write a model to the cache. Return it in the form that all processes share from now on.

        Returns:
            None if it cannot be written, which is logged as a warning, or if the checkpoint has changed meanwhile.
        """
        path = self._path_now()
        if path is None or path != self._path:
            logger.warning("the packed weights are not kept: files in %s cannot be read, or have changed", self._model)
            return None
        about = {"folder": str(self._model), "config": kept.config.to_dict(), "logits": kept.logits}
        try:
            make_own(self._folder)
            packed_file.write(path, about, kept.weights)
        except OSError as error:
            logger.warning("the packed weights are not kept, each worker has its own: %s", error)
            return None
        logger.info("the packed weights are kept in %s", path)
        with contextlib.suppress(OSError):  # removing other files is optional
            self._remove_others(path)
        return self.find()

    def _path_now(self) -> Path | None:
        try:
            identity = _identity(self._model)
        except OSError:
            return None
        libraries = (torch.__version__, importlib.metadata.version("transformers"))
        code = [Path(__file__).with_name(name).read_bytes() for name in CODE]
        key = _digest(repr((identity, libraries, code)).encode())
        return self._folder / f"{self._prefix}-{key}.packed"

    def _remove_others(self, written: Path) -> None:
        for path in self._folder.glob("weights-*.packed"):
            if path != written and (path.name.startswith(f"{self._prefix}-") or _is_of_nothing(path)):
                path.unlink(missing_ok=True)
        for part in self._folder.glob(f"{self._prefix}-*.part"):  # left by a process that ended while writing
            part.unlink(missing_ok=True)
        remove_unused(self._folder, NAMES, time.time())


def logits_digest(logits: list[torch.Tensor]) -> str:
    """Return a digest of the bits of logits."""
    return _digest(b"".join(one.contiguous().numpy().tobytes() for one in logits))


def _is_of_nothing(path: Path) -> bool:
    """Return whether a file is broken, or of a folder that is gone."""
    try:
        return not Path(packed_file.read_about(path)["folder"]).exists()
    except OSError:  # it is gone, or another user's
        return False
    except ValueError:
        return True


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=10).hexdigest()


def _identity(folder: Path) -> str:
    """Return a digest that differs between contents of a folder, without reading all of it.

    A file that is written gets other times, and training changes weights everywhere.
    """
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            continue
        state = path.stat()
        digest.update(repr((path.name, state.st_size, state.st_mtime_ns, state.st_ctime_ns)).encode())
        with path.open("rb", buffering=0) as file:
            digest.update(file.read(WHOLE_BYTES))
            for sample in range(NUM_SAMPLES if state.st_size > WHOLE_BYTES else 0):
                file.seek((state.st_size - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()

"""The packed weights of models, in the user's cache: a file for each checkpoint folder.

    weights-FOLDER-KEY.packed    digests of the folder's path, with `model.weights` where that is not exact, and of
                                 everything that the weights depend on
    weights.lock                 held by the one who packs

What they depend on are the folder's files, by name, size, times and samples of their content; the code that packs; and
the libraries that load the weights and make the rotary table. A file is also of no use unless the first steps' logits
come out of it bit for bit as they did when it was packed, where they were compared with transformers'.

When a file is written, those of the same folder that are of another key are removed, those of folders that are gone,
and those that nobody has used for a month. A process that has mapped one of them keeps its content. Where nothing can
be written, there is no cache.
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
"""Files beside this one on which a packed weight depends."""
NAMES = re.compile(r"weights-[0-9a-f]{20}-[0-9a-f]{20}(\.packed|-\w+\.part)")
"""What files are called, and what is left of a process that has ended within its write."""
NUM_SAMPLES = 64
SAMPLE_BYTES = 2**12
WHOLE_BYTES = 2**20
"""Bytes of a file's begin that are read in full: config.json, and the header of a file of weights."""


class StoredConfig:
    """A transformers configuration that came out of JSON: its fields as attributes, without transformers."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, as a configuration of transformers does."""
        return dict(self.__dict__)

    @classmethod
    def of(cls, config: Any) -> StoredConfig:
        """Returns what comes out of JSON of a configuration, whose fields are all there; its methods are not, nor are
        fields that transformers does not read.

        Raises:
            TypeError: JSON has no place for a field.
        """
        read = read_keys(config)
        return cls(json.loads(json.dumps({key: value for key, value in config.to_dict().items() if key in read})))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptModel:
    """A model whose packed weights are kept."""

    config: StoredConfig
    weights: PackedWeights
    logits: str
    """The digest of the first steps' logits that are known to be right."""


class WeightsCache:
    """The place of one model in the cache.

    Args:
        folder: the cache.
        model: the folder of the checkpoint.
        mode: what the weights are made to, as `model.weights` names it. Those of two modes are kept beside each other.
    """

    def __init__(self, folder: Path, model: Path, mode: str = "exact") -> None:
        self._folder, self._model = folder, model.resolve()
        kept = str(self._model) if mode == "exact" else f"{self._model}\0{mode}"
        self._prefix = f"weights-{_digest(kept.encode())}"
        self._path = self._path_now()

    @contextlib.contextmanager
    def opened(self) -> Generator[KeptModel | None]:
        """Gives what is kept of the model. If it is nothing, other processes wait while the block is entered: one
        packs, and the others find what it has kept.
        """
        kept = self.find()
        with contextlib.ExitStack() as stack:
            if kept is None:
                with contextlib.suppress(OSError):  # where nothing can be written, nobody waits for anybody
                    make_own(self._folder)
                    lock = stack.enter_context((self._folder / "weights.lock").open("w"))
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if (kept := self.find()) is not None:
                    stack.close()
            yield kept

    def find(self) -> KeptModel | None:
        """Returns what is kept of the model; nothing if there is no file, or it is broken, which is a warning."""
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
        """Writes what is to be kept, and returns it as all processes have it from now on.

        Returns:
            None where it cannot be written, which is a warning, or the checkpoint has changed meanwhile.
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
        with contextlib.suppress(OSError):  # of a neighbour, whom they may serve
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
        for part in self._folder.glob(f"{self._prefix}-*.part"):  # of a process that has ended within its write
            part.unlink(missing_ok=True)
        remove_unused(self._folder, NAMES, time.time())


def logits_digest(logits: list[torch.Tensor]) -> str:
    """Returns a digest of the bits of logits."""
    return _digest(b"".join(one.contiguous().numpy().tobytes() for one in logits))


def _is_of_nothing(path: Path) -> bool:
    """Returns whether a file is of a folder that is gone, or broken."""
    try:
        return not Path(packed_file.read_about(path)["folder"]).exists()
    except OSError:  # it has gone, or is another user's
        return False
    except ValueError:
        return True


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=10).hexdigest()


def _identity(folder: Path) -> str:
    """Returns a digest in which two contents of a folder differ, without reading all of it: a file that is written gets
    other times, and training changes weights everywhere.
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

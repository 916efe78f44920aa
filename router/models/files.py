"""Cache of the files of announced models, which a router reads from workers or controllers.

Routers of one machine share the folder. Each set of files is a folder below it with the digest as its name, next to a
lock file that each router keeps locked while it uses the set:

    FOLDER/DIGEST/config.json, tokenizer.json, ...
    FOLDER/DIGEST.in-use        its time is that of the latest use

A router that has written a set removes others beyond the limits: those used least recently that no router has locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar
from weakref import WeakValueDictionary

from baton.errors import BatonError, ModelLoadError
from baton.own_files import make_own
from baton.own_folder import own_folder
from baton.rpc.member_auth import MemberLink
from baton.rpc.model_files import FileSource, read_model_files
from baton.serving_files import ServingFiles, is_digest
from baton.tasks import seen_through

logger = logging.getLogger(__name__)
T = TypeVar("T")

IN_USE = ".in-use"
MAX_SETS = 64
"""Maximum number of kept sets. Sets in use stay in any case."""
MAX_KEPT_BYTES = 2 * 2**30
"""Maximum size of the kept sets. Sets in use stay in any case."""
MAX_SOURCES = 4
"""Maximum number of processes that are asked for one set."""
SOURCE_S = 20.0
"""Time that each of them has, in seconds."""
LOCK_S = 5.0
"""Time to wait for another process that removes a set, in seconds."""


class ModelFileCache:
    """Folders with the verified files of models, each of which stays until `release` or `close`.

    Args:
        folder: the folder that routers share. If it cannot be used, the files are kept in a temporary folder.
        link: credentials of this router.
        source_s: see `SOURCE_S`.
    """

    def __init__(self, folder: Path, link: MemberLink, *, source_s: float = SOURCE_S) -> None:
        self._link = link
        self._source_s = source_s
        self._kept = _KeptSets(folder)
        self._turns = WeakValueDictionary[str, asyncio.Lock]()
        """Locks of the digests whose files are being found or read."""

    async def folder(self, digest: str, sources: Sequence[FileSource]) -> Path:
        """Return a folder with the files of a model.

        Args:
            digest: the announced digest.
            sources: processes that provide the files. The router asks the last one last, the others in random order.

        Raises:
            Conflict, Overloaded, WorkerFailed: no source has provided the files. It is the error of the last source.
            ModelLoadError: there is no source, the digest is invalid, or the files cannot be written.
        """
        if not is_digest(digest):
            raise ModelLoadError(f"{digest[:100]!a} is no digest of a model's files")
        turn = self._turns.setdefault(digest, asyncio.Lock())
        async with turn:
            found = await _in_thread(lambda: self._kept.find(digest))
            if found is None:
                files = await self._read(digest, sources)
                found = await _in_thread(lambda: self._kept.keep(files))
        return found

    def release(self, digest: str) -> None:
        """Allow the removal of a folder; idempotent."""
        self._kept.release(digest)

    def close(self) -> None:
        """Release all folders, and remove the temporary one."""
        self._kept.close()

    async def _read(self, digest: str, sources: Sequence[FileSource]) -> ServingFiles:
        """Read the files from the first source that provides them. Raises the error of the last one."""
        if not sources:
            raise ModelLoadError("no worker and no controller provides the model's files; wait until one of them runs")
        *others, last = sources
        for source in random.sample(others, min(len(others), MAX_SOURCES - 1)):
            try:
                return await read_model_files(source, digest, link=self._link, timeout_s=self._source_s)
            except BatonError as error:
                logger.warning("%s; the next worker or controller is asked", error)
        return await read_model_files(last, digest, link=self._link, timeout_s=self._source_s)


async def _in_thread(function: Callable[[], T]) -> T:
    """Return the function's result. If the caller is cancelled, the function completes first."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    await seen_through(running)
    return running.result()


@dataclass(frozen=True, slots=True)
class _Held:
    """A set that this process uses."""

    folder: Path
    lock: BinaryIO
    """Open lock file. No process removes the set until it is closed."""


class _KeptSets:
    """The sets on the disk. Its methods may block; only one of them runs at a time for each digest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, _Held] = {}
        self._temporary = contextlib.ExitStack()
        self._own: Path | None = None
        """Temporary folder of this process; None: it has needed none."""

    def find(self, digest: str) -> Path | None:
        """Return the folder of a set that is in use here, or intact in the shared folder; None: there is none."""
        if (held := self._held.get(digest)) is not None:
            return held.folder
        try:
            make_own(self._folder)
            if not (self._folder / digest).is_dir():
                return None
            found = _locked(self._folder, digest)
        except OSError:
            return None  # `keep` logs why the folder cannot be used
        if not ServingFiles.is_kept(found.folder, digest):
            found.lock.close()
            return None
        self._held[digest] = found
        return found.folder

    def keep(self, files: ServingFiles) -> Path:
        """Write a set into the shared folder, or if that fails into the temporary one, and return its folder.

        Raises:
            ModelLoadError: it can be written to neither.
        """
        try:
            make_own(self._folder)
            return self._written(self._folder, files)
        except OSError as error:
            logger.warning("%s cannot be used, so a temporary folder is used instead: %s", self._folder, error)
        try:
            if self._own is None:
                self._own = self._temporary.enter_context(own_folder())
            return self._written(self._own, files)
        except OSError as error:
            raise ModelLoadError(
                f"a model's files cannot be written to {self._folder} or {tempfile.gettempdir()}: {error}"
            ) from error

    def release(self, digest: str) -> None:
        if (held := self._held.pop(digest, None)) is not None:
            held.lock.close()

    def close(self) -> None:
        for digest in list(self._held):
            self.release(digest)
        self._own = None
        self._temporary.close()

    def _written(self, folder: Path, files: ServingFiles) -> Path:
        held = _locked(folder, files.digest)
        try:
            files.write(held.folder)
        except BaseException:
            held.lock.close()
            raise
        self._held[files.digest] = held
        _remove_unused(folder)
        return held.folder


def _locked(folder: Path, digest: str) -> _Held:
    """Lock the set of a digest, which need not exist yet, against its removal.

    Raises:
        OSError: the lock file cannot be written, or another process keeps it locked.
    """
    path = folder / f"{digest}{IN_USE}"
    until_s = time.monotonic() + LOCK_S
    while True:
        lock = path.open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if _is_open(path, lock):
                os.utime(path)
                return _Held(folder / digest, lock)
            lock.close()  # another process has removed the set, and this file with it
        except BlockingIOError:
            lock.close()  # another process removes the set
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)
        except BaseException:
            lock.close()
            raise


def _remove_unused(folder: Path) -> None:
    """Remove the sets beyond the limits that were used least recently and that no process uses."""
    found = []
    for path in folder.glob(f"*{IN_USE}"):
        with contextlib.suppress(OSError):
            size = sum(each.lstat().st_size for each in _set_of(path).rglob("*"))
            found.append((path.stat().st_mtime_ns, path, size))
    num_bytes = 0
    for number, (_, path, size) in enumerate(sorted(found, reverse=True), start=1):
        num_bytes += size
        if number > MAX_SETS or num_bytes > MAX_KEPT_BYTES:
            with contextlib.suppress(OSError):  # such as: a process uses it
                _remove(path)


def _remove(path: Path) -> None:
    """Remove the set of a lock file. Raises OSError if a process uses it."""
    with path.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_open(path, lock):
            shutil.rmtree(_set_of(path), ignore_errors=True)
            path.unlink()


def _set_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(IN_USE))


def _is_open(path: Path, file: BinaryIO) -> bool:
    """Return whether the path still names the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False

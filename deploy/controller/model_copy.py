"""The controller's copy of the model's files, which routers read while no worker runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from baton.cluster import WorkerInfo
from baton.errors import BatonError, ModelLoadError
from baton.rpc.member_auth import MemberLink
from baton.rpc.model_files import FileSource, read_model_files
from baton.serving_files import ProvidedFiles, ServingFiles

logger = logging.getLogger(__name__)


class ModelCopy:
    """Copy of the model's files in a folder.

    Args:
        folder: the folder. It survives this process, and belongs to this controller alone.
        link: credentials for reading the files from workers.
    """

    def __init__(self, folder: Path, link: MemberLink) -> None:
        self._folder = folder
        self._link = link
        self._provided = ProvidedFiles()

    @property
    def digest(self) -> str:
        """Digest of the copied files; empty: there is no copy."""
        return self._provided.digest

    def read(self, digest: str) -> ServingFiles:
        """Return the files with this digest, from a thread. Raises Conflict if they are not here."""
        return self._provided.read(digest)

    async def open(self) -> None:
        """Use the copy of an earlier process, if it can be read."""
        if not self._folder.is_dir():
            return
        try:
            found = await asyncio.to_thread(lambda: ServingFiles.kept(self._folder).digest)
        except ModelLoadError as error:
            logger.warning("the copy of the model's files is not used: %s", error)
        else:
            self._provided = ProvidedFiles(self._folder, found, is_copy=True)

    async def fetch(self, digest: str, workers: Sequence[WorkerInfo]) -> None:
        """Copy the files with this digest from the first worker that provides them. Errors are logged."""
        for worker in workers:
            try:
                source = FileSource(worker.label, worker.address, worker.incarnation)
                files = await read_model_files(source, digest, link=self._link)
            except BatonError as error:
                logger.warning("the model's files are not copied: %s", error)
                continue
            try:
                await asyncio.to_thread(files.write, self._folder)
            except OSError as error:
                logger.warning("the model's files cannot be copied to %s: %s", self._folder, error)
                return
            self._provided = ProvidedFiles(self._folder, digest, is_copy=True)
            logger.debug("the model's files are copied from %s", worker.id)
            return

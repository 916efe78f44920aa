"""Reloads the tenants' file when it changes, so adding or revoking a key needs no restart.

Changes are detected by content, not by time stamp or inode: Kubernetes swaps a symlink two folders above a mounted
Secret, editors write in place, and tools rename a new file over the old one. New content is adopted after it was read
twice in a row, so a half-written file is not. An invalid file changes nothing: the previous entries stay in force.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from baton.config import RouterConfig
from baton.errors import ConfigError
from baton.telemetry.instruments import Instruments
from router.admission.tenants import TenantBook, version_of

logger = logging.getLogger(__name__)
POLL_S = 0.5
"""Pause between two reads; a change takes effect after two reads."""
UNREADABLE = b"unreadable"
"""Version of a file that cannot be read."""


class TenantsFile:
    """Keeps `book` up to date with `router.tenants_file`."""

    def __init__(self, config: RouterConfig, book: TenantBook, instruments: Instruments) -> None:
        self._config = config
        self._path = Path(config.tenants_file)
        self._book = book
        self._instruments = instruments
        self._seen = self._settled = book.version

    @staticmethod
    def load(config: RouterConfig) -> TenantBook:
        """Return the configured tenants.

        Raises:
            ConfigError: the file cannot be read, an entry is invalid, or names an unknown SLO class.
        """
        book = TenantBook.configured(config.tenants_file)
        for slo_class in book.slo_classes:
            config.slo_class(slo_class)
        return book

    async def run(self) -> None:
        """Poll the file until cancelled. Return at once if none is configured."""
        while self._config.tenants_file:
            await asyncio.sleep(POLL_S)
            await self.poll()

    async def poll(self) -> None:
        """Read the file once, in a thread: its disk may be slow, and its parsing long."""
        version = await asyncio.to_thread(_version_at, self._path)
        is_stable, self._seen = version == self._seen, version
        if not is_stable or version == self._settled:
            return
        self._settled = version
        try:
            book = await asyncio.to_thread(self.load, self._config)
        except ConfigError as error:
            logger.error("the tenants' file is invalid; the previous entries stay in force: %s", error)
            self._instruments.tenants_file_reads.add(1, {"outcome": "refused"})
            return
        self._settled = book.version
        self._book.adopt(book)
        logger.info("the tenants' file has changed; its entries are in force")
        self._instruments.tenants_file_reads.add(1, {"outcome": "adopted"})


def _version_at(path: Path) -> bytes:
    try:
        return version_of(path.read_bytes())
    except OSError:
        return UNREADABLE

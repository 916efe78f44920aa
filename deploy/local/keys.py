"""Files of keys for the members of a cluster, derived from its secret."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from baton.errors import ConfigError
from baton.trust import Principal, draw_secret, member_file, read_private, write_private

FOLLOW_S = 2.0
"""How often a followed secret is looked at, in seconds."""
IN_ORDER = (Principal.WORKER, Principal.CONTROLLER, Principal.ROUTER, Principal.OPERATOR)
"""The members, those that are called first: a new key signs once those who check it have it."""
logger = logging.getLogger(__name__)


def write_keys(secret: Path, out: Path, member: Principal) -> None:
    """Writes a member's file of keys.

    Raises:
        ConfigError: the secret cannot be read, others may read it, it is none, or the file cannot be written.
    """
    FollowedSecret(secret, {member: out}).write()


def follow_secret(secret: Path, out: Path, member: Principal) -> None:
    """Writes a member's file of keys, and again whenever the secret changes, until the process ends.

    A wrong secret changes nothing.

    Raises:
        ConfigError: at first, as `write_keys` raises it.
    """
    followed = FollowedSecret(secret, {member: out})
    followed.write()
    while True:
        time.sleep(FOLLOW_S)
        followed.look()


def member_files(secret: str, folder: Path) -> FollowedSecret:
    """Writes a file of keys for each member of a cluster of this machine.

    Args:
        secret: file with the cluster's secret; empty: one is drawn, which only this process has.
        folder: private to this user.

    Raises:
        ConfigError: the secret cannot be read, or is none.
    """
    files = {member: folder / f"{member}.keys" for member in Principal}
    followed = FollowedSecret(Path(secret) if secret else None, files)
    followed.write()
    return followed


class FollowedSecret:
    """A cluster's secret, and the files of members that are derived from it.

    Attributes:
        files: where the files of members are, or will be.

    Args:
        secret: file with the secret; None: one is drawn.
    """

    def __init__(self, secret: Path | None, files: Mapping[Principal, Path]) -> None:
        self.files = files
        self._secret = secret
        self._drawn = "" if secret else draw_secret()
        self._written = ""
        self._complaint = ""

    def write(self) -> None:
        """Writes the files if the secret has changed since the last time, or one of them is gone.

        Raises:
            ConfigError: the secret cannot be read, others may read it, it is none, or a file cannot be written.
        """
        text = read_private(self._secret) if self._secret else self._drawn
        if text == self._written and all(path.exists() for path in self.files.values()):
            return
        written = {member: member_file(text, member, str(self._secret)) for member in self.files}
        for member in IN_ORDER:
            if member in written:
                write_private(self.files[member], written[member])
        self._written = text

    def look(self) -> None:
        """Does the same. A wrong secret changes nothing, and is reported once."""
        try:
            self.write()
            self._complaint = ""
        except ConfigError as error:
            if str(error) != self._complaint:
                logger.error("%s; the last good keys stay", error)
            self._complaint = str(error)

    async def keep(self) -> None:
        """Keeps the files up to date until cancelled; what cleans temporary folders may take them."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            self.look()

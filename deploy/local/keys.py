"""Key files for the members of a cluster, derived from its secret."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from baton.errors import ConfigError
from baton.trust import Principal, draw_secret, member_file, read_private, write_private

FOLLOW_S = 2.0
"""Interval at which a followed secret is checked, in seconds."""
IN_ORDER = (Principal.WORKER, Principal.CONTROLLER, Principal.ROUTER, Principal.OPERATOR)
"""Order in which members get a new key. A member that is called gets it before the members that call it, because it
must be able to verify the key before they sign with it."""
logger = logging.getLogger(__name__)


def write_keys(secret: Path, out: Path, member: Principal) -> None:
    """Write a member's key file.

    Raises:
        ConfigError: the secret cannot be read, is readable by others, or is invalid, or the file cannot be written.
    """
    FollowedSecret(secret, {member: out}).write()


def follow_secret(secret: Path, out: Path, member: Principal) -> None:
    """Write a member's key file, and rewrite it whenever the secret changes, until the process ends.

    An invalid new secret is ignored.

    Raises:
        ConfigError: the first write fails, as for `write_keys`.
    """
    followed = FollowedSecret(secret, {member: out})
    followed.write()
    while True:
        time.sleep(FOLLOW_S)
        followed.look()


def member_files(secret: str, folder: Path) -> FollowedSecret:
    """Write a key file for each member of a cluster on this machine.

    Args:
        secret: file with the cluster's secret; empty: generate a secret, which only this process has.
        folder: folder for the key files, private to this user.

    Raises:
        ConfigError: the secret cannot be read, or is invalid.
    """
    files = {member: folder / f"{member}.keys" for member in Principal}
    followed = FollowedSecret(Path(secret) if secret else None, files)
    followed.write()
    return followed


class FollowedSecret:
    """Secret of a cluster, and the members' key files that are derived from it.

    Attributes:
        files: path of each member's key file.

    Args:
        secret: file with the secret; None: generate a secret.
        files: path of each member's key file.
    """

    def __init__(self, secret: Path | None, files: Mapping[Principal, Path]) -> None:
        self.files = files
        self._secret = secret
        self._drawn = "" if secret else draw_secret()
        self._written = ""
        self._complaint = ""

    def write(self) -> None:
        """Write the files if the secret has changed since the last call, or if one of them is missing.

        Raises:
            ConfigError: the secret cannot be read, is readable by others, or is invalid, or a file cannot be written.
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
        """Call `write`. An invalid secret changes nothing, and is logged once."""
        try:
            self.write()
            self._complaint = ""
        except ConfigError as error:
            if str(error) != self._complaint:
                logger.error("%s; the last good keys stay", error)
            self._complaint = str(error)

    async def keep(self) -> None:
        """Keep the files up to date until cancelled. A cleaner of temporary folders may delete them meanwhile."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            self.look()

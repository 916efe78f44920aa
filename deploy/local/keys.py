"""Files of keys for the members of a cluster, derived from its secret."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from baton.errors import ConfigError
from baton.trust import Principal, draw_secret, member_file, read_private, write_private

FOLLOW_S = 2.0
"""How often a followed secret is looked at, in seconds."""
logger = logging.getLogger(__name__)


def write_keys(secret: Path, out: Path, member: Principal) -> None:
    """Writes a member's file of keys.

    Raises:
        ConfigError: the secret cannot be read, others may read it, it is none, or the file cannot be written.
    """
    write_private(out, member_file(read_private(secret), member, str(secret)))


def follow_secret(secret: Path, out: Path, member: Principal) -> None:
    """Writes the file again whenever the secret changes, until the process ends. A wrong secret changes nothing."""
    written = member_file(read_private(secret), member, str(secret))
    complaint = ""
    while True:
        time.sleep(FOLLOW_S)
        try:
            text = member_file(read_private(secret), member, str(secret))
            if text != written:
                write_private(out, text)
                written = text
            complaint = ""
        except ConfigError as error:
            if str(error) != complaint:
                logger.error("%s; the last good keys stay", error)
            complaint = str(error)


def member_files(secret: str, folder: Path) -> dict[Principal, Path]:
    """Writes a file of keys for each member of a cluster of this machine, and returns where.

    Args:
        secret: file with the cluster's secret; empty: one is drawn, and kept nowhere.
        folder: private to this user.

    Raises:
        ConfigError: the secret cannot be read, or is none.
    """
    text = read_private(Path(secret)) if secret else draw_secret()
    files = {member: folder / f"{member}.keys" for member in Principal}
    for member, path in files.items():
        write_private(path, member_file(text, member, secret))
    return files

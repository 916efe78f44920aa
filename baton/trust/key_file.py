"""File of keys on this machine, read again when it changes."""

from __future__ import annotations

import logging
import os
import stat
import time
from pathlib import Path

from baton.errors import ConfigError
from baton.trust.keys import MAX_FILE_BYTES, KeyRing, Principal, load_keys

CHECK_S = 1.0
"""Interval at which the file is checked, in seconds."""
KEPT_S = 10.0
"""Time for which removed keys stay valid, in seconds: other processes have yet to read their files again."""
logger = logging.getLogger(__name__)


class KeyFile:
    """Keys of one member, kept up to date with the file at `path`.

    When the file changes, its former keys stay valid for `KEPT_S`, but no longer sign. If the file becomes unreadable
    or invalid, the last good keys stay in use, and one log line reports it.

    Attributes:
        principal: the member.

    Raises:
        ConfigError: at creation the file cannot be read, is invalid, may be accessed by users other than its owner and
            group, or may be written by its group.
    """

    def __init__(self, path: str | Path, member: Principal) -> None:
        self.principal = member
        self._path = Path(path)
        self._seen = self._signature()
        self._in_file = self._keys = self._load()
        self._checked_s = self._changed_s = time.monotonic()

    @property
    def keys(self) -> KeyRing:
        """Return the current keys. Checks the file at most every `CHECK_S` seconds."""
        now = time.monotonic()
        if now - self._checked_s >= CHECK_S:
            self._read_again(now)
        if self._keys is not self._in_file and now - self._changed_s >= KEPT_S:
            self._keys = self._in_file
        return self._keys

    def verify(self, purpose: str, member: Principal, message: bytes, signature: bytes) -> bool:
        """Return whether that member signed the message for that purpose, with keys that the file has now."""
        if self.keys.verify(purpose, member, message, signature):
            return True
        self._read_again(time.monotonic())  # the signer may have read the file before this process
        return self._keys.verify(purpose, member, message, signature)

    def _read_again(self, now: float) -> None:
        self._checked_s = now
        seen = self._signature()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            found = self._load()
        except ConfigError as error:
            logger.error("%s; the last good keys stay", error)
            return
        self._in_file, self._keys, self._changed_s = found, found.beside(self._in_file), now
        logger.info("the keys in %s have changed; the new ones count", self._path)

    def _signature(self) -> tuple[int, ...]:
        """Return a value that changes with the file: Kubernetes replaces a link above it, editors the file itself."""
        try:
            found = self._path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_dev, found.st_mtime_ns, found.st_size

    def _load(self) -> KeyRing:
        return load_keys(read_private(self._path), self.principal, str(self._path))


def open_keys(path: str, principal: Principal) -> KeyFile | None:
    """Return the keys in the file that `cluster.secret` names; None if it is empty.

    Raises:
        ConfigError: as in `KeyFile`.
    """
    return KeyFile(path, principal) if path else None


def read_private(path: Path) -> str:
    """Return the text of a key file.

    Raises:
        ConfigError: it cannot be read, every user may read or its group may write it, or it is far too long.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {path}: {error.strerror}") from error
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise ConfigError(f"users other than its owner may read or write {path}; run chmod 600 {path}")
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a key file: it is not ASCII text") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is not a key file: it has more than {MAX_FILE_BYTES} bytes")
    return text


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, in one step: a reader sees the old text or the new one.

    Raises:
        ConfigError: it cannot be written.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the keys to {path}: {error.strerror}") from error

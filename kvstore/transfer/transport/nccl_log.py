"""Path that carries the bytes of a communicator, which NCCL reports only in its log: NVLink, PCIe, InfiniBand, sockets.

A connection over sockets works at a tenth of the speed, and nothing else shows it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from baton.own_folder import own_folder

UNKNOWN = "unknown"
_CARRIER = re.compile(r"\bvia (P2P|SHM|NET/\w+)")
_MAX_BYTES = 2**20


@contextlib.contextmanager
def private_log() -> Iterator[dict[str, str]]:
    """Yield the environment with which NCCL logs into a new private folder, which is removed afterwards.

    It must be set before NCCL's first call. It is empty if the user has already requested a log.
    """
    if "NCCL_DEBUG" in os.environ or "NCCL_DEBUG_FILE" in os.environ:
        yield {}
        return
    with own_folder() as folder:  # a folder that a killed worker has left is removed when the next one starts
        file = folder / "nccl-%p.log"
        yield {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET", "NCCL_DEBUG_FILE": str(file)}


def nccl_log() -> Path | None:
    """Return the file into which NCCL logs in this process; None if it does not log, or the file is unknown."""
    pattern = os.environ.get("NCCL_DEBUG_FILE", "")
    return Path(pattern.replace("%p", str(os.getpid()))) if pattern and "%h" not in pattern else None


def length_of(log: Path | None) -> int:
    """Return the size of NCCL's log, in bytes."""
    try:
        return log.stat().st_size if log is not None else 0
    except OSError:
        return 0


def carrier_since(log: Path | None, start: int) -> str:
    """Return the path that carries the bytes of the communicator created since the log was `start` bytes long.

    For example `P2P`, `SHM`, `NET/IB` or `NET/Socket`; of several, the last that was logged. UNKNOWN if NCCL logged
    none.
    """
    if log is None:
        return UNKNOWN
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return UNKNOWN
    found = _CARRIER.findall(text)
    return found[-1] if found else UNKNOWN

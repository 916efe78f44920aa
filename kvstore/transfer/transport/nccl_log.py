"""What moves the bytes of a communicator, which NCCL says only in its log: NVLink or PCIe, InfiniBand, sockets.

A pair whose bytes go over sockets works, and is a tenth as fast: it shows nowhere else.
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
    """Yields the environment in which NCCL logs into a new folder, which nobody else may read and which is removed.

    It has to be set before NCCL's first call. It is empty where the user has asked for a log already.
    """
    if "NCCL_DEBUG" in os.environ or "NCCL_DEBUG_FILE" in os.environ:
        yield {}
        return
    with own_folder() as folder:  # one that a killed worker has left goes when the next one starts
        file = folder / "nccl-%p.log"
        yield {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET", "NCCL_DEBUG_FILE": str(file)}


def nccl_log() -> Path | None:
    """Returns the file into which NCCL logs in this process; None if it is not asked to, or not known."""
    pattern = os.environ.get("NCCL_DEBUG_FILE", "")
    return Path(pattern.replace("%p", str(os.getpid()))) if pattern and "%h" not in pattern else None


def length_of(log: Path | None) -> int:
    """Returns how much NCCL has logged, in bytes."""
    try:
        return log.stat().st_size if log is not None else 0
    except OSError:
        return 0


def carrier_since(log: Path | None, start: int) -> str:
    """Returns what moves the bytes of the communicator that was made since the log was `start` bytes long.

    Such as `P2P`, `SHM`, `NET/IB` or `NET/Socket`; of several, the last that was logged. UNKNOWN if NCCL logged none.
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

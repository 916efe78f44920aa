"""Inner end of a sandbox: a process that answers questions about untrusted texts of a client or a model's folder.

Such texts are programs, or become programs: some never end, some exhaust the memory, some crash the process. So each
question has a limit on its processor time, and the process has one on its memory. `router.prompt.sandboxes` is the
outer end, which starts and ends processes.

Question and answer are one frame each on one socket, the process' standard input: a byte with the kind of the answer,
the number of bytes that follow, and these bytes.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from baton.errors import InvalidRequest
from baton.parent import die_with

HEADER = struct.Struct(">BI")
"""Head of a frame: kind and number of bytes. A question's kind is ANSWERED."""


class ReplyKind(IntEnum):
    """Outcome of a question."""

    ANSWERED = 0
    REFUSED = 1
    """The answer is a sentence that says why the question is invalid."""
    TOO_DEEP = 2
    """The question needs a deeper stack than is available."""
    EXHAUSTED = 3
    """The question needs more memory than the process may have; the process ends."""
    TOO_LONG = 4
    """The process was ended: the question exceeded its processor time."""
    FATAL = 5
    """The question has crashed the process."""
    LATE = 6
    """The process was ended: it did not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits on the questions of a sandbox."""

    set_up_s: float
    """Processor seconds of the first frame."""
    cpu_s: float
    """Processor seconds of a question."""
    memory_bytes: int
    """Memory of the process in addition to its memory at the start. Only Linux enforces this."""


def serve(
    parent: int, limits: SandboxLimits, set_up: Callable[[bytes], None], answer: Callable[[bytes], bytes]
) -> None:
    """Answer one question after the other, until the outer end closes the socket.

    Args:
        parent: the process that has started this one, and with which it ends.
        set_up: takes the first frame, which configures the process.
        answer: takes all others. Both raise InvalidRequest for an invalid frame.
    """
    die_with(parent)
    _limit_memory(limits.memory_bytes)
    connection = socket.socket(fileno=os.dup(sys.stdin.fileno()))

    def first(setup: bytes) -> bytes:
        set_up(setup)
        return b""

    takes: Callable[[bytes], bytes] = first
    cpu_s, kind = limits.set_up_s, ReplyKind.ANSWERED
    while kind is not ReplyKind.EXHAUSTED and (head := _received(connection, HEADER.size)):
        _, num_bytes = HEADER.unpack(head)
        question = _received(connection, num_bytes)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends the process in any state
        kind, text = _answered(takes, question)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        connection.sendall(HEADER.pack(kind, len(text)) + text)
        takes, cpu_s = answer, limits.cpu_s


def _answered(answer: Callable[[bytes], bytes], question: bytes) -> tuple[ReplyKind, bytes]:
    try:
        return ReplyKind.ANSWERED, answer(question)
    except InvalidRequest as refusal:
        return ReplyKind.REFUSED, str(refusal).encode(errors="backslashreplace")
    except RecursionError:
        return ReplyKind.TOO_DEEP, b""
    except MemoryError:
        return ReplyKind.EXHAUSTED, b""


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    """Return this many bytes; fewer if the outer end has closed the socket."""
    received = bytearray()
    while len(received) < num_bytes and (piece := connection.recv(min(num_bytes - len(received), 2**20))):
        received += piece
    return bytes(received)


def _limit_memory(num_bytes: int) -> None:
    if sys.platform != "linux":
        return
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + num_bytes, taken + num_bytes))

"""Memory management of serving processes.

A full garbage collection would stop every stream for a tenth of a second, and memory that a start has used and freed
would stay with the C library.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import resource
from pathlib import Path

THRESHOLDS = (20_000, 20, 20)
"""Python's default of 700 new objects makes the collector run several times per request.

Reference counts free what a request leaves behind; cycles, mostly of exceptions, may wait.
"""
LOOK_S, LONGEST_LOOK_S = 1.0, 16.0
"""Pauses between two checks of the memory; each doubles while there is nothing to return."""
GROWTH_BYTES = 8 * 2**20
_M_ARENA_MAX = -8
"""The C library's parameter for the number of heaps."""


def share_heap() -> None:
    """Make all threads allocate from one heap, if the C library supports that. Call this while there is one thread.

    With several heaps, memory that is freed in one is not available to the others.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def collect_seldom() -> None:
    """Make the collector run rarely from now on.

    Called before the imports of a process, this saves a tenth of their time, since nearly all objects created then
    stay.
    """
    gc.set_threshold(*THRESHOLDS)


def keep_modules() -> None:
    """Exclude the imported modules from garbage collection, whose scan would take a tenth of a second of a start.

    Call this after the imports of a process, which leave almost nothing to collect.
    """
    gc.freeze()


def keep_what_is_loaded() -> None:
    """Exclude all present objects from garbage collection: modules and models stay permanently.

    Call this before serving starts. Freed memory is returned to the system, if the C library supports that.
    """
    gc.collect()
    give_back()
    gc.freeze()
    collect_seldom()


def give_back() -> None:
    """Return freed memory to the system, if the C library supports that.

    Takes some milliseconds, in which other threads run unless they need memory.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


async def keep_small() -> None:
    """Return memory to the system while the process is larger than it has been, until cancelled.

    Otherwise, memory that a long request has used for a moment stays with the C library. Memory in use cannot be
    returned yet, so this checks repeatedly.
    """
    least, pause_s = _resident_bytes(), LOOK_S
    while True:
        await asyncio.sleep(pause_s)
        least = min(least, before := _resident_bytes())
        if before <= least + GROWTH_BYTES:
            pause_s = LOOK_S
            continue
        await asyncio.to_thread(give_back)
        has_given = before - _resident_bytes() >= GROWTH_BYTES
        pause_s = LOOK_S if has_given else min(2 * pause_s, LONGEST_LOOK_S)


def _resident_bytes() -> int:
    """Return the bytes of the process in main memory; 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except FileNotFoundError:
        return 0

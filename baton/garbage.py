"""Memory in processes that serve: a full garbage collection would stop every stream for a tenth of a second, and what a
start has needed and freed would stay with the C library.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import resource
from pathlib import Path

THRESHOLDS = (20_000, 20, 20)
"""Python's own, 700 new objects, has the collector run several times a request. What a request leaves behind is freed
by its reference counts; cycles, of exceptions mostly, may wait."""
LOOK_S, LONGEST_LOOK_S = 1.0, 16.0
"""Pauses between two looks at the memory; each is twice the one before while there is nothing to give back."""
GROWTH_BYTES = 8 * 2**20
_M_ARENA_MAX = -8
"""The C library's number for the number of heaps."""


def share_heap() -> None:
    """Has all threads take memory from one heap, where the C library can do that: of several, each keeps from the
    others what has been freed in it. To be called while there is one thread.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def collect_seldom() -> None:
    """Has the collector run seldom from now on. Called before the imports of a process, it saves a tenth of their time,
    in which nearly everything that is made stays.
    """
    gc.set_threshold(*THRESHOLDS)


def keep_modules() -> None:
    """Has the collector never look again at what has been imported, which would take it a tenth of a second of a start.
    To be called after the imports of a process, which leave next to nothing to collect.
    """
    gc.freeze()


def keep_what_is_loaded() -> None:
    """Has the collector never look again at what there is now: modules and models stay for good. To be called before
    anything is served. What has been freed goes back to the system, where the C library can do that.
    """
    gc.collect()
    give_back()
    gc.freeze()
    collect_seldom()


def give_back() -> None:
    """Gives what has been freed back to the system, where the C library can do that. Takes some milliseconds, in which
    other threads run unless they need memory.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


async def keep_small() -> None:
    """Gives memory back while the process is larger than it has been, until cancelled: what a long request has needed
    for a moment stays with the C library otherwise. What is in use cannot be given back yet, so it looks again.
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
    """Bytes of the process in main memory; 0: the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except FileNotFoundError:
        return 0

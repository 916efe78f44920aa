"""Memory in processes that serve: a full garbage collection would stop every stream for a tenth of a second, and what a
start has needed and freed would stay with the C library.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc

THRESHOLDS = (20_000, 20, 20)
"""Python's own, 700 new objects, has the collector run several times a request. What a request leaves behind is freed
by its reference counts; cycles, of exceptions mostly, may wait."""


def keep_what_is_loaded() -> None:
    """Has the collector never look again at what there is now: modules and models stay for good. To be called before
    anything is served. What has been freed goes back to the system, where the C library can do that.
    """
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)

"""Collections of garbage that do not look at what was there before: in a process of many tests that takes long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_objects_are_collected() -> Iterator[None]:
    """Collect objects that are garbage already, and do not look at the others again, in later tests either."""
    gc.collect()
    gc.freeze()
    yield

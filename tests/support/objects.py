"""Collections of garbage that do not look at what was there before: in a process of many tests that takes long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_objects_are_collected() -> Iterator[None]:
    """Objects that are there before are collected first, where they are garbage, and not looked at again."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

"""What is loaded before a process serves costs the garbage collector nothing afterwards."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CYCLE = """
class Cycle:
    def __init__(self):
        self.itself = self

left = weakref.ref(Cycle())
assert left() is not None
"""
PROGRAM = f"""
import gc, weakref
from baton.garbage import THRESHOLDS, keep_what_is_loaded

loaded = [[] for _ in range(100_000)]
{CYCLE}
keep_what_is_loaded()
kept = gc.get_freeze_count()
assert kept > 100_000, kept
assert len(gc.get_objects()) < 1000
assert gc.get_threshold() == THRESHOLDS
assert left() is None, "a cycle was kept for good"
"""


def test_what_is_loaded_is_kept_and_garbage_is_not() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


MODULES = f"""
import gc, weakref
from baton.garbage import keep_modules, keep_what_is_loaded

keep_modules()
assert len(gc.get_objects()) < 100
{CYCLE}
keep_what_is_loaded()
assert left() is None, "what was made after the imports was kept for good"
"""


def test_modules_are_kept_and_not_what_a_start_leaves() -> None:
    subprocess.run([sys.executable, "-c", MODULES], check=True, timeout=60)


PROCESS = """
import gc, runpy, sys
import {package}.process

{package}.process.main = lambda: sys.exit(0 if gc.get_freeze_count() > 10_000 else "its modules are looked at again")
runpy.run_module("{package}", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", ["worker", "router"])
def test_processes_that_serve_keep_their_modules(package: str) -> None:
    subprocess.run([sys.executable, "-c", PROCESS.format(package=package)], check=True, timeout=60)


FREEING = """
import ctypes
import psutil
from baton.garbage import keep_what_is_loaded

library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
places = [library.malloc(64_000) for _ in range(2_000)]
for place in places:
    ctypes.memset(place, 1, 64_000)
for place in places[:-1]:  # the last one holds the end of the heap, at which alone the library looks by itself
    library.free(place)
before = psutil.Process().memory_info().rss
keep_what_is_loaded()
given_back = before - psutil.Process().memory_info().rss
assert given_back > 100e6, given_back
"""


LATE = """
import asyncio
import ctypes
import psutil
from baton import garbage

garbage.LOOK_S = garbage.LONGEST_LOOK_S = 0.02
looks, give_back = [], garbage.give_back
garbage.give_back = lambda: (looks.append(1), give_back())
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
resident = lambda: psutil.Process().memory_info().rss

async def main():
    keeping = asyncio.create_task(garbage.keep_small())
    await asyncio.sleep(0)  # it has begun
    before = resident()
    places = [library.malloc(64_000) for _ in range(2_000)]
    for place in places:
        ctypes.memset(place, 1, 64_000)
    async with asyncio.timeout(20):
        while len(looks) < 2:  # nothing can be given back yet
            await asyncio.sleep(0.02)
    assert resident() > before + 100e6
    for place in places[:-1]:
        library.free(place)
    async with asyncio.timeout(20):
        while resident() > before + 30e6:
            await asyncio.sleep(0.02)
    keeping.cancel()

asyncio.run(main())
"""
NEEDS_GLIBC = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the C library is not glibc, whose heaps are looked at"
)


@NEEDS_GLIBC
def test_what_is_freed_after_a_look_goes_back_as_well() -> None:
    subprocess.run([sys.executable, "-c", LATE], check=True, timeout=60)


@NEEDS_GLIBC
def test_what_has_been_freed_goes_back_to_the_system() -> None:
    subprocess.run([sys.executable, "-c", FREEING], check=True, timeout=60)


HEAPS = """
import ctypes
import threading
from baton.garbage import share_heap

share_heap()
library = ctypes.CDLL(None)  # which lets other threads run, as the interpreter's own calls of it do not
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
all_are_here = threading.Barrier(5)

def take() -> None:
    place = library.malloc(50_000)
    all_are_here.wait()
    all_are_here.wait()
    library.free(place)

threads = [threading.Thread(target=take) for _ in range(4)]
for thread in threads:
    thread.start()
all_are_here.wait()
library.malloc_info(0, ctypes.c_void_p.in_dll(library, "stdout"))
library.fflush(None)
all_are_here.wait()
"""


@NEEDS_GLIBC
def test_threads_share_a_heap() -> None:
    said = subprocess.run([sys.executable, "-c", HEAPS], check=True, timeout=60, capture_output=True, text=True).stdout
    assert said.count("<heap nr=") == 1

"""Structures are checked beside the event loop, by a process that may hang or die of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from baton.errors import InvalidRequest, Overloaded
from baton.structure import StructuredOutputs
from router.prompt import StructureChecker
from router.prompt import structure as structure_module
from tests.support.waiting import wait_until

GOOD = StructuredOutputs(regex="[a-z]+")
ENDLESS = StructuredOutputs(
    json=json.dumps({"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(1, 60)]})
)


@pytest.fixture
def checker(model_dir: Path) -> Iterator[StructureChecker]:
    found = StructureChecker(model_dir / "tokenizer.json", 49152, (2,))
    yield found
    found.close()
    assert compilers() == []


def compilers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "baton.grammar" in child.cmdline()]


async def test_what_is_good_passes_and_what_is_not_is_refused_again(checker: StructureChecker) -> None:
    await checker.check(None)
    assert compilers() == [], "most routers never need one"
    await checker.check(GOOD)
    (compiler,) = compilers()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="regex parse error") as refusal:
            await checker.check(StructuredOutputs(regex="("))
        assert refusal.value.param == "structured_outputs"
    await checker.check(StructuredOutputs(choice=("a", "größer\n")))
    assert compilers() == [compiler]


async def test_compiling_without_an_end_is_ended(checker: StructureChecker) -> None:
    await checker.check(GOOD)
    (first,) = compilers()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="takes more than 1 s to compile"):
            await checker.check(ENDLESS)
        assert not first.is_running()
        assert compilers() == [], "it is not compiled again"
    await checker.check(StructuredOutputs(regex="b"))
    assert len(compilers()) == 1


async def test_a_compiler_that_dies_takes_nobody_along(
    checker: StructureChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check(GOOD)
    waits, is_readable = threading.Event(), structure_module._is_readable

    def tell(stream: IO[str], within_s: float) -> bool:
        waits.set()
        return is_readable(stream, within_s)

    monkeypatch.setattr(structure_module, "_is_readable", tell)
    (compiler,) = compilers()
    compiler.suspend()
    checking = asyncio.create_task(checker.check(StructuredOutputs(regex="c")))
    await asyncio.to_thread(waits.wait, 10)  # it has been asked
    os.kill(compiler.pid, signal.SIGKILL)
    with pytest.raises(InvalidRequest, match="it ends the compiler"):
        await checking
    await checker.check(StructuredOutputs(regex="d"))
    (compiler,) = compilers()
    compiler.kill()
    wait_until(lambda: compiler.status() == psutil.STATUS_ZOMBIE)
    await checker.check(StructuredOutputs(regex="e"))


async def test_the_event_loop_goes_on_meanwhile(checker: StructureChecker) -> None:
    await checker.check(GOOD)
    (compiler,) = compilers()
    compiler.suspend()  # as one that is busy for long
    checking = asyncio.create_task(checker.check(StructuredOutputs(regex="f")))
    began_s, num_turns = time.monotonic(), 0
    while not checking.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 50
    assert time.monotonic() - began_s >= 1.0
    with pytest.raises(InvalidRequest, match="takes more than 1 s"):
        await checking


async def test_who_waits_too_long_is_told_to_come_back(
    checker: StructureChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checker.check(GOOD)
    monkeypatch.setattr(structure_module, "WAIT_S", 0.2)
    (compiler,) = compilers()
    compiler.suspend()
    busy = asyncio.create_task(checker.check(StructuredOutputs(regex="g")))
    await asyncio.sleep(0)  # it is the first to be asked
    with pytest.raises(Overloaded, match="many structures wait"):
        await checker.check(StructuredOutputs(regex="h"))
    with pytest.raises(Overloaded):
        await busy


async def test_a_tokenizer_that_cannot_be_read_is_no_reason_to_come_back(model_dir: Path) -> None:
    checker = StructureChecker(model_dir / "tokenizer.json", 8, (2,))
    with pytest.raises(InvalidRequest, match="vocab size too small"):
        await checker.check(GOOD)
    checker.close()


async def test_what_is_kept_of_verdicts_is_bounded(checker: StructureChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure_module, "MAX_KNOWN", 3)
    for letter in "abcdefgha":
        await checker.check(StructuredOutputs(regex=letter))
    assert len(checker._known) == 3

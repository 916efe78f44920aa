"""Structures are checked beside the event loop, by processes that may hang or die of them; tenants take turns."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.errors import InvalidRequest, Overloaded
from baton.structure import LARK_HEAD, StructuredOutputs, json_rule, schemas_of
from baton.tasks import cancel_and_wait
from router.prompt import StructureChecker, sandboxes
from router.prompt import sequence as structure_module
from tests.support.waiting import until, wait_until

GOOD = StructuredOutputs(regex="[a-z]+")
ENDLESS = StructuredOutputs(
    json=json.dumps({"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(1, 60)]})
)


@pytest.fixture
def checker(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StructureChecker]:
    for name in ("WAIT_S", "ANSWER_S"):
        monkeypatch.setattr(sandboxes, name, 100.0)  # however busy the machine is
    found = StructureChecker(model_dir / "tokenizer.json", 49152, (2,))
    yield found
    found.close()
    assert compilers() == []


def compilers() -> list[psutil.Process]:
    found = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in found if "baton.grammar" in child.cmdline()]


async def test_what_is_good_passes_and_what_is_not_is_refused_again(checker: StructureChecker) -> None:
    await checker.check(None, "a")
    assert compilers() == [], "most routers never need one"
    await checker.check(GOOD, "a")
    (compiler,) = compilers()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="regex parse error") as refusal:
            await checker.check(StructuredOutputs(regex="("), "a")
        assert refusal.value.param == "structured_outputs"
    await checker.check(StructuredOutputs(choice=("a", "größer\n")), "a")
    assert compilers() == [compiler]


async def test_what_cannot_be_enforced_is_left_out_of_loose_schemas_alone(checker: StructureChecker) -> None:
    schema = {"type": "string", "pattern": "^(?!a)b"}
    place = "tools[0].function.parameters"
    loose, strict = (
        StructuredOutputs(grammar=f"{LARK_HEAD}\nstart: {json_rule(schema, place, is_loose=is_loose)}")
        for is_loose in (True, False)
    )
    for _ in range(2):
        served = await checker.check(loose, "a")
        assert served is not None
        assert [dict(each.schema).get("pattern") for each in schemas_of(served)] == [None]
        with pytest.raises(
            InvalidRequest, match=r"^tools\[0\]\.function\.parameters: pattern cannot be enforced"
        ) as refusal:
            await checker.check(strict, "a")
        assert refusal.value.param == place
    assert await checker.check(GOOD, "a") is GOOD


async def test_the_schema_of_a_loose_tool_that_is_too_costly_is_left_out(checker: StructureChecker) -> None:
    costly = {"type": "object", "properties": {"a": json.loads(ENDLESS.json)}, "required": ["a"]}
    place = "tools[0].function.parameters"
    loose, strict = (
        StructuredOutputs(grammar=f"{LARK_HEAD}\nstart: {json_rule(costly, place, is_loose=is_loose)}")
        for is_loose in (True, False)
    )
    for _ in range(2):
        served = await checker.check(loose, "a")
        assert served is not None
        assert [each.schema.get("properties", "gone") for each in schemas_of(served)] == ["gone"]
        with pytest.raises(InvalidRequest, match=r"^tools\[0\].*: this schema cannot .*takes more than 1 s") as refusal:
            await checker.check(strict, "a")
        assert refusal.value.param == place


def endless(number: int) -> StructuredOutputs:
    """A structure that is too costly, and another one for each number."""
    return StructuredOutputs(json=ENDLESS.json + " " * number)


async def test_compiling_without_an_end_is_ended(checker: StructureChecker) -> None:
    await checker.check(GOOD, "a")
    (first,) = compilers()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="takes more than 1 s to compile"):
            await checker.check(ENDLESS, "a")
        assert not first.is_running()
    await until(lambda: len(compilers()) == 2)  # there is another one in its place before anybody asks, and a spare one
    others = compilers()
    with pytest.raises(InvalidRequest, match="takes more than 1 s to compile"):
        await checker.check(ENDLESS, "a")
    await checker.check(StructuredOutputs(regex="b"), "a")
    assert compilers() == others, "what is known to be too costly is refused at once"


async def test_no_tenants_structures_hold_up_anothers(checker: StructureChecker) -> None:
    costly = [asyncio.create_task(checker.check(endless(number), "a")) for number in range(16)]
    await until(lambda: len(compilers()) == 1)
    for number in range(3):
        await checker.check(StructuredOutputs(regex=f"b{number}"), "b")
        num_done = sum(task.done() for task in costly)
        assert num_done < 3, f"{num_done} of 16 came first"
    assert len(compilers()) <= 2
    await cancel_and_wait(costly)


@pytest.mark.slow
async def test_the_same_costly_structure_many_times_at_once_costs_once(checker: StructureChecker) -> None:
    await checker.check(GOOD, "a")
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    results = await asyncio.gather(*(checker.check(ENDLESS, "a") for _ in range(20)), return_exceptions=True)
    assert all("takes more than 1 s" in str(result) for result in results), results
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s < 5, "20 of them take 20 s"


async def test_what_one_tenant_asks_for_says_nothing_of_it_to_another(checker: StructureChecker) -> None:
    await checker.check(GOOD, "a")
    (compiler,) = compilers()
    compiler.kill()
    wait_until(lambda: compiler.status() == psutil.STATUS_ZOMBIE)
    await checker.check(GOOD, "a")
    assert compilers() == [], "it is known"
    await checker.check(GOOD, "b")
    assert len(compilers()) == 1, "it is compiled for this tenant, too"


async def test_who_leaves_keeps_the_turn_until_the_compiler_is_done(checker: StructureChecker) -> None:
    await checker.check(GOOD, "a")
    (compiler,) = compilers()
    compiler.suspend()
    left = asyncio.create_task(checker.check(StructuredOutputs(regex="l"), "a"))
    await asyncio.sleep(0.05)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    waiting = asyncio.create_task(checker.check(StructuredOutputs(regex="m"), "a"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    compiler.resume()
    await waiting
    assert compiler in compilers()


async def test_a_compiler_that_dies_takes_nobody_along(
    checker: StructureChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxes, "LONG_S", 100.0)  # no spare one
    await checker.check(GOOD, "a")
    (compiler,) = compilers()
    compiler.suspend()
    checking = asyncio.create_task(checker.check(StructuredOutputs(regex="c"), "a"))
    await asyncio.sleep(0.05)  # it has been asked
    os.kill(compiler.pid, signal.SIGKILL)
    with pytest.raises(InvalidRequest, match="it ends the compiler"):
        await checking
    await checker.check(StructuredOutputs(regex="d"), "a")
    (compiler,) = compilers()
    compiler.kill()
    wait_until(lambda: compiler.status() == psutil.STATUS_ZOMBIE)
    await checker.check(StructuredOutputs(regex="e"), "a")


@pytest.mark.slow
async def test_the_event_loop_goes_on_meanwhile(checker: StructureChecker) -> None:
    await checker.check(GOOD, "a")
    checking = asyncio.create_task(checker.check(ENDLESS, "a"))
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
    await checker.check(GOOD, "a")
    monkeypatch.setattr(sandboxes, "WAIT_S", 0.2)
    monkeypatch.setattr(sandboxes, "ANSWER_S", 0.5)
    (compiler,) = compilers()
    compiler.suspend()
    busy = asyncio.create_task(checker.check(StructuredOutputs(regex="g"), "a"))
    await asyncio.sleep(0)  # it is the first to be asked
    with pytest.raises(Overloaded, match="many requests wait for structures to be compiled"):
        await checker.check(StructuredOutputs(regex="h"), "a")
    with pytest.raises(Overloaded, match=r"no answer within 0\.5 s"):
        await busy
    monkeypatch.setattr(sandboxes, "WAIT_S", 100.0)
    monkeypatch.setattr(sandboxes, "ANSWER_S", 100.0)
    await checker.check(StructuredOutputs(regex="g"), "a")  # a busy machine is no fault of the structure's


async def test_a_tokenizer_that_cannot_be_read_is_no_reason_to_come_back(model_dir: Path) -> None:
    checker = StructureChecker(model_dir / "tokenizer.json", 8, (2,))
    with pytest.raises(InvalidRequest, match="vocab size too small"):
        await checker.check(GOOD, "a")
    checker.close()


async def test_what_is_kept_of_verdicts_is_bounded(checker: StructureChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure_module, "MAX_KNOWN", 3)
    monkeypatch.setattr(structure_module, "MAX_TENANTS", 2)
    for tenant in "tuv":
        for letter in "abcdefgha":
            await checker.check(StructuredOutputs(regex=letter), tenant)
    assert [len(known) for known in checker._verdicts._known.values()] == [3, 3]

"""Slots of adapters, and sequences that wait for them. The arithmetic model's answers say which adapter computed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.adapters import WEIGHTS_FILE
from baton.errors import AdapterUnreadable, DeviceLost, InvalidRequest, Overloaded, Unsupported, WorkerDraining
from baton.messages import Adapter, SequenceSpec
from baton.tasks import cancel_and_wait
from engine.core.adapters import AdapterSlots, needs_adapter
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from engine.core.outputs import Generated, Reserved
from engine.core.runner import StepInput
from engine.core.sequence import Purpose
from engine.testing import ArithmeticRunner, adapter_number, expected_tokens
from tests.support.adapters import save_adapter
from tests.support.builders import sequence_spec
from tests.support.waiting import until
from tests.unit.engine.core.test_engine import make_engine

pytestmark = pytest.mark.timeout(30)


# -- slots -----------------------------------------------------------------------------------------------------------


def slots_with(*digests: str, num_slots: int | None = None) -> AdapterSlots:
    slots = AdapterSlots(len(digests) if num_slots is None else num_slots)
    for digest in digests:
        assert slots.reserve(digest) is not None
        slots.loaded(digest)
    return slots


def test_slots_count_from_one_and_a_loaded_adapter_keeps_its_own() -> None:
    slots = AdapterSlots(2)
    assert [slots.reserve("a"), slots.reserve("b")] == [1, 2]
    assert slots.pin("a") is None, "it is not loaded yet"
    slots.loaded("a")
    assert [slots.pin("a"), slots.pin("a"), slots.pin("c")] == [1, 1, None]
    assert slots.resident == ("a",)
    slots.check([1, 1])
    with pytest.raises(AssertionError):
        slots.check([1])


def test_the_adapter_that_was_used_longest_ago_makes_room() -> None:
    slots = slots_with("a", "b", "c")
    for digest in ("a", "c"):
        number = slots.pin(digest)
        assert number is not None
        slots.unpin(number)
    assert slots.reserve("d") == 2
    assert slots.resident == ("a", "c")


def test_a_pinned_slot_makes_no_room_and_the_one_with_the_fewest_sequences_leaves() -> None:
    slots = slots_with("a", "b")
    assert [slots.pin("a"), slots.pin("a"), slots.pin("b")] == [1, 1, 2]
    assert slots.reserve("c") is None
    assert slots.pin("b") is None, "it takes no new sequences"
    assert slots.pin("a") == 1
    slots.unpin(2)
    assert slots.reserve("c") == 2
    assert slots.resident == ("a",)


def test_a_slot_stays_if_another_becomes_free_first_or_if_no_adapter_wants_it() -> None:
    slots = slots_with("a", "b")
    for digest in ("a", "a", "b"):
        slots.pin(digest)
    assert slots.reserve("c") is None
    slots.unpin(1)
    slots.unpin(1)
    assert slots.reserve("c") == 1
    assert slots.pin("b") == 2
    slots.loaded("c")
    slots.pin("c")
    assert slots.reserve("d") is None
    assert slots.leaving == "c"
    slots.stay()
    assert slots.pin("c") == 1


def test_the_slot_of_a_load_that_failed_is_free() -> None:
    slots = slots_with("a", num_slots=2)
    assert slots.reserve("b") == 2
    assert slots.reserve("c") == 1, "a makes room, and what is being loaded does not"
    assert slots.reserve("d") is None
    slots.failed("b")
    assert slots.reserve("d") == 2
    slots.check([])


def test_a_prefix_that_is_only_received_needs_no_adapter() -> None:
    adapter = Adapter(name="a", path="/a", digest="00", rank=4)
    spec = sequence_spec(adapter=adapter)
    assert needs_adapter(spec, Purpose.RECEIVE)
    assert needs_adapter(spec, Purpose.PREFILL)
    assert not needs_adapter(spec.prefix(2), Purpose.RECEIVE)
    assert not needs_adapter(sequence_spec(), Purpose.GENERATE)


def test_an_engine_with_a_pinned_slot_is_not_idle() -> None:
    """A sequence has its slot a moment before the engine knows the sequence."""
    engine = make_engine(max_adapters=1)
    engine.adapters.reserve("a")
    engine.adapters.loaded("a")
    assert engine.is_idle
    engine.adapters.pin("a")
    assert not engine.is_idle


# -- the loop --------------------------------------------------------------------------------------------------------


class Gate:
    """Loads of a runner wait here while it is closed."""

    def __init__(self, runner: ArithmeticRunner) -> None:
        self.is_open = threading.Event()
        self.loaded: list[str] = []
        self.started: list[str] = []
        self._read = runner.read_adapter
        runner.read_adapter = self.read  # type: ignore[method-assign]

    def read(self, adapter: Adapter) -> Callable[[int], None]:
        self.started.append(adapter.name)
        assert self.is_open.wait(20)
        put = self._read(adapter)

        def load(slot: int) -> None:
            put(slot)
            self.loaded.append(adapter.name)

        return load


@contextlib.asynccontextmanager
async def running(
    max_adapters: int = 2, is_open: bool = True, max_waiting: int = 64, plans_ahead: bool = False, **shape: Any
) -> AsyncIterator[tuple[EngineLoop, Gate]]:
    engine = make_engine(max_adapters=max_adapters, **shape)
    assert isinstance(engine.runner, ArithmeticRunner)
    gate = Gate(engine.runner)
    if is_open:
        gate.is_open.set()
    loop = EngineLoop(engine, max_waiting, plans_ahead=plans_ahead)
    task = asyncio.create_task(loop.run())
    try:
        yield loop, gate
        assert not task.done(), task
    finally:
        gate.is_open.set()
        await cancel_and_wait((task,))
    assert_nothing_left(engine)
    assert loop.self_check == "ok"


def assert_nothing_left(engine: Engine) -> None:
    engine.check()
    assert engine.is_idle
    engine.adapters.check([])


async def answer(loop: EngineLoop, spec: SequenceSpec, purpose: Purpose = Purpose.GENERATE) -> list[int]:
    tokens = list[int]()
    async with loop.sequence(spec, purpose) as sequence:
        while True:
            output = await sequence.next()
            if isinstance(output, Generated):
                tokens += output.token_ids
                if output.finish_reason is not None:
                    return tokens


def spec_of(
    adapter: Adapter | None, name: str = "r", num_tokens: int = 5, prompt: tuple[int, ...] = (3, 1, 4)
) -> SequenceSpec:
    return sequence_spec(prompt, name, max_tokens=num_tokens, adapter=adapter)


def told(spec: SequenceSpec) -> list[int]:
    digest = "" if spec.adapter is None else spec.adapter.digest
    return expected_tokens(list(spec.token_ids), spec.max_tokens, adapter=digest)


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    found = [save_adapter(tmp_path / f"adapter-{number}", seed=number) for number in range(5)]
    assert len({adapter_number(each.digest) for each in found}) == 5
    return found


async def test_each_sequence_is_computed_with_its_own_adapter(adapters: list[Adapter]) -> None:
    specs = [spec_of(each, f"{i}") for i, each in enumerate([*adapters, None, *adapters, None])]
    async with running(max_adapters=2) as (loop, gate):
        answers = await asyncio.gather(*(answer(loop, spec) for spec in specs))
        assert answers == [told(spec) for spec in specs]
        assert len({tuple(each) for each in answers}) == 6
        assert len(loop.load().adapters) == 2
    assert len(gate.loaded) >= 5


async def test_sequences_of_one_adapter_wait_for_one_load_and_others_do_not_wait(adapters: list[Adapter]) -> None:
    async with running(is_open=False) as (loop, gate):
        waiting = [asyncio.create_task(answer(loop, spec_of(adapters[0], f"{i}"))) for i in range(3)]
        other = spec_of(None, "other")
        assert await answer(loop, other) == told(other)
        await until(lambda: loop.load().waiting == 3)
        assert loop.load().blocks.free == loop.load().blocks.total, "who waits for an adapter holds no blocks"
        assert loop.load().adapters == ()
        gate.is_open.set()
        assert await asyncio.gather(*waiting) == [told(spec_of(adapters[0]))] * 3
        assert gate.loaded == ["adapter-0"]
        assert loop.load().adapter_load_s > 0


async def test_a_sequence_that_is_cancelled_while_its_adapter_is_loaded_leaves_nothing(adapters: list[Adapter]) -> None:
    async with running(max_adapters=1, is_open=False) as (loop, gate):
        waiting = asyncio.create_task(answer(loop, spec_of(adapters[0])))
        behind = asyncio.create_task(answer(loop, spec_of(adapters[1])))
        last = asyncio.create_task(answer(loop, spec_of(adapters[2])))
        await until(lambda: gate.started == ["adapter-0"] and loop.load().waiting == 3)
        await cancel_and_wait([waiting, last])
        assert loop.load().waiting == 1
        gate.is_open.set()
        assert await behind == told(spec_of(adapters[1]))
        assert loop.load().adapters == (adapters[1].digest,)
    assert gate.started == ["adapter-0", "adapter-1"]
    assert gate.loaded == ["adapter-1"], "nobody waited for the other once it was read"


async def test_a_sequence_that_is_cancelled_when_it_has_just_got_its_slot_leaves_nothing(
    adapters: list[Adapter],
) -> None:
    async with running(max_adapters=1, is_open=False) as (loop, gate):
        waiting = asyncio.create_task(answer(loop, spec_of(adapters[0])))
        await until(lambda: bool(gate.started))
        slots, pin = loop.engine.adapters, loop.engine.adapters.pin

        def pin_and_leave(digest: str) -> int | None:
            asyncio.get_running_loop().call_soon(waiting.cancel)  # before it wakes up with its slot
            return pin(digest)

        slots.pin = pin_and_leave  # type: ignore[method-assign]
        gate.is_open.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        slots.pin = pin  # type: ignore[method-assign]
        assert await answer(loop, spec_of(adapters[1])) == told(spec_of(adapters[1]))


async def test_a_sequence_waits_until_a_slot_is_free_and_busy_adapters_do_not_keep_it_out(
    adapters: list[Adapter],
) -> None:
    """The one slot is taken by sequences that overlap, one after the other, for as long as it lets them in."""
    async with running(max_adapters=1, layer_s=0.001) as (loop, _):
        is_over = False

        async def busily() -> None:
            number = 0
            tasks = set[asyncio.Task[list[int]]]()
            while not is_over:
                number += 1
                tasks.add(asyncio.create_task(answer(loop, spec_of(adapters[0], f"busy-{number}", 20))))
                await asyncio.sleep(0.01)
            assert all(each == told(spec_of(adapters[0], "", 20)) for each in await asyncio.gather(*tasks))

        busy = asyncio.create_task(busily())
        await until(lambda: loop.load().running > 2)
        kept_out = [asyncio.create_task(answer(loop, spec_of(each))) for each in adapters[1:3]]
        assert await asyncio.gather(*kept_out) == [told(spec_of(each)) for each in adapters[1:3]]
        is_over = True
        await busy


async def test_adapters_are_loaded_in_the_order_in_which_they_were_wanted(adapters: list[Adapter]) -> None:
    async with running(max_adapters=1, is_open=False) as (loop, gate):
        order = [3, 1, 4, 0, 2]
        tasks = []
        for number in order:
            tasks.append(asyncio.create_task(answer(loop, spec_of(adapters[number]))))
            await asyncio.sleep(0)
        gate.is_open.set()
        await asyncio.gather(*tasks)
        assert gate.loaded == [f"adapter-{number}" for number in order]


async def test_a_folder_with_other_weights_is_refused_once_and_for_all(adapters: list[Adapter]) -> None:
    save_adapter(Path(adapters[0].path), seed=99)
    async with running() as (loop, _):
        with pytest.raises(InvalidRequest, match="holds other weights than those that were registered"):
            await answer(loop, spec_of(adapters[0]))
        assert loop.load().adapters == ()


async def test_a_folder_that_this_worker_cannot_read_may_be_read_by_another(
    adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.core.adapters.FAILED_S", 0.0)
    (Path(adapters[0].path) / WEIGHTS_FILE).rename(Path(adapters[0].path) / "elsewhere")
    async with running(max_adapters=1) as (loop, _):
        tasks = [asyncio.create_task(answer(loop, spec_of(each, each.name))) for each in (adapters[0], *adapters[:2])]
        await asyncio.wait(tasks)
        assert [type(task.exception()) for task in tasks] == [AdapterUnreadable, AdapterUnreadable, type(None)]
        assert "cannot read the folder of adapter adapter-0" in str(tasks[0].exception())
        (Path(adapters[0].path) / "elsewhere").rename(Path(adapters[0].path) / WEIGHTS_FILE)
        assert await answer(loop, spec_of(adapters[0])) == told(spec_of(adapters[0]))


async def test_an_adapter_that_cannot_be_read_evicts_no_other_and_is_not_read_again_at_once(
    adapters: list[Adapter],
) -> None:
    (Path(adapters[0].path) / WEIGHTS_FILE).unlink()
    async with running(max_adapters=1) as (loop, gate):
        await answer(loop, spec_of(adapters[1]))
        for _ in range(3):
            with pytest.raises(AdapterUnreadable):
                await answer(loop, spec_of(adapters[0]))
        assert loop.load().adapters == (adapters[1].digest,)
        assert gate.started == ["adapter-1", "adapter-0"]
        pinned = asyncio.create_task(answer(loop, spec_of(adapters[1], num_tokens=200)))
        await until(lambda: loop.load().running == 1)
        with pytest.raises(AdapterUnreadable):
            await answer(loop, spec_of(replace(adapters[0], digest="00" * 16)))
        assert loop.engine.adapters.leaving is None, "the slot in use still takes sequences"
        await pinned


async def test_sequences_with_a_good_path_do_not_fail_with_those_of_an_old_path(adapters: list[Adapter]) -> None:
    old = replace(adapters[0], path=f"{adapters[0].path}-old")
    async with running(is_open=False) as (loop, gate):
        tasks = [asyncio.create_task(answer(loop, spec_of(each, f"{i}"))) for i, each in enumerate((old, adapters[0]))]
        await until(lambda: loop.load().waiting == 2)
        gate.is_open.set()
        await asyncio.wait(tasks)
        assert isinstance(tasks[0].exception(), AdapterUnreadable)
        assert tasks[1].result() == told(spec_of(adapters[0]))
        assert await answer(loop, spec_of(old)) == told(spec_of(adapters[0])), "its content is loaded by now"


async def test_while_a_load_hangs_only_loaded_adapters_are_served(
    adapters: list[Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as (loop, gate):
        await answer(loop, spec_of(adapters[0]))
        monkeypatch.setattr("engine.core.adapters.LOAD_S", 0.1)
        gate.is_open.clear()
        tasks = [asyncio.create_task(answer(loop, spec_of(each))) for each in adapters[1:3]]
        for task in tasks:
            with pytest.raises(AdapterUnreadable, match="takes too long"):
                await task
        with pytest.raises(AdapterUnreadable, match="takes too long"):
            await answer(loop, spec_of(adapters[3]))
        assert await answer(loop, spec_of(adapters[0])) == told(spec_of(adapters[0]))
        assert gate.started == ["adapter-0", "adapter-1"]
        gate.is_open.set()
        await until(lambda: loop._adapters._loading is None)
        assert await answer(loop, spec_of(adapters[3])) == told(spec_of(adapters[3]))


async def test_a_worker_that_leaves_hands_back_what_waits_for_an_adapter(adapters: list[Adapter]) -> None:
    async with running(is_open=False) as (loop, gate):
        tasks = [asyncio.create_task(answer(loop, spec_of(each))) for each in adapters[:3]]
        await until(lambda: loop.load().waiting == 3)
        loop.hand_back(WorkerDraining("in this test"))
        for task in tasks:
            with pytest.raises(WorkerDraining):
                await task
        gate.is_open.set()


async def test_a_lost_device_is_told_to_what_waits_for_an_adapter(adapters: list[Adapter]) -> None:
    engine = make_engine(max_adapters=1)
    assert isinstance(engine.runner, ArithmeticRunner)
    gate, loop = Gate(engine.runner), EngineLoop(engine, 64)
    task = asyncio.create_task(answer(loop, spec_of(adapters[0])))
    await until(lambda: bool(gate.started))
    with pytest.raises(DeviceLost):
        loop.lose("in this test")
    with pytest.raises(DeviceLost):
        await task
    gate.is_open.set()
    await until(lambda: loop._adapters._loading is None)
    engine.adapters.check([])


async def test_sequences_that_wait_for_adapters_count_as_waiting(adapters: list[Adapter]) -> None:
    async with running(is_open=False, max_waiting=2) as (loop, gate):
        tasks = [asyncio.create_task(answer(loop, spec_of(each))) for each in adapters[:2]]
        await until(lambda: loop.load().waiting == 2)
        with pytest.raises(Overloaded):
            await answer(loop, spec_of(adapters[2]))
        gate.is_open.set()
        await asyncio.gather(*tasks)


async def test_a_request_that_cannot_be_computed_is_refused_before_its_adapter_is_loaded(
    adapters: list[Adapter],
) -> None:
    async with running() as (loop, gate):
        with pytest.raises(InvalidRequest, match="token id 99999999"):
            await answer(loop, spec_of(adapters[0], prompt=(99999999,)))
        assert gate.started == []


async def test_a_request_that_the_engine_refuses_gives_its_slot_back(adapters: list[Adapter]) -> None:
    async with running(max_adapters=1, max_num_seqs=4) as (loop, _):
        many = sequence_spec(max_tokens=4, use_beam_search=True, beam_width=8, adapter=adapters[0])
        with pytest.raises(InvalidRequest, match="num_beams 8 is too large"):
            await answer(loop, many)
        assert await answer(loop, spec_of(adapters[1])) == told(spec_of(adapters[1]))


async def test_a_worker_without_slots_refuses_adapters_by_the_setting(adapters: list[Adapter]) -> None:
    async with running(max_adapters=0) as (loop, _):
        for asking in (answer(loop, spec_of(adapters[0])), loop.check_adapter(adapters[0].path)):
            with pytest.raises(Unsupported, match=r"set engine\.max_adapters"):
                await asking
        spec = spec_of(adapters[0]).prefix(2)
        async with loop.sequence(spec, Purpose.RECEIVE) as sequence:
            assert isinstance(await sequence.next(), Reserved)


async def test_an_adapter_is_checked_without_being_loaded(adapters: list[Adapter], tmp_path: Path) -> None:
    wide = save_adapter(tmp_path / "wide", rank=65)
    async with running() as (loop, gate):
        facts = await loop.check_adapter(adapters[0].path)
        assert (facts.digest, facts.rank) == (adapters[0].digest, 4)
        with pytest.raises(InvalidRequest, match=r"has rank 65, and engine\.max_adapter_rank is 64"):
            await loop.check_adapter(wide.path)
        with pytest.raises(InvalidRequest, match=r"cannot read the adapter in .*is not a folder"):
            await loop.check_adapter(str(tmp_path / "none"))
        assert gate.started == []


async def test_choices_and_beams_hold_the_slot_until_the_last_of_them_ends(adapters: list[Adapter]) -> None:
    async with running(max_adapters=1) as (loop, _):
        beams = sequence_spec(max_tokens=6, use_beam_search=True, beam_width=3, adapter=adapters[0])
        specs = [
            beams,
            *(
                sequence_spec(range(1, 20), "n", max_tokens=6, temperature=1.0, choice_index=i, adapter=adapters[0])
                for i in range(3)
            ),
        ]
        held = list[int]()
        execute = loop.engine.runner.execute

        def noted(step: StepInput, on_layer_done: Any) -> Any:
            loop.engine.adapters.check(s.adapter for s in loop.engine.sequences.values())
            held.append(len({part.sequence_key for part in step.parts}))
            assert {part.adapter for part in step.parts} == {1}
            return execute(step, on_layer_done)

        loop.engine.runner.execute = noted  # type: ignore[method-assign,assignment]
        await asyncio.gather(*(answer(loop, spec) for spec in specs))
        assert max(held) >= 5


@pytest.mark.parametrize("plans_ahead", [False, True])
async def test_sequences_that_come_go_and_are_cancelled_at_random_leave_nothing(
    plans_ahead: bool, adapters: list[Adapter]
) -> None:
    """Some are preempted."""
    draw = random.Random(5)
    async with running(2, plans_ahead=plans_ahead, num_blocks=12, output_reservation=1) as (loop, _):

        async def one(number: int) -> None:
            spec = spec_of(draw.choice([*adapters, None]), f"{number}", draw.randrange(1, 60), tuple(range(1, 20)))
            await asyncio.sleep(draw.random() * 0.3)
            task = asyncio.create_task(answer(loop, spec))
            if draw.random() < 0.4:
                await asyncio.sleep(draw.random() * 0.1)
                await cancel_and_wait([task])
            else:
                assert await task == told(spec)

        await asyncio.gather(*(one(number) for number in range(60)))
        assert loop.load().preemptions > 0

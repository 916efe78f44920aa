"""Hosts that die, hang or fail in a step, and the errors that their sequences get."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.errors import BatonError, DeviceLost, LostInStep
from baton.structure import StructuredOutputs
from engine.core.sequence import Purpose
from engine.vllm import process
from tests.support.fake_vllm.hosted import BABBLING, DEADLY, FATAL, HANGING
from tests.support.waiting import until
from tests.unit.engine.contract.subjects import SOON_S, Subject, read
from tests.unit.engine.vllm.hosts import Hosts, host_of, nothing_is_left
from tests.unit.engine.vllm.test_engine import PROMPT, its, spec_of

TIMEOUT_S = 1.0
"""A host that hangs is detected after this time, or a quarter more."""


@contextlib.asynccontextmanager
async def losing(subject: Subject, message: str) -> AsyncIterator[None]:
    """Runs an engine, which must lose its device exactly once."""
    running = asyncio.create_task(subject.engine.run(subject.events))
    try:
        yield
        async with asyncio.timeout(SOON_S):
            with pytest.RaisesGroup(pytest.RaisesExc(DeviceLost, match=message), allow_unwrapped=True):
                await running
        with pytest.raises(DeviceLost, match=message):
            async with subject.engine.sequence(spec_of(PROMPT), Purpose.GENERATE):
                pass
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def error_of(subject: Subject, prompt: list[int], **values: Any) -> BatonError:
    """The error that a sequence ends with."""
    with pytest.raises(BatonError) as raised:
        await subject.answer(spec_of(prompt, 100, **values))
    return raised.value


async def test_a_host_that_dies_while_it_is_idle_is_noticed_at_once(hosts: Hosts) -> None:
    subject = hosts.subject()
    async with losing(subject, r"vLLM's process, \d+: its process has ended with status -9"):
        await subject.answer(spec_of(PROMPT, 3))
        host_of(its(subject)).send_signal(signal.SIGKILL)


async def test_a_host_that_dies_in_a_step_takes_those_along_that_it_had(hosts: Hosts) -> None:
    """A waiting sequence was not in the step in which the host died, so it must not count as the cause."""
    subject = hosts.subject(max_num_seqs=2)
    async with (
        losing(subject, "its process has ended with status 3"),
        subject.engine.sequence(spec_of(PROMPT, 1500), Purpose.GENERATE) as beside,
    ):
        await beside.next()
        deadly = asyncio.create_task(error_of(subject, [1, DEADLY]))
        await until(lambda: subject.engine.load().running == 2 or deadly.done(), SOON_S)
        waiting = asyncio.create_task(error_of(subject, PROMPT))
        with pytest.raises(LostInStep, match="has failed in a step of this request: vLLM's process"):
            await read(beside)
        assert isinstance(await deadly, LostInStep)
        error = await waiting
        assert type(error) is DeviceLost


async def test_a_step_that_fails_is_named_and_the_host_ends(hosts: Hosts) -> None:
    subject = hosts.subject(max_num_seqs=1)
    async with losing(subject, "RuntimeError: the model has failed"):
        async with (
            subject.engine.sequence(spec_of([1, FATAL], 9), Purpose.GENERATE) as fatal,
            subject.engine.sequence(spec_of(PROMPT, 9), Purpose.GENERATE) as waiting,
        ):
            with pytest.raises(LostInStep, match="RuntimeError: the model has failed"):
                await asyncio.wait_for(fatal.next(), SOON_S)
            with pytest.raises(DeviceLost) as lost:
                await asyncio.wait_for(waiting.next(), SOON_S)
            assert lost.type is DeviceLost
        await until(
            lambda: not host_of(its(subject)).is_running() or host_of(its(subject)).status() == "zombie", SOON_S
        )


async def test_a_host_that_sends_no_message_but_something_else_is_lost(hosts: Hosts) -> None:
    subject = hosts.subject()
    async with losing(subject, r"""b'\["tuple","what","is","this"\]' is not a message \(KeyError\('tuple'\)\)"""):
        assert isinstance(await error_of(subject, [1, BABBLING]), LostInStep)


async def test_a_host_that_hangs_while_it_is_idle_is_noticed_by_its_silence(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "END_S", 0.2)
    subject = hosts.subject(step_timeout_s=TIMEOUT_S)
    async with losing(subject, r"it has not answered within 1 s \(engine.step_timeout_s\)"):
        host_of(its(subject)).send_signal(signal.SIGSTOP)


async def test_a_host_that_hangs_in_a_step_is_noticed_by_its_silence(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "END_S", 0.2)
    subject = hosts.subject(step_timeout_s=TIMEOUT_S, max_num_seqs=1)
    async with losing(subject, r"it has not answered within 1 s \(engine.step_timeout_s\)"):
        hanging = asyncio.create_task(error_of(subject, [1, HANGING]))
        await until(lambda: subject.engine.load().running == 1 or hanging.done(), SOON_S)
        waiting = asyncio.create_task(error_of(subject, PROMPT))
        assert isinstance(await hanging, LostInStep)
        assert type(await waiting) is DeviceLost


async def test_a_host_that_hangs_while_it_holds_received_blocks_is_noticed_once_it_must_answer(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence may wait for KV for long; this alone must not end the host."""
    monkeypatch.setattr(process, "END_S", 0.2)
    subject = hosts.subject(step_timeout_s=TIMEOUT_S)
    async with (
        losing(subject, "it has not answered within 1 s"),
        subject.engine.sequence(spec_of(PROMPT, 5), Purpose.RECEIVE) as handle,
    ):
        await handle.next()
        await asyncio.sleep(1.5 * TIMEOUT_S)
        assert handle.take_ready() == []
        host_of(its(subject)).send_signal(signal.SIGSTOP)
        handle.insert(None)
        with pytest.raises(LostInStep):
            await asyncio.wait_for(handle.next(), SOON_S)


async def test_a_host_that_dies_while_a_structure_is_compiled_ends_who_waits_for_it(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject, is_compiled = hosts.subject(), threading.Event()
    monkeypatch.setattr(its(subject)._structures, "prepare", lambda sampling: is_compiled.wait(SOON_S))
    structure = StructuredOutputs(choice=("a",))
    async with losing(subject, "its process has ended with status -9"):
        waiting = asyncio.create_task(error_of(subject, PROMPT, structured_outputs=structure, ignore_eos=False))
        await asyncio.sleep(0)
        host_of(its(subject)).send_signal(signal.SIGKILL)
        await until(lambda: its(subject)._lost is not None, SOON_S)
        is_compiled.set()
        assert type(await waiting) is DeviceLost


async def test_a_host_that_answers_is_not_lost(hosts: Hosts) -> None:
    """The host is idle, and then computes, for longer than a step may take."""
    subject = hosts.subject({"step_s": 0.05}, step_timeout_s=2.0)
    async with subject.running():
        await asyncio.sleep(2.6)
        assert (await subject.answer(spec_of(PROMPT, 50)))[0] == subject.expected(PROMPT, 50)


async def test_a_pin_of_a_host_that_dies_is_of_nothing(hosts: Hosts) -> None:
    subject = hosts.subject()
    async with losing(subject, "its process has ended with status -9"):
        spec = spec_of(PROMPT, 3)
        await subject.answer(spec)
        host_of(its(subject)).send_signal(signal.SIGKILL)
        async with asyncio.timeout(SOON_S):
            pin = await subject.engine.pin_prefix(spec.block_keys(PROMPT))
        subject.engine.unpin(pin)
        assert pin.num_tokens in (0, 96), "it may have answered before"


async def test_nothing_is_left_of_an_engine_whose_host_has_died(hosts: Hosts) -> None:
    config = hosts.config()
    with nothing_is_left() as check:
        subject = Subject(engine=hosts.started(config), expected=lambda prompt, number: [])
        async with losing(subject, "its process has ended with status 3"):
            assert isinstance(await error_of(subject, [1, DEADLY]), LostInStep)
        hosts.close()
        del subject
        await asyncio.sleep(0)
        check()

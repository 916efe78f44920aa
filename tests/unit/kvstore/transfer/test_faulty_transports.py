"""Thousands of small transfers over links that go wrong on purpose: not one wrong byte is taken for right.

A transfer that fails is tried again with a new ticket, as the router would. What every injected fault did is known by
chunk and link, so that what was detected can be compared with what was injected. `NUM_TRANSFERS` sets how many
transfers there are in all (3,000 without it; `make chaos` asks for 10,000).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from baton.config import Faults, TransferConfig
from baton.errors import BatonError, TransferCancelled, TransferCorrupted
from baton.messages import Ticket
from engine.core.runner import KVSpec, LayerGroup
from engine.model.kv_cache import KVCache
from kvstore.transfer.connection.reservations import Arrival
from kvstore.transfer.device import GpuDevice
from kvstore.transfer.protocol.chunk_header import VOID
from kvstore.transfer.receiver import KvReceiver
from kvstore.transfer.sender import KvSender
from kvstore.transfer.testing import FaultInjector, FaultyTransport
from kvstore.transfer.transport.base import Operation, SendingTransport
from kvstore.transfer.transport.staging import Slot
from kvstore.transfer.transport.tcp import TcpSender
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import (
    SOON_S,
    Decode,
    Prefill,
    decode_side,
    filled_cache,
    footprint,
    kv_transfer,
    prefill_side,
    same_blocks,
    tables_of,
)

pytestmark = [pytest.mark.first, pytest.mark.timeout(280)]

NUM_TRANSFERS = int(os.environ.get("NUM_TRANSFERS", "1200"))
SPEC = KVSpec(
    (LayerGroup(name="all", layers=tuple(range(4)), num_kv_heads=1, k_dim=4, v_dim=4, block_size=16, dtype="float32"),)
)
"""512 bytes a row: a transfer of 3 blocks is 6 KiB in 3 chunks."""
NUM_BLOCKS = 128
NUM_SENDERS = 4
AT_ONCE = 4
"""Transfers of one sender under way."""

BREAKING = ("link_drop", "link_duplicate", "link_reorder", "link_stall", "link_kill")
"""The pair fails, and with it all that is under way on it. So it does when a flipped bit is in a header; all other
faults spoil a payload, and fail one transfer."""
BREAKING_TCP = (*BREAKING, "link_truncate")
"""A stream in which bytes are missing is out of step."""
# Payload faults count the chunks of a pair, of which few live for a hundred on a tcp link: a truncation ends them too.
MIXED = (
    "corrupt_chunk=41,drop_chunk=43,swap_blocks=47,link_truncate=.004,link_flip=.004,link_drop=.002,"
    "link_duplicate=.002,link_reorder=.002,link_stall=.0015,link_kill=.002"
)
CASES = {
    "corrupt_chunk": "corrupt_chunk=29",
    "drop_chunk": "drop_chunk=29",
    "swap_blocks": "swap_blocks=29",
    "link_truncate": "link_truncate=.03",
    "link_flip": "link_flip=.1",
    "link_delay_ms": "link_delay_ms=1",
    "link_drop": "link_drop=.01",
    "link_duplicate": "link_duplicate=.01",
    "link_reorder": "link_reorder=.01",
    "link_stall": "link_stall=.003",
    "link_kill": "link_kill=.01",
    "cancels": "",
    "everything": MIXED,
}
SHARE = {"cancels": 0.1, "everything": 0.24}
"""Of all transfers of one kind of link; the others have equal shares of the rest."""
FEWEST = {"everything": 1200, "link_truncate": 100} | dict.fromkeys(BREAKING, 300)
"""With fewer, a fault as rare as these might not come."""
FEWEST |= dict.fromkeys(("corrupt_chunk", "drop_chunk", "swap_blocks"), 60)
"""180 chunks, so one pair of the four has 29 of them, however they are spread."""


def num_transfers(case: str) -> int:
    """Over each kind of link; shm and tcp together have `NUM_TRANSFERS`."""
    rest = (1 - sum(SHARE.values())) / (len(CASES) - len(SHARE))
    return max(FEWEST.get(case, 0), round(NUM_TRANSFERS / 2 * SHARE.get(case, rest)))


@dataclass
class Injected:
    """What was done to the chunks of all links, as the links themselves tell."""

    count: Counter[str] = field(default_factory=Counter)
    links: list[NotedLink] = field(default_factory=list)
    spoils: int = 0
    """Payloads changed before the link."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """For those who count: the threads of all links do."""

    def spoiled(self, but_broken: bool = False) -> set[int]:
        """Generations of which a chunk was sent with other bytes than it should have had, or not at all."""
        return {g for link in self.links for g in link.spoiled if not (but_broken and link.is_broken_on_purpose)}


class NotedLink(FaultyTransport):
    """Notes what each injected fault hit. Every one has a seed of its own."""

    injected_into: Injected
    seeds: Iterator[int]

    def __init__(self, link: SendingTransport, faults: Faults, *, gpu: GpuDevice | None) -> None:
        super().__init__(link, faults, next(self.seeds), gpu)
        self.is_broken_on_purpose = False
        self.is_closed = False
        self.spoiled: set[int] = set()
        self._breaking = BREAKING_TCP if isinstance(link, TcpSender) else BREAKING
        self.injected_into.links.append(self)

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        header = slot.read_header()
        generation = int.from_bytes(header[18:26], "little")
        is_void = bool(header[5] & VOID)
        overtakes = self._held_back is not None
        before = self.injected.copy()
        try:
            return super().send_chunk(slot, num_bytes)
        finally:
            new = self.injected - before
            with self.injected_into.lock:
                self.injected_into.count.update(new)
            header_changed = new["link_flip"] and header != slot.read_header()
            if overtakes or header_changed or any(new[fault] for fault in self._breaking):
                self.is_broken_on_purpose = True
            if not is_void and any(new[f] for f in ("link_truncate", "link_flip", "link_drop", "link_stall")):
                self.spoiled.add(generation)

    def close(self) -> None:
        self.is_closed = True
        super().close()


class NotedInjector(FaultInjector):
    injected_into: Injected

    def spoil(self, num_rows: int, payload: torch.Tensor) -> None:
        before = payload.clone()
        super().spoil(num_rows, payload)
        if not torch.equal(before, payload):
            with self.injected_into.lock:
                self.injected_into.spoils += 1


@pytest.fixture
def injected(monkeypatch: pytest.MonkeyPatch) -> Injected:
    notes = Injected()
    for cls in (NotedLink, NotedInjector):
        monkeypatch.setattr(cls, "injected_into", notes, raising=False)
        monkeypatch.setattr(f"kvstore.transfer.testing.{cls.__bases__[0].__name__}", cls)
    monkeypatch.setattr(NotedLink, "seeds", itertools.count(1), raising=False)
    return notes


@dataclass(kw_only=True)
class Outcome:
    committed: set[int] = field(default_factory=set)
    """Generations."""
    corrupted: set[int] = field(default_factory=set)
    failed: Counter[str] = field(default_factory=Counter)
    """At the receiver, by the error's type; cancelled ones too."""
    sender_failed: int = 0
    """Where `finish` said so."""
    sender_committed: int = 0
    cancels: int = 0


class TransportLoop:
    """Senders that transfer to one receiver, again and again."""

    def __init__(self, prefills: list[Prefill], decode: Decode, cancel_rate: float) -> None:
        self.outcome = Outcome()
        self.free = set(range(NUM_BLOCKS))
        self._prefills = prefills
        self._decode = decode
        self._cancel_rate = cancel_rate
        self._rng = random.Random(11)
        self._numbers: Iterator[int] = iter(())

    async def run(self, count: int) -> None:
        self._numbers = iter(range(count))
        async with asyncio.TaskGroup() as tasks:
            for prefill in self._prefills * AT_ONCE:
                tasks.create_task(self._serve(prefill))

    async def _serve(self, prefill: Prefill) -> None:
        for number in self._numbers:
            for attempt in range(60):
                if await self._try(prefill, f"t{number}/{attempt}"):
                    break
            else:
                raise AssertionError("a transfer did not get through in 60 attempts")

    async def _try(self, prefill: Prefill, name: str) -> bool:
        """One attempt. Checks the bytes where either side says that it was committed."""
        target = self._rng.sample(sorted(self.free), 3)
        self.free.difference_update(target)
        source = self._rng.sample(range(NUM_BLOCKS), 3)
        receiver, outcome = self._decode.receiver, self.outcome
        self._decode.cache.clear_blocks([target])
        ticket = receiver.expect(name, 48, 0, tables_of(receiver, target))
        arriving = asyncio.create_task(receiver.wait_committed(ticket))
        sending = asyncio.create_task(self._send(prefill, source, ticket))
        canceller = self._rng.random() < self._cancel_rate and self._rng.choice(["sender", "receiver"])
        if canceller:
            outcome.cancels += 1
            await asyncio.sleep(self._rng.random() * 0.03)
            if canceller == "sender":
                sending.cancel()
            else:
                released = await receiver.release(ticket)
        (sent,) = await asyncio.gather(sending, return_exceptions=True)
        if sent is not True and canceller != "receiver":
            released = await receiver.release(ticket)  # the router gives the attempt up
        (arrived,) = await asyncio.gather(arriving, return_exceptions=True)
        for result in (sent, arrived):
            if isinstance(result, BaseException) and not isinstance(result, BatonError | asyncio.CancelledError):
                raise result
        if isinstance(arrived, Arrival):
            outcome.committed.add(ticket.generation)
            assert arrived == Arrival(48, 7)
        else:
            outcome.failed[type(arrived).__name__] += 1
            if isinstance(arrived, TransferCorrupted):
                outcome.corrupted.add(ticket.generation)
        outcome.sender_failed += isinstance(sent, BatonError) and not isinstance(sent, TransferCancelled)
        outcome.sender_committed += sent is True
        if isinstance(arrived, Arrival):
            assert same_blocks(prefill.cache, source, self._decode.cache, target), f"wrong bytes in {name}"
        else:
            assert sent is not True or canceller == "receiver", "the sender was told of a commit that was none"
        if sent is True and canceller != "receiver":
            released = await receiver.release(ticket)
        assert released == (tuple(target),)
        self.free.update(target)
        return isinstance(arrived, Arrival)

    async def _send(self, prefill: Prefill, source: list[int], ticket: Ticket) -> bool:
        async with prefill.sender.transfer(ticket) as transfer:
            transfer.extend(tables_of(transfer, source))
            transfer.advance(48, 2)
            await asyncio.sleep(0)
            transfer.advance(48, 4)
            await transfer.finish(7)
            return True


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("link", ["shm", pytest.param("tcp", marks=pytest.mark.full)])
async def test_not_one_wrong_byte_is_taken_for_right(link: str, case: str, injected: Injected) -> None:
    breaks = case in (*BREAKING, "link_flip", "everything") or (case == "link_truncate" and link == "tcp")
    config = TransferConfig(
        slot_bytes=3072, window=4, num_slots=8, transports=(link,),
        # A busy machine may hold a thread up for seconds, which must not break a pair that no fault breaks.
        open_timeout_s=10.0, op_timeout_s=2.5 if breaks else 20.0, ping_s=0.15, resend_s=0.2, lease_s=30.0,
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as warm:  # what a process keeps once it has had a pair
        decode = await warm.enter_async_context(decode_side(config, caches=[KVCache(SPEC, NUM_BLOCKS, 1)]))
        prefill = await warm.enter_async_context(prefill_side(config, caches=[filled_cache(5, SPEC, NUM_BLOCKS)]))
        await kv_transfer(prefill, decode, [1, 2, 3], [3, 1, 2])
    injected.links.clear()
    before = footprint()
    async with contextlib.AsyncExitStack() as stack:
        cache = filled_cache(5, SPEC, NUM_BLOCKS)
        decode = await stack.enter_async_context(decode_side(config, caches=[KVCache(SPEC, NUM_BLOCKS, 1)]))
        prefills = [
            await stack.enter_async_context(prefill_side(config, CASES[case], f"prefill-{n}", caches=[cache]))
            for n in range(NUM_SENDERS)
        ]
        traffic = TransportLoop(prefills, decode, 0.5 if case == "cancels" else 0.1 if case == "everything" else 0.0)
        await traffic.run(num_transfers(case))
        await settled(prefills, decode, injected)
        print(case, link, num_transfers(case), dict(injected.count), injected.spoils, traffic.outcome.failed)
        assert traffic.free == set(range(NUM_BLOCKS))
        check_detected(case, link, traffic.outcome, injected, prefills, decode)
    await until(lambda: footprint() <= before, SOON_S, seen=lambda: (footprint(), before))


async def settled(prefills: list[Prefill], decode: Decode, injected: Injected) -> None:
    """Returns once every broken link has been noticed, and what it held is back."""
    await until(lambda: all(at.is_closed for at in injected.links if at.is_broken_on_purpose), SOON_S)
    sides: list[KvReceiver | KvSender] = [decode.receiver, *(prefill.sender for prefill in prefills)]
    await until(
        lambda: not any(side.slots_in_use for side in sides), SOON_S, seen=lambda: [side.slots_in_use for side in sides]
    )
    assert len(decode.receiver._reservations._state) == 0
    decode.receiver.check()
    for prefill in prefills:
        await until(lambda: all(len(pair._state) == 0 for pair in prefill.sender._connections._alive), SOON_S)  # noqa: B023
        assert not prefill.sender._live


def check_detected(
    case: str, link: str, outcome: Outcome, injected: Injected, prefills: list[Prefill], decode: Decode
) -> None:
    received = decode.receiver.stats
    assert not outcome.committed & injected.spoiled(), "a transfer with a spoiled chunk was committed"
    assert received.committed == len(outcome.committed)
    assert received.corrupted == len(outcome.corrupted)
    refused = sum(p.sender.stats.failed for p in prefills)
    assert outcome.sender_failed <= refused <= outcome.sender_failed + outcome.cancels  # some were cancelled as well
    told = sum(p.sender.stats.committed for p in prefills)
    assert outcome.sender_committed <= told <= outcome.sender_committed + outcome.cancels  # some were told too late
    assert received.expired == 0
    num_broken = sum(at.is_broken_on_purpose for at in injected.links)
    assert [at.is_closed for at in injected.links] == [at.is_broken_on_purpose for at in injected.links], (
        "a pair breaks when, and only when, a fault breaks it"
    )
    assert decode.num_pairs_ever == len(injected.links) or not injected.links
    if case == "everything":
        assert all(injected.count[fault] for fault in (*BREAKING, "link_truncate", "link_flip"))
        assert injected.spoils > 0
        return
    if case == "cancels":
        assert decode.num_pairs_ever == NUM_SENDERS, "no cancel costs a pair"
        assert not outcome.corrupted
        return
    if case == "link_delay_ms":
        assert not outcome.failed
        return
    failed = sum(outcome.failed.values())
    # The receiver counts those that failed there while the request still waited, not those that it gave up first
    # because the sender had said so.
    assert 0 < received.failed <= failed
    if case in ("corrupt_chunk", "drop_chunk", "swap_blocks"):
        # No transfer has two of them: they are further apart than all chunks that can be under way on a pair.
        assert len(outcome.corrupted) == injected.spoils == failed
        assert num_broken == 0
    elif case == "link_truncate" and link != "tcp":
        assert outcome.corrupted == injected.spoiled()
        assert num_broken == 0
    elif case == "link_flip":
        assert injected.spoiled(but_broken=True) <= outcome.corrupted
        assert 0 < num_broken < injected.count["link_flip"]
    else:
        assert injected.count[case] > 0
        assert num_broken > 0

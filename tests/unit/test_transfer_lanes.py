"""The two halves of a transfer's data over a link in memory: a transfer that is given up leaves nothing on the link."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from baton.engine.kv_cache import KVCache, KVSpec, LayerGroup
from baton.errors import TransferError
from baton.messages import Ticket
from kvstore.transfer.faults import FaultInjector, Faults
from kvstore.transfer.inbound import Inbound
from kvstore.transfer.ledger import Committed, Failed, Instruction, Ledger, State
from kvstore.transfer.link import Operation, Slot
from kvstore.transfer.outbound import Outbound
from kvstore.transfer.plan import Chunk, plan
from kvstore.transfer.staging import Rows

CPU = torch.device("cpu")
SPEC = KVSpec(16, (LayerGroup("all", tuple(range(9)), 1, 4, 4, torch.float32),))  # a chunk a layer
SLOT = 512


class Done:
    def wait(self) -> None: ...


class Arrival:
    def __init__(self, wire: queue.Queue[torch.Tensor], buffer: torch.Tensor) -> None:
        self._wire = wire
        self._buffer = buffer

    def wait(self) -> None:
        message = self._wire.get(timeout=5)
        assert len(message) == len(self._buffer), "a send met a receive of another size"
        self._buffer.copy_(message)


class MemoryLink:
    device = CPU

    def __init__(self) -> None:
        self.wire: queue.Queue[torch.Tensor] = queue.Queue()
        self.num_sent = 0
        self.num_posted = 0

    def send(self, buffer: torch.Tensor) -> Operation:
        self.num_sent += 1
        self.wire.put(buffer.clone())
        return Done()

    def recv(self, buffer: torch.Tensor) -> Operation:
        self.num_posted += 1
        return Arrival(self.wire, buffer)

    def close(self) -> None: ...

    def abort(self) -> None: ...


class StopAt(FaultInjector):
    """Gives the transfer up once `seq` chunks are sealed."""

    def __init__(self, outbound: Outbound, seq: int | None) -> None:
        super().__init__(Faults())
        self._outbound = outbound
        self._left = seq

    def spoil(self, chunk: Chunk, payload: torch.Tensor) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self._outbound.stop()


def transfer(window: int, stop_at: int | None, fail_receiver: bool = False) -> tuple[MemoryLink, list[Instruction]]:
    source, target = KVCache(SPEC, 2, 1), KVCache(SPEC, 2, 1)
    source.groups[0].normal_()
    chunks = plan(SPEC, 16, 0, SLOT)
    ledger, decided = Ledger(), list[Instruction]()
    generation = ledger.reserve("t", (1,), 30.0)
    ticket = Ticket("t", generation, "d", "d.1", "", 16, 0, 30, "kind")
    outbound = Outbound(ticket, chunks, Rows(source, [0], None), checked=True)
    if stop_at == 0:
        outbound.stop()
    assert ledger.offer("t", generation, len(chunks))
    inbound = Inbound("t", generation, chunks, Rows(target, [1], None), True, ledger, threading.Lock(), decided.extend)
    link = MemoryLink()
    slots = [[Slot(SLOT, CPU, pinned=False) for _ in range(window)] for _ in range(2)]

    def grant() -> None:
        if fail_receiver:
            decided.extend(ledger.fail("t", generation, TransferError("gone")))

    with ThreadPoolExecutor(2) as threads:
        sending = threads.submit(outbound.run, link, slots[0], 7, StopAt(outbound, stop_at))
        receiving = threads.submit(inbound.run, link, slots[1], 7, grant)
        sending.result()
        receiving.result()
    decided += ledger.commit("t", generation, 3)
    if ledger.state(generation) is State.COMMITTED:
        assert torch.equal(source.groups[0][:, 0], target.groups[0][:, 1])
    if fail_receiver:
        assert not target.groups[0].any(), "a failed transfer is received into staging only"
    return link, decided


@pytest.mark.parametrize("window", [1, 2, 4, 12])
@pytest.mark.parametrize("stop_at", [None, *range(10)])
def test_what_is_posted_is_met_exactly_whenever_the_sender_stops(window: int, stop_at: int | None) -> None:
    link, decided = transfer(window, stop_at)
    assert link.num_sent == link.num_posted
    assert link.wire.empty()
    whole = stop_at is None or stop_at >= 9
    assert [type(d) for d in decided] == [Committed if whole else Failed]


@pytest.mark.parametrize("window", [1, 4])
def test_a_transfer_that_failed_here_is_still_received_and_written_nowhere(window: int) -> None:
    link, decided = transfer(window, None, fail_receiver=True)
    assert link.num_sent == link.num_posted == 9
    assert [type(d) for d in decided] == [Failed]

"""Transport threads at work: both ends of a real link in one process, and both machines, connected directly."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from baton.config import Faults
from baton.errors import BatonError, TransferCorrupted, TransferError, TransferTimeout
from baton.kv_layout import GroupLayout, KvLayout
from baton.messages import Abort, AbortAck, Commit, CommitAck, FromReceiver, FromSender, Grant, Nack, Offer, Ticket
from engine.model.kv_cache import KVCache
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.device import DeviceLosses
from kvstore.transfer.pipeline.driven import DrivenMachine
from kvstore.transfer.pipeline.receive_loop import ChunkWriter, ReceiveLoop
from kvstore.transfer.pipeline.send_loop import ChunkQueue, Place, ReadyChunk, SendLoop
from kvstore.transfer.pipeline.thread import TransportThread
from kvstore.transfer.protocol import receive_state as receiving
from kvstore.transfer.protocol import send_state as sending
from kvstore.transfer.protocol.chunk_header import HEADER_BYTES, Header
from kvstore.transfer.protocol.machine import Send, TransferCommitted, TransferFailed
from kvstore.transfer.protocol.plan import Chunk, WireOptions, plan, rank_spec
from kvstore.transfer.protocol.receive_state import ReceiveInstruction, ReceiveState
from kvstore.transfer.protocol.send_state import SendState
from kvstore.transfer.testing import FaultyTransport, rows_of
from kvstore.transfer.transport.base import RECEIVER, SENDER, Operation, ReceivingTransport, SendingTransport
from kvstore.transfer.transport.rendezvous import RendezvousStore
from kvstore.transfer.transport.select import open_receiver, open_sender
from kvstore.transfer.transport.staging import Slot, StagingPool
from tests.support.waiting import wait_until
from tests.unit.kvstore.transfer.transport.ends import transport_end

if TYPE_CHECKING:
    from engine.core.runner import Fence
    from kvstore.transfer.copy.blocks import Move

torch.set_num_threads(1)

LAYOUT = KvLayout(
    16, 1, (GroupLayout(name="all", layers=tuple(range(9)), num_kv_heads=1, k_dim=4, v_dim=4, dtype="float32"),)
)
SLOT_BYTES = 512
"""A chunk is a layer of a block."""
OPTIONS = WireOptions(SLOT_BYTES, 16, "auto")
NUM_CHUNKS = 9
NUM_BLOCKS = 8
SESSION = 1


def ticket_of(transfer_id: str, generation: int) -> Ticket:
    return Ticket(
        transfer_id=transfer_id,
        generation=generation,
        decode_worker_id="d",
        incarnation="d.1",
        kv_address="",
        num_tokens=16,
        skip_tokens=0,
        wire_compat="kind",
        layout=LAYOUT,
    )


class Hook(FaultyTransport):
    """Calls something once, after a number of chunks were gathered."""

    def __init__(self, link: SendingTransport, faults: Faults, at: int, call: Callable[[], None]) -> None:
        super().__init__(link, faults)
        self._left = at
        self._call = call

    def send_chunk(self, slot: Slot, num_bytes: int) -> Operation:
        self._left -= rows_of(slot.read_header()) > 0
        if self._left == 0:
            self._left = -1
            self._call()
        return super().send_chunk(slot, num_bytes)


class Sides:
    """A sender, a receiver and the link between them. OfferedTransfer `block` moves that block to the same place."""

    def __init__(
        self,
        kind: str,
        window: int = 4,
        faults: Faults | None = None,
        at_chunk: int = 0,
        call: Callable[[], None] = lambda: None,
        op_timeout_s: float = 5.0,
        heartbeat_s: float = 0.2,
        epochs: tuple[int, int] = (3, 3),
    ) -> None:
        self.source, self.target = (KVCache(rank_spec(LAYOUT, 0), NUM_BLOCKS, 1) for _ in range(2))
        self.source.groups[0].normal_(generator=torch.Generator().manual_seed(1))
        self.plan = plan(LAYOUT, 0, LAYOUT, 0, 16, (0,), OPTIONS)
        assert len(self.plan.chunks) == NUM_CHUNKS
        self.pools = [StagingPool(window, SLOT_BYTES, torch.device("cpu")) for _ in range(2)]
        self.ledger, self.offers = ReceiveState(), SendState(1.0, 10.0)
        self.received: dict[int, asyncio.Future[BatonError | None]] = {}
        self.sent: dict[int, asyncio.Future[BatonError | None]] = {}
        self.unpinned: dict[int, asyncio.Future[None]] = {}
        self.outbounds: dict[int, ChunkQueue] = {}
        self.inbounds: dict[int, ChunkWriter] = {}
        self.at_ledger: DrivenMachine[ReceiveState, ReceiveInstruction] = DrivenMachine(self.ledger, self._of_ledger)
        self.at_offers: DrivenMachine[SendState, sending.SendInstruction] = DrivenMachine(self.offers, self._of_offers)
        stores: list[RendezvousStore] = []
        stores += [RendezvousStore(lambda key, value: stores[RECEIVER].deliver(key, value))]
        stores += [RendezvousStore(lambda key, value: stores[SENDER].deliver(key, value))]
        self.stores = stores
        self.outflow = SendLoop(epochs[0], self.at_offers, heartbeat_s)
        self.inflow = ReceiveLoop(epochs[1], self.inbounds, SLOT_BYTES, op_timeout_s)

        def ends(open_link: Any, side: int) -> Any:
            return partial(open_link, kind, transport_end(stores[side], self.pools[side], window, 5.0, op_timeout_s))

        def open_hooked() -> Hook:
            return Hook(ends(open_sender, SENDER)(), faults or Faults(), at_chunk, call)

        self.sender: TransportThread[SendingTransport] = TransportThread(
            "sender", open_hooked, self.outflow, torch.device("cpu")
        )
        self.receiver: TransportThread[ReceivingTransport] = TransportThread(
            "receiver", ends(open_receiver, RECEIVER), self.inflow, torch.device("cpu")
        )

    def offer(self, block: int) -> int:
        """Ready to be sent in full as soon as it is granted. Its generation."""
        loop = asyncio.get_running_loop()
        transfer_id = f"t{block}"
        generation = self.at_ledger.ask(lambda ledger: ledger.reserve(transfer_id, (block,), 1e9))
        ticket = ticket_of(transfer_id, generation)
        outbound = ChunkQueue(ticket, BlockCopier(self.source, self.plan, LAYOUT, 0, ((block,),)), True)
        rows = BlockCopier(self.target, self.plan, LAYOUT, 0, ((block,),))
        self.inbounds[generation] = ChunkWriter(ticket, SESSION, rows, self.at_ledger, checked=True)
        self.outbounds[generation] = outbound
        self.received[generation], self.sent[generation] = loop.create_future(), loop.create_future()
        self.unpinned[generation] = loop.create_future()
        offer = Offer(
            transfer_id=transfer_id,
            generation=generation,
            plan_digest=b"",
            num_chunks=NUM_CHUNKS,
            wire_dtype="auto",
            num_tokens=16,
            chunk_bytes=SLOT_BYTES,
        )
        self.at_offers.apply(lambda offers: offers.offer(offer, 0.0))
        return generation

    def finish(self, generation: int) -> None:
        self.outbounds[generation].finish()
        self.at_offers.apply(lambda offers: offers.finish(generation, 7, 0.0))

    async def outcome(self, generation: int) -> BatonError | None:
        """What both sides came to, which must be the same; nothing is read or written after it."""
        async with asyncio.timeout(10):
            received, sent = await self.received[generation], await self.sent[generation]
            await self.unpinned[generation]
        assert type(received) is type(sent)
        return received

    async def kv_transfer(self, block: int) -> BatonError | None:
        generation = self.offer(block)
        self.finish(generation)
        return await self.outcome(generation)

    def same(self, *blocks: int) -> bool:
        at = list(blocks)
        return torch.equal(self.source.groups[0][:, at], self.target.groups[0][:, at])

    def untouched(self, block: int) -> bool:
        return not self.target.groups[0][:, block].any()

    async def close(self) -> None:
        self.sender.stop()
        self.receiver.stop()
        assert await self.sender.join(10)
        assert await self.receiver.join(10)
        self.ledger.check()
        self.offers.check()

    def _of_offers(self, instruction: sending.SendInstruction) -> None:
        match instruction:
            case Send():
                asyncio.get_running_loop().call_soon(self._to_receiver, instruction.message)
            case sending.Granted():
                self.outflow.add(self.outbounds[instruction.generation])
            case TransferCommitted():
                self.sent[instruction.generation].set_result(None)
            case TransferFailed():
                self.outflow.drop(self.outbounds[instruction.generation])
                self.sent[instruction.generation].set_result(instruction.error)
            case sending.Unpin():
                self.unpinned[instruction.generation].set_result(None)

    def _of_ledger(self, instruction: ReceiveInstruction) -> None:
        match instruction:
            case Send():
                asyncio.get_running_loop().call_soon(self._to_sender, instruction.message)
            case TransferCommitted():
                self.received[instruction.generation].set_result(None)
                self.inbounds.pop(instruction.generation, None)
            case TransferFailed():
                self.received[instruction.generation].set_result(instruction.error)
                self.inbounds.pop(instruction.generation, None)

    def _to_receiver(self, message: FromSender) -> None:
        match message:
            case Offer():
                ids = (SESSION, message.transfer_id, message.generation)
                self.at_ledger.apply(lambda ledger: ledger.offer(*ids, message.num_chunks, 1))
            case Commit():
                ids = (SESSION, message.transfer_id, message.generation)
                self.at_ledger.apply(lambda ledger: ledger.commit(*ids, message.first_token))
            case Abort():
                ids = (SESSION, message.transfer_id, message.generation)
                self.at_ledger.apply(lambda ledger: ledger.abort(*ids, TransferError("aborted")))

    def _to_sender(self, message: FromReceiver) -> None:
        match message:
            case Grant():
                self.at_offers.apply(lambda offers: offers.on_grant(message.transfer_id, message.generation, 0.0))
            case CommitAck():
                self.at_offers.apply(lambda offers: offers.on_commit_ack(message.transfer_id, message.generation))
            case Nack():
                ids = (message.transfer_id, message.generation, message.reason)
                self.at_offers.apply(lambda offers: offers.on_nack(*ids))
            case AbortAck():
                self.at_offers.apply(lambda offers: offers.on_abort_ack(message.transfer_id, message.generation))


@contextlib.asynccontextmanager
async def running(kind: str, **options: Any) -> AsyncIterator[Sides]:
    sides = Sides(kind, **options)
    try:
        async with asyncio.timeout(10):
            await sides.sender.opened
            await sides.receiver.opened
        yield sides
    finally:
        await sides.close()


def wait_for_chunks(sides: Sides, generation: int, num_chunks: int) -> None:
    """Until so many are in, and a little longer: more would be too many."""

    def num_in(ledger: ReceiveState) -> int:
        return sum(len(source.chunks_in) for source in ledger._by_generation[generation].sources.values())

    wait_until(lambda: sides.at_ledger.ask(num_in) >= num_chunks, 10.0, seen=lambda: sides.at_ledger.ask(num_in))
    time.sleep(0.05)
    assert sides.at_ledger.ask(num_in) == num_chunks


every_kind = pytest.mark.parametrize("kind", ["shm", "tcp"])


@every_kind
@pytest.mark.parametrize("window", [1, 2, 6])
async def test_transfers_that_share_a_transport_arrive_whole_whatever_the_window(kind: str, window: int) -> None:
    async with running(kind, window=window) as sides:
        generations = [sides.offer(block) for block in range(5)]
        for generation in generations:
            sides.finish(generation)
        assert [await sides.outcome(generation) for generation in generations] == [None] * 5
        assert sides.same(0, 1, 2, 3, 4)
        assert all(sides.untouched(block) for block in (5, 6, 7))
        assert await sides.kv_transfer(5) is None, "and the link goes on"
    assert sides.inflow.num_fenced == 0
    assert [pool.num_discarded for pool in sides.pools] == [0, 0]
    assert [pool.in_use for pool in sides.pools] == [0, 0]


@every_kind
@pytest.mark.parametrize("at_chunk", [1, 4, 8, 9])
async def test_a_transfer_that_is_given_up_leaves_nothing_on_the_transport(kind: str, at_chunk: int) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait_in_lane() -> None:
        reached.set()
        assert go_on.wait(10)

    async with running(kind, at_chunk=at_chunk, call=wait_in_lane) as sides:
        generation = sides.offer(0)
        sides.outbounds[generation].finish()
        assert await asyncio.to_thread(reached.wait, 10)
        sides.at_offers.apply(lambda offers: offers.abort(generation, TransferError("given up"), 0.0))
        go_on.set()
        assert isinstance(await sides.outcome(generation), TransferError)
        assert at_chunk == NUM_CHUNKS or not sides.same(0)
        for block in (1, 2):
            assert await sides.kv_transfer(block) is None
        assert sides.same(1, 2)
        assert not sides.sender.ended.done()


@every_kind
async def test_chunks_of_a_transfer_that_has_failed_here_are_written_nowhere(kind: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait_in_lane() -> None:
        reached.set()
        assert go_on.wait(10)

    async with running(kind, at_chunk=1, call=wait_in_lane) as sides:
        generation = sides.offer(0)
        sides.outbounds[generation].finish()
        assert await asyncio.to_thread(reached.wait, 10)
        sides.at_ledger.apply(lambda ledger: ledger.fail("t0", generation, TransferTimeout("too late")))
        go_on.set()
        assert isinstance(await sides.outcome(generation), TransferTimeout)
        assert await sides.kv_transfer(1) is None
        assert sides.untouched(0)
        assert sides.inflow.num_fenced >= 1, "those that were gathered before the sender knew; the others were void"


@every_kind
async def test_a_corrupt_chunk_fails_its_transfer_and_no_other(kind: str) -> None:
    async with running(kind, faults=Faults(corrupt_chunk=NUM_CHUNKS + 3)) as sides:
        assert await sides.kv_transfer(0) is None
        error = await sides.kv_transfer(1)
        assert isinstance(error, TransferCorrupted)
        assert "chunk 2 of generation 2: its checksum" in str(error)
        assert sides.same(0)
        assert not sides.sender.ended.done()


@every_kind
async def test_chunks_leave_as_they_become_ready(kind: str) -> None:
    async with running(kind) as sides:
        generation = sides.offer(0)
        outbound = sides.outbounds[generation]
        assert outbound.unsent_bytes == 0
        outbound.advance(16, 4, None)
        assert outbound.unsent_bytes <= 4 * SLOT_BYTES
        await asyncio.to_thread(wait_for_chunks, sides, generation, 4)
        assert torch.equal(sides.source.groups[0][:4, 0], sides.target.groups[0][:4, 0])
        assert not sides.target.groups[0][4:, 0].any()
        assert not sides.received[generation].done()
        sides.finish(generation)
        assert await sides.outcome(generation) is None
        assert outbound.is_exhausted
        assert outbound.unsent_bytes == 0


async def test_transfers_that_are_ready_take_turns() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait_in_lane() -> None:
        reached.set()
        assert go_on.wait(10)

    async with running("shm", window=8, at_chunk=NUM_CHUNKS + 5, call=wait_in_lane) as sides:
        first, *others = generations = [sides.offer(block) for block in range(3)]
        sides.finish(first)
        assert await sides.outcome(first) is None
        for generation in others:
            sides.outbounds[generation].advance(16, NUM_CHUNKS, None)
        assert await asyncio.to_thread(reached.wait, 10)
        left = [sides.outbounds[generation].unsent_bytes // SLOT_BYTES for generation in others]
        assert all(0 < num < NUM_CHUNKS for num in left), "neither waits for the end of the other"
        go_on.set()
        for generation in others:
            sides.finish(generation)
        assert [await sides.outcome(generation) for generation in generations] == [None] * 3


async def test_the_ledger_has_the_last_word_on_what_is_written() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait_in_lane() -> None:
        reached.set()
        assert go_on.wait(10)

    async with running("shm", at_chunk=1, call=wait_in_lane) as sides:
        generation = sides.offer(0)
        sides.finish(generation)
        assert await asyncio.to_thread(reached.wait, 10)
        sides.at_ledger.ask(lambda ledger: ledger.fail("t0", generation, TransferError("not told to the lane yet")))
        go_on.set()
        async with asyncio.timeout(10):
            assert isinstance(await sides.sent[generation], TransferError)
        assert await sides.kv_transfer(1) is None
        assert sides.ledger.num_fenced >= NUM_CHUNKS, "every chunk came"
        assert sides.untouched(0)


@pytest.mark.parametrize("when", ["not granted", "again", "failed", "released", "of another session"])
async def test_a_chunk_is_written_only_when_the_ledger_says_so(when: str) -> None:
    async with running("shm") as sides:
        generation = sides.offer(0)
        inbound, outbound = sides.inbounds[generation], sides.outbounds[generation]
        slot = sides.pools[0].take(0)
        assert slot is not None
        chunk = sides.plan.chunks[0]
        checksum = outbound.gather(ReadyChunk(0, chunk, None), slot).end()
        header = outbound.header(0, chunk, checksum, Place(epoch=3, place=0, next_bytes=0))
        if when != "not granted":
            ids = (SESSION + (when == "of another session"), "t0", generation)
            sides.at_ledger.ask(lambda ledger: ledger.offer(*ids, NUM_CHUNKS, 1))
        if when == "again":
            inbound.end(header, cast("Move", inbound.begin(header, slot)))
            assert not sides.untouched(0)
            sides.target.groups[0].zero_()
        if when == "failed":
            sides.at_ledger.ask(lambda ledger: ledger.fail("t0", generation, TransferError("over")))
        if when == "released":
            sides.at_ledger.ask(lambda ledger: ledger.release(generation))
        assert inbound.begin(header, slot) is None
        assert sides.untouched(0)
        assert sides.ledger.num_fenced == 1
        sides.pools[0].give(slot)


async def test_each_chunk_keeps_the_fence_that_made_it_ready() -> None:
    """A newer one may be of a step that only begins; none means that the KV is there already."""
    fences: list[object] = []

    class Watched(BlockCopier):
        def gather(self, chunk: Chunk, payload: torch.Tensor, fence: Any = None, checksum: Any = None) -> None:
            fences.append(fence)

    cache = KVCache(rank_spec(LAYOUT, 0), NUM_BLOCKS, 1)
    planned = plan(LAYOUT, 0, LAYOUT, 0, 16, (0,), OPTIONS)
    ticket = ticket_of("t", 1)
    outbound = ChunkQueue(ticket, Watched(cache, planned, LAYOUT, 0, ((0,),)), checked=False)
    first, second = (cast("Fence", object()) for _ in range(2))
    for num_layers, fence in ((3, first), (4, None), (5, second), (9, None)):
        outbound.advance(16, num_layers, fence)
    while (ready := outbound.take_ready()) is not None:
        outbound.gather(ready, Slot(torch.empty(HEADER_BYTES + ready.chunk.num_bytes, dtype=torch.uint8)))
    assert fences == [first] * 3 + [None] + [second] + [None] * 4, "that which made it ready, however late it is sent"


async def test_a_chunk_number_beyond_the_plan_is_corruption() -> None:
    async with running("shm") as sides:
        generation = sides.offer(0)
        slot = sides.pools[0].take(0)
        assert slot is not None
        header = Header(0, 3, 0, 0, generation, seq=NUM_CHUNKS)
        assert sides.inbounds[generation].begin(header, slot) is None
        error = await asyncio.wait_for(sides.received[generation], 10)
        assert isinstance(error, TransferCorrupted)
        assert "no chunk 9" in str(error)
        sides.pools[0].give(slot)


@every_kind
async def test_an_idle_transport_lives_on_its_heartbeat(kind: str) -> None:
    async with running(kind, op_timeout_s=0.6, heartbeat_s=0.1) as sides:
        await asyncio.sleep(1.5)
        assert await sides.kv_transfer(0) is None


@every_kind
async def test_a_silent_transport_ends_after_the_operation_timeout(kind: str) -> None:
    async with running(kind, op_timeout_s=0.4, heartbeat_s=60.0) as sides:
        async with asyncio.timeout(10):
            error = await sides.receiver.ended
        assert isinstance(error, TransferError)


@every_kind
@pytest.mark.parametrize("leaves", ["sender", "receiver"])
async def test_when_one_lane_stops_the_other_ends_with_an_error(kind: str, leaves: str) -> None:
    async with running(kind) as sides:
        first, second = (sides.sender, sides.receiver) if leaves == "sender" else (sides.receiver, sides.sender)
        first.stop()
        first.stop()
        assert await first.join(10)
        assert isinstance(await asyncio.wait_for(second.ended, 10), TransferError)


@every_kind
async def test_messages_of_another_epoch_end_the_receiving_lane(kind: str) -> None:
    async with running(kind, epochs=(3, 4)) as sides:
        error = await asyncio.wait_for(sides.receiver.ended, 10)
        assert isinstance(error, TransferCorrupted)
        assert "epoch 3" in str(error)


async def test_a_chunk_that_cannot_be_written_fails_the_transfer_and_ends_the_lane() -> None:
    async with running("shm") as sides:
        generation = sides.offer(0)
        rows = BlockCopier(sides.target, sides.plan, LAYOUT, 0, ((0,),))
        rows._tables[0][0] = NUM_BLOCKS + 99
        ticket = ticket_of("t0", generation)
        sides.inbounds[generation] = ChunkWriter(ticket, SESSION, rows, sides.at_ledger, True)
        sides.finish(generation)
        error = await asyncio.wait_for(sides.received[generation], 10)
        assert "could not be written" in str(error)
        assert isinstance(await asyncio.wait_for(sides.receiver.ended, 10), TransferError)
        assert sides.ledger.state(generation) is receiving.ReceivePhase.FAILED, "nothing scatters any more"


# -- lanes without a link ------------------------------------------------------------------------------------------


class Nothing:
    """TransportLoop that lasts until it is stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()

    def run(self, link: SendingTransport) -> None:
        assert self.stopped.wait(10)

    def stop(self) -> None:
        self.stopped.set()


@pytest.mark.parametrize("failure", [TransferTimeout("nobody came"), OSError("what the library says")])
async def test_a_transport_that_cannot_be_opened_fails_both_futures(failure: Exception) -> None:
    def open_link() -> SendingTransport:
        raise failure

    lane = TransportThread("test", open_link, Nothing(), torch.device("cpu"))
    error = await asyncio.wait_for(lane.ended, 10)
    assert type(error) is (TransferTimeout if isinstance(failure, TransferTimeout) else TransferError)
    assert str(failure) in str(error)
    with pytest.raises(TransferError, match=str(failure)):
        await lane.opened
    assert await lane.join(0)


async def test_join_tells_whether_the_thread_has_ended_and_stop_reaches_one_that_is_still_opening() -> None:
    let_open, aborted = threading.Event(), threading.Event()

    def open_link() -> Any:
        assert let_open.wait(10)
        return AbortableLink(aborted)

    lane = TransportThread("late", open_link, Nothing(), torch.device("cpu"))
    assert not await lane.join(0.05)
    lane.stop()
    let_open.set()
    assert await lane.join(10)
    assert aborted.is_set()
    assert lane.ended.result() is None


async def test_a_transport_that_broke_is_known_before_it_is_closed() -> None:
    """The end of an NCCL communicator may take as long as a message."""
    let_close = threading.Event()

    class Broken(Nothing):
        def run(self, link: SendingTransport) -> None:
            raise TransferError("it broke")

    class SlowToClose(AbortableLink):
        def close(self) -> None:
            assert let_close.wait(10)

    def open_link() -> Any:
        return SlowToClose(threading.Event())

    seen: list[TransferError | None] = []
    lane = TransportThread("slow", open_link, Broken(), torch.device("cpu"))
    lane.watch(seen.append)
    assert str(await asyncio.wait_for(asyncio.shield(lane.over), 5)) == "it broke"
    await asyncio.sleep(0)
    assert [str(error) for error in seen if error is not None] == ["it broke"]
    assert not lane.ended.done()
    let_close.set()
    assert str(await asyncio.wait_for(lane.ended, 10)) == "it broke"
    assert await lane.join(10)


@pytest.mark.parametrize(
    ("failure", "cause", "is_lost"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), None, True),
        (TransferError("the nccl transport is broken"), RuntimeError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: invalid argument"), None, False),
        (TransferError("the peer is gone"), None, False),
    ],
    ids=str,
)
async def test_a_device_that_is_lost_in_a_transfer_alone_is_known_to_the_worker(
    failure: Exception, cause: Exception | None, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = DeviceLosses()
    monkeypatch.setattr("kvstore.transfer.pipeline.thread.LOSSES", losses)

    class Broken(Nothing):
        def run(self, link: SendingTransport) -> None:
            raise failure from cause

    def open_link() -> Any:
        return AbortableLink(threading.Event())

    lane = TransportThread("broken", open_link, Broken(), torch.device("cpu"))
    assert isinstance(await asyncio.wait_for(lane.ended, 10), TransferError)
    assert (str(failure) in losses.found) == is_lost
    assert bool(losses.found) == is_lost


class AbortableLink:
    """A link as far as a lane needs one."""

    def __init__(self, aborted: threading.Event) -> None:
        self._aborted = aborted

    def close(self) -> None: ...

    def abort(self) -> None:
        self._aborted.set()


# -- shared machines -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Counter:
    value: int = 0

    def add(self, *numbers: int) -> list[int]:
        self.value += len(numbers)
        return list(numbers)


async def test_what_threads_decide_is_carried_out_on_the_loop_in_the_order_of_deciding() -> None:
    carried_out: list[int] = []
    threads: set[int] = set()

    def carry_out(number: int) -> None:
        threads.add(threading.get_ident())
        carried_out.append(number)

    shared: DrivenMachine[Counter, int] = DrivenMachine(Counter(), carry_out)

    def decide(first: int) -> None:
        for number in range(first, first + 200, 2):
            shared.apply_in_thread(lambda counter, n=number: counter.add(n, n + 1))  # type: ignore[misc]

    await asyncio.gather(*(asyncio.to_thread(decide, 1000 * i) for i in range(4)))
    shared.apply(lambda counter: counter.add(-1))
    assert carried_out[-1] == -1, "what came before is carried out before this"
    assert shared.ask(lambda counter: counter.value) == len(carried_out) == 801
    assert threads == {threading.get_ident()}
    for i in range(4):
        assert [n for n in carried_out if n // 1000 == i] == list(range(1000 * i, 1000 * i + 200))


async def test_an_event_that_happens_while_one_is_carried_out_comes_after_it() -> None:
    carried_out: list[int] = []

    def carry_out(number: int) -> None:
        carried_out.append(number)
        if number == 1:
            shared.apply(lambda counter: counter.add(3))

    shared: DrivenMachine[Counter, int] = DrivenMachine(Counter(), carry_out)
    shared.apply(lambda counter: counter.add(1, 2))
    assert carried_out == [1, 2, 3]


async def test_a_chunk_of_another_plan_is_not_written() -> None:
    """Its place on the link and its size are right, but it is of another layer than the one that is due."""
    async with running("shm") as sides:
        generation = sides.offer(0)
        queue = sides.outbounds[generation]
        chunks = sides.plan.chunks
        swapped = (chunks[1], chunks[0], *chunks[2:])
        queue.plan = dataclasses.replace(sides.plan, chunks=swapped)
        sides.finish(generation)
        error = await asyncio.wait_for(sides.received[generation], 10)
        assert isinstance(error, TransferCorrupted)
        assert "place in the plan" in str(error)

"""Sending end of a transport: it alternates between ready chunks of many transfers, and announces each in advance.

    place       n       n+1       n+2
    message   signal   chunk a  |  decided now; announced by the message at n
                                `-- next_bytes: its payload, 0 for a signal

Each message is announced LOOKAHEAD places ahead. A place that was announced is always filled: with a VOID chunk if its
transfer has been aborted in the meantime. So an abort leaves nothing behind on the transport. An idle transport carries
a signal every `heartbeat_s`.

On a GPU, a chunk's copy into its slot starts when it is announced, and its checksum is read when its place has come. In
main memory, it is copied at its place, and sent out of the processor's cache.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstore.transfer.copy.blocks import DoneMove
from kvstore.transfer.copy.checksum import Xxh3
from kvstore.transfer.protocol import chunk_header as h
from kvstore.transfer.protocol.plan import EVERY_LAYER

if TYPE_CHECKING:
    from baton.messages import Ticket
    from engine.core.runner import BlockTables, Fence
    from kvstore.transfer.copy.blocks import BlockCopier, Move
    from kvstore.transfer.pipeline.driven import DrivenMachine
    from kvstore.transfer.protocol.plan import Chunk, TransferPlan
    from kvstore.transfer.protocol.send_state import SendInstruction, SendState
    from kvstore.transfer.transport.base import Operation, SendingTransport
    from kvstore.transfer.transport.staging import Slot


class ReadyChunk(NamedTuple):
    """A chunk that may be gathered once its fence has been reached."""

    seq: int
    """Index of the chunk within the transfer."""
    chunk: Chunk
    fence: Fence | None


class ChunkQueue:
    """Chunks of one transfer on one connection, and the engine's progress with them. Thread-safe.

    Args:
        checked: whether chunks carry checksums.
    """

    def __init__(self, ticket: Ticket, copier: BlockCopier, checked: bool) -> None:
        plan = copier.plan
        self.generation = ticket.generation
        self.plan = plan
        self.send_loop: SendLoop | None = None
        """Loop that takes the chunks, once the receiver has granted the transfer."""
        self.began_s = 0.0
        """Time at which the first chunk was gathered, on the monotonic clock; 0 before that."""
        self._copier = copier
        self._checked = checked
        self._transfer = h.transfer_hash(ticket.transfer_id)
        self._lock = threading.Lock()
        self._spans = _spans(plan)
        """Chunks that are not ready yet."""
        self._ready: deque[tuple[int, Fence | None]] = deque()
        """Chunks that may be gathered, each with the fence that made it ready."""
        self._unsent_bytes = 0
        self._num_layers = 1 + max((layer for group in plan.src.groups for layer in group.layers), default=-1)
        self._tokens_in_all_layers = 0
        self._step = (0, 0)
        """Number of tokens at the end of the current step, and number of layers that it has completed."""
        self._finished = False

    @property
    def unsent_bytes(self) -> int:
        """Payload of the chunks that are computed but not gathered yet."""
        return self._unsent_bytes

    @property
    def is_exhausted(self) -> bool:
        """True if every chunk has been taken."""
        return not self._spans and not self._ready

    def advance(self, num_tokens: int, num_layers: int, fence: Fence | None) -> None:
        """Record that the first `num_tokens` tokens are computed in the model's first `num_layers` layers."""
        with self._lock:
            self._step = (num_tokens, num_layers)
            if num_layers >= self._num_layers:
                self._tokens_in_all_layers = max(self._tokens_in_all_layers, num_tokens)
            self._find_ready(fence)
        self._wake()

    def finish(self) -> None:
        """Record that everything is computed, states included."""
        with self._lock:
            self._finished = True
            self._find_ready(None)
        self._wake()

    def extend(self, block_ids: BlockTables) -> None:
        """Set the sequence's block tables, which have grown, or have a row with the final states."""
        self._copier.extend(block_ids)

    def take_ready(self) -> ReadyChunk | None:
        """Return the next chunk that can be gathered; None if there is none yet."""
        with self._lock:
            if not self._ready:
                return None
            seq, fence = self._ready.popleft()
            chunk = self.plan.chunks[seq]
            self._unsent_bytes -= chunk.num_bytes
            return ReadyChunk(seq, chunk, fence)

    def gather(self, ready: ReadyChunk, slot: Slot) -> Move:
        """Copy a chunk into a slot, or start the copy if the slot is on a GPU."""
        self.began_s = self.began_s or time.monotonic()
        payload = slot.payload(ready.chunk.num_bytes)
        if slot.is_on_gpu:
            return self._copier.begin_gather(ready.chunk, payload, ready.fence, self._checked)
        checksum = Xxh3() if self._checked else None
        self._copier.gather(ready.chunk, payload, ready.fence, checksum)
        return DoneMove(checksum.digest() if checksum else 0)

    def header(self, seq: int, chunk: Chunk, checksum: int, at: Place) -> h.Header:
        """Return the header of a gathered chunk."""
        return h.Header(
            epoch=at.epoch,
            place=at.place,
            next_bytes=at.next_bytes,
            flags=h.CHECKED if self._checked else 0,
            generation=self.generation,
            transfer=self._transfer,
            seq=seq,
            part=chunk.part,
            layer_lo=chunk.layer_lo,
            layer_hi=chunk.layer_hi,
            unit_lo=chunk.unit_lo,
            unit_hi=chunk.unit_hi,
            num_bytes=chunk.num_bytes,
            checksum=checksum,
        )

    def _find_ready(self, fence: Fence | None) -> None:
        """Append ready chunks to the queue: spans and their chunks in order; a step may work on several spans."""
        for span in self._spans:
            while span.chunks and self._is_ready(span.num_tokens, span.chunks[0].num_layers):
                seq = span.chunks.popleft().seq
                self._ready.append((seq, fence))
                self._unsent_bytes += self.plan.chunks[seq].num_bytes
            if span.num_tokens > max(self._step[0], self._tokens_in_all_layers) and not self._finished:
                break
        while self._spans and not self._spans[0].chunks:
            self._spans.popleft()

    def _wake(self) -> None:
        if self.send_loop is not None:
            self.send_loop.wake()

    def _is_ready(self, num_tokens: int, num_layers: int) -> bool:
        if self._finished or num_layers == EVERY_LAYER:
            return self._finished
        is_in_step = num_tokens <= self._step[0] and num_layers <= self._step[1]
        return is_in_step or num_tokens <= self._tokens_in_all_layers


@dataclass(slots=True)
class _PendingChunk:
    seq: int
    num_layers: int
    """Layers that must be computed before the chunk is ready; EVERY_LAYER: the whole prompt must be."""


@dataclass(slots=True)
class _Span:
    """Chunks that need the same tokens."""

    num_tokens: int
    chunks: deque[_PendingChunk]
    """Pending chunks, in rising order of their layers."""


def _spans(plan: TransferPlan) -> deque[_Span]:
    """Return the spans of a plan in rising order of their tokens."""
    spans: dict[int, _Span] = {}
    for seq, chunk in enumerate(plan.chunks):
        num_tokens, num_layers = plan.ready_at(chunk)
        spans.setdefault(num_tokens, _Span(num_tokens, deque())).chunks.append(_PendingChunk(seq, num_layers))
    return deque(spans[num_tokens] for num_tokens in sorted(spans))


class Place(NamedTuple):
    """Position of a message on the transport, and the payload that it announces."""

    epoch: int
    place: int
    next_bytes: int


@dataclass(slots=True)
class _Announced:
    """A chunk that an earlier message has announced."""

    queue: ChunkQueue
    ready: ReadyChunk
    slot: Slot
    move: Move | None = None  # the copy into the slot, from its start to its end


class UnderWay:
    """Sends that were started on a transport and not waited for yet, in order, with the slots that they hold."""

    def __init__(self, transport: SendingTransport) -> None:
        self._transport = transport
        self._operations: deque[tuple[Operation, Slot | None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._operations)

    def add(self, operation: Operation, slot: Slot | None) -> None:
        """Add a started operation, and the slot that is in use until its end."""
        self._operations.append((operation, slot))

    def complete_one(self) -> None:
        """Wait for the oldest operation, and release its slot."""
        operation, slot = self._operations[0]
        operation.wait()
        self._operations.popleft()
        if slot is not None:
            self._transport.slots.release(slot)

    def complete_all(self) -> None:
        """Wait for all operations."""
        while self._operations:
            self.complete_one()

    def give_up(self) -> None:
        """Discard the slots of operations in progress: the transport has failed, or is about to be closed."""
        for _, slot in self._operations:
            if slot is not None:
                self._transport.slots.discard(slot)


class SendLoop:
    """Loop of a sender's transport thread. The event loop adds granted transfers.

    Args:
        epoch: the connection's epoch, which every header carries.
        heartbeat_s: longest pause between two messages.
    """

    def __init__(
        self,
        epoch: int,
        machine: DrivenMachine[SendState, SendInstruction],
        heartbeat_s: float,
    ) -> None:
        self._epoch = epoch
        self._machine = machine
        self._heartbeat_s = heartbeat_s
        self._changed = threading.Condition()
        self._queues: deque[ChunkQueue] = deque()
        self._next: tuple[ChunkQueue, ReadyChunk] | None = None
        """A chunk that is ready but not announced, because no slot was free."""
        self._stopped = False

    # -- any thread --------------------------------------------------------------------------------------------------

    def add(self, queue: ChunkQueue) -> None:
        """Add a granted transfer."""
        queue.send_loop = self
        with self._changed:
            self._queues.append(queue)
            self._changed.notify()

    def drop(self, queue: ChunkQueue) -> None:
        """Start no more chunks of a transfer, because it has ended."""
        with self._changed:
            if queue in self._queues:
                self._queues.remove(queue)

    def stop(self) -> None:
        """End `run` before its next message. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def wake(self) -> None:
        """Check for ready chunks again: a queue has more."""
        with self._changed:
            self._changed.notify()

    # -- the transport thread ----------------------------------------------------------------------------------------

    def run(self, transport: SendingTransport) -> None:
        """Send until `stop`, or until the transport fails with TransferError."""
        under_way = UnderWay(transport)
        try:
            self._run(transport, under_way)
        finally:
            under_way.give_up()

    def _run(self, transport: SendingTransport, under_way: UnderWay) -> None:
        places: deque[_Announced | None] = deque([None] * h.LOOKAHEAD)
        place = 0
        try:
            while True:
                due = places[0]
                upcoming = self._decide(transport, under_way, is_idle=not any(places))
                places.append(upcoming)
                if self._stopped:
                    return
                at = Place(self._epoch, place, upcoming.ready.chunk.num_bytes if upcoming else 0)
                if due is None:
                    signal = h.Header(0, *at)
                    under_way.add(transport.send_signal(signal.pack()), None)
                else:
                    self._send(transport, under_way, due, at)
                places.popleft()
                place += 1
        finally:
            with contextlib.ExitStack() as stack:
                for unsent in filter(None, places):
                    stack.callback(transport.slots.release, unsent.slot)
                    stack.callback(self._end_gather, unsent)

    def _decide(self, transport: SendingTransport, under_way: UnderWay, is_idle: bool) -> _Announced | None:
        """Return the chunk to announce next, or None to announce a signal.

        Only a chunk that has its slot is announced. The receiver acquires a slot for it, and must not wait for a slot
        here: the pools of two processes could wait for each other.
        """
        self._next = self._next or self._take_ready()
        if self._next is None and is_idle:
            under_way.complete_all()
            self._next = self._wait_ready()
        if self._next is None:
            return None
        slot = transport.slots.acquire(0)
        while slot is None and under_way:
            under_way.complete_one()
            slot = transport.slots.acquire(0)
        if slot is None and is_idle:
            slot = transport.slots.acquire(self._heartbeat_s)
        if slot is None:
            return None
        (queue, ready), self._next = self._next, None
        announced = _Announced(queue, ready, slot)
        if slot.is_on_gpu:
            try:
                self._begin_gather(announced)
            except BaseException:
                transport.slots.release(slot)
                raise
        return announced

    def _send(self, transport: SendingTransport, under_way: UnderWay, due: _Announced, at: Place) -> None:
        queue, chunk, slot = due.queue, due.ready.chunk, due.slot
        if not slot.is_on_gpu:
            self._begin_gather(due)
        checksum = self._end_gather(due)
        if checksum is not None:
            header = queue.header(due.ready.seq, chunk, checksum, at)
        else:
            header = h.Header(h.VOID, *at, num_bytes=chunk.num_bytes)
        slot.write_header(header.pack())
        under_way.add(transport.send_chunk(slot, chunk.num_bytes), slot)

    def _begin_gather(self, announced: _Announced) -> None:
        """Start the copy, unless the transfer was aborted and its blocks must not be read."""
        queue = announced.queue
        if not self._machine.ask(lambda state: state.gather_begins(queue.generation)):
            return
        try:
            announced.move = queue.gather(announced.ready, announced.slot)
        except BaseException:
            self._gather_ended(queue)
            raise

    def _end_gather(self, announced: _Announced) -> int | None:
        """Wait for the copy and return the checksum; None if none was started."""
        move, announced.move = announced.move, None
        if move is None:
            return None
        try:
            return move.end()
        finally:
            self._gather_ended(announced.queue)

    def _gather_ended(self, queue: ChunkQueue) -> None:
        now = time.monotonic()
        self._machine.apply_in_thread(lambda state: state.gather_ends(queue.generation, now))

    def _take_ready(self) -> tuple[ChunkQueue, ReadyChunk] | None:
        """Return the next ready chunk, or None; transfers are served round robin."""
        with self._changed:
            return self._next_ready()

    def _wait_ready(self) -> tuple[ChunkQueue, ReadyChunk] | None:
        """Wait for the next ready chunk; returns None when it is time for a heartbeat, or to stop."""
        found: list[tuple[ChunkQueue, ReadyChunk]] = []

        def look() -> bool:
            if not self._stopped and (ready := self._next_ready()):
                found.append(ready)
            return self._stopped or bool(found)

        with self._changed:
            self._changed.wait_for(look, self._heartbeat_s)
        return found[0] if found else None

    def _next_ready(self) -> tuple[ChunkQueue, ReadyChunk] | None:
        for _ in range(len(self._queues)):
            queue = self._queues[0]
            ready = queue.take_ready()
            if queue.is_exhausted:
                self._queues.popleft()
            else:
                self._queues.rotate(-1)
            if ready is not None:
                return queue, ready
        return None

"""The sending end of a link: ready chunks of many transfers leave in turn, each announced LOOKAHEAD places ahead.

    place       n       n+1       n+2
    message   signal   chunk a  |  decided now; announced by the message at n
                                `-- next_bytes: its payload, 0 for a signal

A place that was announced is always filled: with a VOID chunk if its transfer has been given up meanwhile. So giving up
leaves nothing behind on the link. An idle link carries a signal every `heartbeat_s`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstore.transfer.copy.checksum import new_checksum
from kvstore.transfer.protocol import chunk_header as h
from kvstore.transfer.protocol.plan import EVERY_LAYER

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from baton.engine.core.runner import Fence
    from baton.messages import Ticket
    from kvstore.transfer.copy.blocks import BlockCopier
    from kvstore.transfer.pipeline.driven import DrivenMachine
    from kvstore.transfer.protocol.plan import Chunk, Plan
    from kvstore.transfer.protocol.send_state import Instruction, SendState
    from kvstore.transfer.transport.base import Operation, SendingTransport
    from kvstore.transfer.transport.faults import FaultInjector
    from kvstore.transfer.transport.staging import Slot


class ChunkQueue:
    """One transfer's chunks, and how far the engine has come with them. Any thread."""

    def __init__(self, ticket: Ticket, plan: Plan, rows: BlockCopier, checked: bool) -> None:
        self.generation = ticket.generation
        self.plan = plan
        self.wake: Callable[[], None] = _nobody
        """Called when more chunks have become ready."""
        self.began_s = 0.0
        """When the first chunk was gathered, on the monotonic clock; 0: not yet."""
        self._rows = rows
        self._checked = checked
        self._transfer = h.transfer_hash(ticket.transfer_id)
        self._lock = threading.Lock()
        self._spans = _spans(plan)
        """Chunks that are not ready yet."""
        self._ready: deque[int] = deque()
        self._unsent_bytes = 0
        self._num_layers = 1 + max(max(group.layers) for group in plan.src.groups)
        self._tokens_in_all_layers = 0
        self._step = (0, 0)
        """Tokens that the current step ends with, and layers that it has done."""
        self._fence: Fence | None = None
        self._finished = False

    @property
    def unsent_bytes(self) -> int:
        """Of chunks that are computed and not gathered."""
        return self._unsent_bytes

    @property
    def is_exhausted(self) -> bool:
        return not self._spans and not self._ready

    def advance(self, num_tokens: int, num_layers: int, fence: Fence | None) -> None:
        """The first `num_tokens` tokens are computed in the model's first `num_layers` layers."""
        with self._lock:
            self._fence = fence or self._fence
            self._step = (num_tokens, num_layers)
            if num_layers >= self._num_layers:
                self._tokens_in_all_layers = max(self._tokens_in_all_layers, num_tokens)
            self._find_ready()
        self.wake()

    def finish(self) -> None:
        """Everything is computed, states included."""
        with self._lock:
            self._finished = True
            self._find_ready()
        self.wake()

    def take_ready(self) -> tuple[int, Chunk] | None:
        """The next chunk that can be gathered, with its number."""
        with self._lock:
            if not self._ready:
                return None
            seq = self._ready.popleft()
            chunk = self.plan.chunks[seq]
            self._unsent_bytes -= chunk.num_bytes
            return seq, chunk

    def gather(self, chunk: Chunk, payload: torch.Tensor) -> int:
        """Fills `payload`, and returns its checksum: 0 where chunks are not checked."""
        self.began_s = self.began_s or time.monotonic()
        checksum = new_checksum(payload.device) if self._checked else None
        self._rows.gather(chunk, payload, self._fence, checksum)
        return checksum.digest() if checksum else 0

    def header(self, seq: int, chunk: Chunk, checksum: int, epoch: int, place: int, next_bytes: int) -> h.Header:
        return h.Header(
            epoch=epoch,
            place=place,
            next_bytes=next_bytes,
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

    def _find_ready(self) -> None:
        """Spans become ready in order, and so do the chunks of each; a step may work on several spans at once."""
        for span in self._spans:
            while span.chunks and self._is_ready(span.num_tokens, span.chunks[0][1]):
                seq, _ = span.chunks.popleft()
                self._ready.append(seq)
                self._unsent_bytes += self.plan.chunks[seq].num_bytes
            if span.num_tokens > max(self._step[0], self._tokens_in_all_layers) and not self._finished:
                break
        while self._spans and not self._spans[0].chunks:
            self._spans.popleft()

    def _is_ready(self, num_tokens: int, num_layers: int) -> bool:
        if self._finished or num_layers == EVERY_LAYER:
            return self._finished
        is_in_step = num_tokens <= self._step[0] and num_layers <= self._step[1]
        return is_in_step or num_tokens <= self._tokens_in_all_layers


@dataclass(slots=True)
class _Span:
    """Chunks that need the same tokens."""

    num_tokens: int
    chunks: deque[tuple[int, int]]
    """Number, and the layers that it needs; in rising order of the layers."""


def _spans(plan: Plan) -> deque[_Span]:
    """In rising order of the tokens."""
    spans: dict[int, _Span] = {}
    for seq, chunk in enumerate(plan.chunks):
        num_tokens, num_layers = plan.ready_at(chunk)
        spans.setdefault(num_tokens, _Span(num_tokens, deque())).chunks.append((seq, num_layers))
    return deque(spans[num_tokens] for num_tokens in sorted(spans))


def _nobody() -> None:
    """Nobody waits for chunks of a transfer that is not granted yet."""


class _Due(NamedTuple):
    """A chunk that has been announced."""

    outbound: ChunkQueue
    seq: int
    chunk: Chunk
    slot: Slot


class _UnderWay:
    """Operations that have begun, in order, and the slots that they hold."""

    def __init__(self, link: SendingTransport) -> None:
        self._link = link
        self._operations: deque[tuple[Operation, Slot | None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._operations)

    def add(self, operation: Operation, slot: Slot | None) -> None:
        self._operations.append((operation, slot))

    def complete_one(self) -> None:
        operation, slot = self._operations[0]
        operation.wait()
        self._operations.popleft()
        if slot is not None:
            self._link.slots.release(slot)

    def complete_all(self) -> None:
        while self._operations:
            self.complete_one()

    def give_up(self) -> None:
        """The link has failed, or is about to be closed."""
        for _, slot in self._operations:
            if slot is not None:
                self._link.slots.discard(slot)


class SendLoop:
    """TransportLoop of a sender's lane. The event loop adds granted transfers.

    Args:
        epoch: of the pair; known once the link is opened.
    """

    def __init__(
        self,
        epoch: Callable[[], int],
        book: DrivenMachine[SendState, Instruction],
        faults: FaultInjector,
        heartbeat_s: float,
    ) -> None:
        self._epoch = epoch
        self._book = book
        self._faults = faults
        self._heartbeat_s = heartbeat_s
        self._changed = threading.Condition()
        self._outbounds: deque[ChunkQueue] = deque()
        self._next: tuple[ChunkQueue, int, Chunk] | None = None
        """Ready, and not announced for want of a slot."""
        self._stopped = False

    # -- any thread --------------------------------------------------------------------------------------------------

    def add(self, outbound: ChunkQueue) -> None:
        outbound.wake = self._wake
        with self._changed:
            self._outbounds.append(outbound)
            self._changed.notify()

    def drop(self, outbound: ChunkQueue) -> None:
        """The transfer has ended: no more of its chunks are begun."""
        with self._changed:
            if outbound in self._outbounds:
                self._outbounds.remove(outbound)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    # -- the lane ----------------------------------------------------------------------------------------------------

    def run(self, link: SendingTransport) -> None:
        under_way = _UnderWay(link)
        try:
            self._run(link, under_way)
        finally:
            under_way.give_up()

    def _run(self, link: SendingTransport, under_way: _UnderWay) -> None:
        places: deque[_Due | None] = deque([None] * h.LOOKAHEAD)
        place = 0
        try:
            while True:
                due = places[0]
                upcoming = self._decide(link, under_way, is_idle=not any(places))
                places.append(upcoming)
                if self._stopped:
                    return
                next_bytes = upcoming.chunk.num_bytes if upcoming else 0
                if due is None:
                    signal = h.Header(0, self._epoch(), place, next_bytes)
                    under_way.add(link.send_signal(signal.pack()), None)
                else:
                    self._send(link, under_way, due, place, next_bytes)
                places.popleft()
                place += 1
        finally:
            for unsent in filter(None, places):
                link.slots.release(unsent.slot)

    def _decide(self, link: SendingTransport, under_way: _UnderWay, is_idle: bool) -> _Due | None:
        """What is announced next; None: nothing is.

        Only a chunk that has its slot is announced. The receiver takes one of its own for it, which must not wait for
        a slot here: two processes' pools could wait for each other.
        """
        self._next = self._next or self._take_ready()
        if self._next is None and is_idle:
            under_way.complete_all()
            self._next = self._wait_ready()
        if self._next is None:
            return None
        slot = link.slots.acquire(0)
        while slot is None and under_way:
            under_way.complete_one()
            slot = link.slots.acquire(0)
        if slot is None and is_idle:
            slot = link.slots.acquire(self._heartbeat_s)
        if slot is None:
            return None
        (outbound, seq, chunk), self._next = self._next, None
        return _Due(outbound, seq, chunk, slot)

    def _send(self, link: SendingTransport, under_way: _UnderWay, due: _Due, place: int, next_bytes: int) -> None:
        outbound, chunk, slot = due.outbound, due.chunk, due.slot
        payload = slot.payload(chunk.num_bytes)
        checksum = self._gather(outbound, chunk, payload)
        if checksum is not None:
            header = outbound.header(due.seq, chunk, checksum, self._epoch(), place, next_bytes)
            self._faults.spoil(chunk, payload)
        else:
            header = h.Header(h.VOID, self._epoch(), place, next_bytes, num_bytes=chunk.num_bytes)
        slot.write_header(header.pack())
        under_way.add(link.send_chunk(slot, chunk.num_bytes), slot)

    def _gather(self, outbound: ChunkQueue, chunk: Chunk, payload: torch.Tensor) -> int | None:
        """The checksum. None: the transfer has been given up, and its blocks are not to be read."""
        if not self._book.ask(lambda offers: offers.gather_begins(outbound.generation)):
            return None
        try:
            return outbound.gather(chunk, payload)
        finally:
            now = time.monotonic()
            self._book.apply_in_thread(lambda offers: offers.gather_ends(outbound.generation, now))

    def _take_ready(self) -> tuple[ChunkQueue, int, Chunk] | None:
        """The next ready chunk; transfers take turns."""
        with self._changed:
            return self._next_ready()

    def _wait_ready(self) -> tuple[ChunkQueue, int, Chunk] | None:
        """The same, once there is one; None when it is time for a heartbeat, or to stop."""
        found: list[tuple[ChunkQueue, int, Chunk]] = []

        def look() -> bool:
            if not self._stopped and (ready := self._next_ready()):
                found.append(ready)
            return self._stopped or bool(found)

        with self._changed:
            self._changed.wait_for(look, self._heartbeat_s)
        return found[0] if found else None

    def _next_ready(self) -> tuple[ChunkQueue, int, Chunk] | None:
        for _ in range(len(self._outbounds)):
            outbound = self._outbounds[0]
            ready = outbound.take_ready()
            if outbound.is_exhausted:
                self._outbounds.popleft()
            else:
                self._outbounds.rotate(-1)
            if ready is not None:
                return outbound, *ready
        return None

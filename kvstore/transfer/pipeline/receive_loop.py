"""Receiving end of a transport: announced messages are posted, verified, and written if the machine allows it.

LOOKAHEAD messages are posted at any time. On an idle transport they are signals of 64 bytes, which fail at once when
the peer dies. A chunk is only posted once its sender has it ready, so its operation timeout does not start earlier.

On a GPU, the copy of a chunk into the blocks overlaps with the receipt of the next one. At most two copies are in
progress, and none while there is nothing to receive. In main memory, a chunk is in place before the next one is
processed.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from baton.errors import TransferCorrupted, TransferError, TransferTimeout
from kvstore.transfer.copy.blocks import DoneMove
from kvstore.transfer.copy.checksum import Xxh3
from kvstore.transfer.protocol import chunk_header as h

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.messages import Ticket
    from kvstore.transfer.copy.blocks import BlockCopier, Move
    from kvstore.transfer.pipeline.driven import DrivenMachine
    from kvstore.transfer.protocol.plan import Chunk
    from kvstore.transfer.protocol.receive_state import ReceiveInstruction, ReceiveState
    from kvstore.transfer.transport.base import Operation, ReceivingTransport, SignalOperation
    from kvstore.transfer.transport.staging import Slot


class ChunkWriter:
    """Writer of the chunks of one source into the blocks of one transfer.

    Args:
        connection: the number of the source's connection.
        checked: whether chunks carry checksums.
    """

    def __init__(
        self,
        ticket: Ticket,
        connection: int,
        copier: BlockCopier,
        machine: DrivenMachine[ReceiveState, ReceiveInstruction],
        checked: bool,
    ) -> None:
        self.plan = copier.plan
        self._connection = connection
        self._transfer_id = ticket.transfer_id
        self._generation = ticket.generation
        self._transfer = h.transfer_hash(ticket.transfer_id)
        self._copier = copier
        self._machine = machine
        self._checked = checked

    def begin(self, header: h.Header, slot: Slot) -> Move | None:
        """Start to write a chunk into the blocks if it matches the plan and the transfer still holds them.

        Returns:
            The copy, to be passed to `end`; None if the chunk is dropped.
        """
        try:
            chunk = self._chunk(header)
        except TransferCorrupted as error:
            self._fail(error)
            return None
        if not self._machine.ask(lambda state: state.scatter_begins(self._connection, self._generation, header.seq)):
            return None
        try:
            return self._scatter(chunk, slot)
        except BaseException as error:
            self._fail(TransferError(f"a chunk could not be written into the cache: {error!r}"))
            self._scatter_ended()
            raise

    def end(self, header: h.Header, move: Move) -> None:
        """Wait until the earliest started chunk is in place, and only then count it as received.

        Its checksum was computed while it was written: the blocks are not read before every chunk has passed.
        """
        try:
            checksum = move.end()
            if self._checked:
                h.verify_checksum(header, checksum)
        except TransferCorrupted as error:
            self._fail(error)
        except BaseException as error:
            self._fail(TransferError(f"a chunk could not be written into the cache: {error!r}"))
            raise
        finally:
            self._scatter_ended()

    def _chunk(self, header: h.Header) -> Chunk:
        if header.seq >= len(self.plan.chunks):
            raise TransferCorrupted(f"there is no chunk {header.seq} in generation {self._generation}")
        chunk = self.plan.chunks[header.seq]
        h.verify(header, chunk, self._transfer, self._checked)
        return chunk

    def _scatter(self, chunk: Chunk, slot: Slot) -> Move:
        payload = slot.payload(chunk.num_bytes)
        if slot.is_on_gpu:
            return self._copier.begin_scatter(chunk, payload, self._checked)
        checksum = Xxh3() if self._checked else None
        self._copier.scatter(chunk, payload, checksum)
        return DoneMove(checksum.digest() if checksum else 0)

    def _scatter_ended(self) -> None:
        self._machine.apply_in_thread(lambda state: state.scatter_ends(self._connection, self._generation))

    def _fail(self, error: TransferError) -> None:
        self._machine.apply_in_thread(lambda state: state.fail(self._transfer_id, self._generation, error))


class _Posted(NamedTuple):
    operation: Operation | SignalOperation
    slot: Slot | None
    num_bytes: int


class _Writing(NamedTuple):
    """A chunk that is being written from its slot into the blocks."""

    writer: ChunkWriter
    header: h.Header
    move: Move
    slot: Slot


class ReceiveLoop:
    """Loop of a receiver's transport thread.

    Args:
        epoch: the connection's epoch, which every header must carry.
        writers: the transfers that may send on this transport, by generation; the event loop changes it.
        slot_bytes: the largest payload of a chunk.
    """

    def __init__(self, epoch: int, writers: Mapping[int, ChunkWriter], slot_bytes: int, slot_wait_s: float) -> None:
        self.num_fenced = 0
        """Number of dropped chunks of transfers that have ended."""
        self._epoch = epoch
        self._writers = writers
        self._slot_bytes = slot_bytes
        self._slot_wait_s = slot_wait_s
        self._stopped = False

    def stop(self) -> None:
        """End `run` before its next message. Idempotent."""
        self._stopped = True

    def run(self, transport: ReceivingTransport) -> None:
        """Receive until `stop`, or until the transport fails with TransferError."""
        posted: deque[_Posted] = deque()
        writing: deque[_Writing] = deque()
        try:
            self._run(transport, posted, writing)
        finally:
            with contextlib.ExitStack() as stack:
                for message in posted:
                    if message.slot is not None:
                        stack.callback(transport.slots.discard, message.slot)
                while writing:  # the last started one is pushed first, so it ends last
                    stack.callback(_end, transport, writing.pop())

    def _run(self, transport: ReceivingTransport, posted: deque[_Posted], writing: deque[_Writing]) -> None:
        announced = deque([0] * h.LOOKAHEAD)
        place = 0
        while not self._stopped:
            self._post(transport, announced, posted, writing)
            if writing and not transport.has_next():
                _end_all(transport, writing)
            message = posted[0]
            message.operation.wait()
            posted.popleft()
            begun: _Writing | None = None
            try:
                header = h.unpack(_read_header(message), self._epoch, place, message.num_bytes, self._slot_bytes)
                announced.append(header.next_bytes)
                if message.slot is not None and not header.flags & h.VOID:
                    begun = self._begin(header, message.slot)
            finally:
                if message.slot is not None and begun is None:
                    transport.settle()
                    transport.slots.release(message.slot)
            if begun is not None:
                writing.append(begun)
                if len(writing) > begun.slot.is_on_gpu:
                    _end(transport, writing.popleft())
            place += 1

    def _post(
        self,
        transport: ReceivingTransport,
        announced: deque[int],
        posted: deque[_Posted],
        writing: deque[_Writing],
    ) -> None:
        """Post announced messages in order, as far as there are slots. Waits for a slot only while it holds none."""
        while announced:
            num_bytes = announced[0]
            if num_bytes == 0:
                posted.append(_Posted(transport.recv_signal(), None, 0))
            else:
                slot = transport.slots.acquire(0)
                if slot is None and not posted:
                    _end_all(transport, writing)
                    slot = transport.slots.acquire(self._slot_wait_s)
                if slot is None:
                    if posted:
                        return
                    raise TransferTimeout(f"no staging slot came free within {self._slot_wait_s:g} s")
                try:
                    posted.append(_Posted(transport.recv_chunk(slot, num_bytes), slot, num_bytes))
                except BaseException:
                    transport.slots.release(slot)
                    raise
            announced.popleft()

    def _begin(self, header: h.Header, slot: Slot) -> _Writing | None:
        writer = self._writers.get(header.generation)
        if writer is None:
            self.num_fenced += 1
            return None
        move = writer.begin(header, slot)
        return _Writing(writer, header, move, slot) if move is not None else None


def _end(transport: ReceivingTransport, writing: _Writing) -> None:
    try:
        writing.writer.end(writing.header, writing.move)
    finally:
        transport.slots.release(writing.slot)


def _end_all(transport: ReceivingTransport, writing: deque[_Writing]) -> None:
    """Finish all copies in progress, before the thread waits for something else."""
    while writing:
        _end(transport, writing.popleft())
    transport.settle()


def _read_header(message: _Posted) -> bytes:
    if message.slot is not None:
        return message.slot.read_header()
    operation: SignalOperation = message.operation  # type: ignore[assignment]
    return operation.header

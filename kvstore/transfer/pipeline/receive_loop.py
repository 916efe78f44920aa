"""The receiving end of a link: what the headers announce is posted, verified, and written where the ledger allows.

LOOKAHEAD messages are posted at any time. On an idle link they are signals, 64 bytes each, which fail at once when the
peer dies; a chunk is only posted once its sender has it ready, so its time does not begin before.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from baton.errors import TransferCorrupted, TransferError, TransferTimeout
from kvstore.transfer.copy.checksum import new_checksum
from kvstore.transfer.protocol import chunk_header as h

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kvstore.transfer.copy.blocks import BlockCopier
    from kvstore.transfer.pipeline.driven import DrivenMachine
    from kvstore.transfer.protocol.plan import Chunk, Plan
    from kvstore.transfer.protocol.receive_state import Instruction, ReceiveState
    from kvstore.transfer.transport.base import Operation, ReceivingTransport, SignalOperation
    from kvstore.transfer.transport.staging import Slot


class ChunkWriter:
    """One source's part of one transfer: where its chunks belong."""

    def __init__(
        self,
        session: int,
        transfer_id: str,
        generation: int,
        plan: Plan,
        rows: BlockCopier,
        book: DrivenMachine[ReceiveState, Instruction],
        checked: bool,
    ) -> None:
        self.plan = plan
        self._session = session
        self._transfer_id = transfer_id
        self._generation = generation
        self._transfer = h.transfer_hash(transfer_id)
        self._rows = rows
        self._book = book
        self._checked = checked

    def take(self, header: h.Header, slot: Slot) -> None:
        """Writes a chunk into the blocks if it is what it should be and they are still the transfer's.

        It is checked while it is written: nobody reads the blocks before every chunk has passed.
        """
        try:
            chunk = self._chunk(header)
        except TransferCorrupted as error:
            self._fail(error)
            return
        if not self._book.ask(lambda ledger: ledger.scatter_begins(self._session, self._generation, header.seq)):
            return
        try:
            self._scatter(header, chunk, slot.payload(chunk.num_bytes))
        except TransferCorrupted as error:
            self._fail(error)
        except BaseException as error:
            self._fail(TransferError(f"a chunk could not be written into the cache: {error!r}"))
            raise
        finally:
            self._book.apply_in_thread(lambda ledger: ledger.scatter_ends(self._session, self._generation))

    def _chunk(self, header: h.Header) -> Chunk:
        if header.seq >= len(self.plan.chunks):
            raise TransferCorrupted(f"there is no chunk {header.seq} in generation {self._generation}")
        chunk = self.plan.chunks[header.seq]
        h.verify(header, chunk, self._transfer, self._checked)
        return chunk

    def _scatter(self, header: h.Header, chunk: Chunk, payload: torch.Tensor) -> None:
        checksum = new_checksum(payload.device) if self._checked else None
        self._rows.scatter(chunk, payload, checksum)
        if checksum is not None:
            h.verify_checksum(header, checksum.digest())

    def _fail(self, error: TransferError) -> None:
        self._book.apply_in_thread(lambda ledger: ledger.fail(self._transfer_id, self._generation, error))


class _Posted(NamedTuple):
    operation: Operation | SignalOperation
    slot: Slot | None
    num_bytes: int


class ReceiveLoop:
    """TransportLoop of a receiver's lane.

    Args:
        find: the transfer of a generation that may send on this link, or None; called by the lane.
    """

    def __init__(
        self, epoch: int, find: Callable[[int], ChunkWriter | None], slot_bytes: int, slot_wait_s: float
    ) -> None:
        self.num_fenced = 0
        """Chunks of transfers that are over, dropped."""
        self._epoch = epoch
        self._find = find
        self._slot_bytes = slot_bytes
        self._slot_wait_s = slot_wait_s
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def run(self, link: ReceivingTransport) -> None:
        posted: deque[_Posted] = deque()
        try:
            self._run(link, posted)
        finally:
            for message in posted:
                if message.slot is not None:
                    link.slots.discard(message.slot)

    def _run(self, link: ReceivingTransport, posted: deque[_Posted]) -> None:
        announced = deque([0] * h.LOOKAHEAD)
        place = 0
        while not self._stopped:
            self._post(link, announced, posted)
            message = posted[0]
            message.operation.wait()
            posted.popleft()
            try:
                header = h.unpack(_read_header(message), self._epoch, place, message.num_bytes, self._slot_bytes)
                announced.append(header.next_bytes)
                if message.slot is not None and not header.flags & h.VOID:
                    self._take(header, message.slot)
            finally:
                if message.slot is not None:
                    link.slots.release(message.slot)
            place += 1

    def _post(self, link: ReceivingTransport, announced: deque[int], posted: deque[_Posted]) -> None:
        """Posts what is announced, in order, as far as there are slots. Waits for one only when holding none."""
        while announced:
            num_bytes = announced[0]
            if num_bytes == 0:
                posted.append(_Posted(link.recv_signal(), None, 0))
            else:
                slot = link.slots.acquire(0 if posted else self._slot_wait_s)
                if slot is None:
                    if posted:
                        return
                    raise TransferTimeout(f"no staging slot came free within {self._slot_wait_s:g} s")
                try:
                    posted.append(_Posted(link.recv_chunk(slot, num_bytes), slot, num_bytes))
                except BaseException:
                    link.slots.release(slot)
                    raise
            announced.popleft()

    def _take(self, header: h.Header, slot: Slot) -> None:
        inbound = self._find(header.generation)
        if inbound is None:
            self.num_fenced += 1
        else:
            inbound.take(header, slot)


def _read_header(message: _Posted) -> bytes:
    if message.slot is not None:
        return message.slot.read_header()
    operation: SignalOperation = message.operation  # type: ignore[assignment]
    return operation.header

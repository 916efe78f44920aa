"""The data of one transfer on the receiving side: post receives, verify, and write what the ledger allows."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from baton.errors import TransferCorrupted, TransferError
from kvstore.transfer import header as h
from kvstore.transfer.ledger import State
from kvstore.transfer.staging import checksum_of, read_header

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from kvstore.transfer.ledger import Instruction, Ledger
    from kvstore.transfer.link import Link, Operation, Slot
    from kvstore.transfer.plan import Chunk
    from kvstore.transfer.staging import Rows


class Inbound:
    """Made by the event loop, run once by a pair's lane.

    Shares the ledger with the event loop under its lock. `emit` is called under that lock too, so that the loop carries
    out what the ledger decides in the order in which it decided.

    A transfer that fails here goes on being received, into staging only, until the sender ends it: what it sends must
    meet a receive (see `Outbound`).
    """

    def __init__(
        self,
        transfer_id: str,
        generation: int,
        chunks: tuple[Chunk, ...],
        rows: Rows,
        checked: bool,
        ledger: Ledger,
        ledger_lock: threading.Lock,
        emit: Callable[[list[Instruction]], None],
    ) -> None:
        self._transfer_id = transfer_id
        self._generation = generation
        self._chunks = chunks
        self._rows = rows
        self._checked = checked
        self._ledger = ledger
        self._ledger_lock = ledger_lock
        self._emit = emit

    def run(self, link: Link, slots: Sequence[Slot], epoch: int, grant: Callable[[], None]) -> None:
        """Posts the first receives, calls `grant`, and returns once nothing is posted any more.

        Without a grant where the transfer has failed before: then nothing was posted, and nothing will be sent.

        Raises:
            TransferError: the link failed, and with it the pair.
        """
        with self._ledger_lock:
            if self._ledger.state(self._generation) is not State.RECEIVING:
                return
        window = len(slots)
        posted: deque[Operation] = deque()
        for seq in range(min(window, len(self._chunks))):
            posted.append(link.recv(slots[seq].message(self._chunks[seq].num_bytes)))
        grant()
        posting = True
        for seq, chunk in enumerate(self._chunks):
            if not posted:
                return
            posted.popleft().wait()
            slot = slots[seq % window]
            data = read_header(slot)
            if h.gives_up(data):
                posting = False
                self._fail(TransferError("the sender gave the transfer up"))
            else:
                self._take(seq, chunk, slot, data, epoch)
            if posting and seq + window < len(self._chunks):
                posted.append(link.recv(slot.message(self._chunks[seq + window].num_bytes)))

    def _take(self, seq: int, chunk: Chunk, slot: Slot, data: bytes, epoch: int) -> None:
        try:
            checksum = checksum_of(slot.payload(chunk.num_bytes)) if self._checked else 0
            flags = h.CHECKED if self._checked else 0
            expected = h.header_for(chunk, seq, epoch, self._transfer_id, self._generation, flags, checksum)
            h.verify(data, expected)
        except TransferCorrupted as error:
            self._fail(error)
            return
        with self._ledger_lock:
            if not self._ledger.scatter_begins(self._generation):
                return
        complete = False
        try:
            self._rows.scatter(chunk, slot)
            complete = True
        finally:
            with self._ledger_lock:
                if not complete:
                    broken = TransferError("a chunk could not be written into the cache")
                    self._emit(self._ledger.fail(self._transfer_id, self._generation, broken))
                self._emit(self._ledger.scatter_ends(self._generation, seq))

    def _fail(self, error: TransferError) -> None:
        with self._ledger_lock:
            if self._ledger.state(self._generation) is State.RECEIVING:
                self._emit(self._ledger.fail(self._transfer_id, self._generation, error))

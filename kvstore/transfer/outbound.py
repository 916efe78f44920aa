"""The data of one transfer on the sending side: gather, seal, send, `window` chunks at a time."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from kvstore.transfer import header as h
from kvstore.transfer.staging import checksum_of, write_header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from baton.messages import Ticket
    from kvstore.transfer.faults import FaultInjector
    from kvstore.transfer.link import Link, Operation, Slot
    from kvstore.transfer.plan import Chunk
    from kvstore.transfer.staging import Rows


class Outbound:
    """Made by the event loop, run once by a pair's lane.

    A link is a queue of receives already posted, so a transfer that is given up must still meet them. The receiver
    posts chunk k + window only once it has seen chunk k; when chunk k says GIVEN_UP it posts no more. So `window`
    chunks with that flag, in their planned sizes, leave nothing behind on the link, whatever the transfer's length:

        posted when chunk k arrives   | k | k+1 | ... | k+window-1 |
        sent after stop()             | k | k+1 | ... | k+window-1 |   each GIVEN_UP, payload meaningless
    """

    def __init__(self, ticket: Ticket, chunks: tuple[Chunk, ...], rows: Rows, checked: bool) -> None:
        self.ticket = ticket
        self.chunks = chunks
        self._rows = rows
        self._checked = checked
        self._gathering = threading.Lock()
        self._stopped = False

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)

    def stop(self) -> None:
        """Once it returns, the cache's blocks are not read any more. Waits for one gather at most."""
        with self._gathering:
            self._stopped = True

    def run(self, link: Link, slots: Sequence[Slot], epoch: int, faults: FaultInjector) -> None:
        """Returns once the receiver has taken all chunks, or those that it had posted when this was stopped.

        Raises:
            TransferError: the link failed, and with it the pair.
        """
        window = len(slots)
        in_flight: deque[Operation] = deque()
        fillers_left: int | None = None
        for seq, chunk in enumerate(self.chunks):
            if fillers_left == 0:
                break
            if len(in_flight) == window:
                in_flight.popleft().wait()
            slot = slots[seq % window]
            if fillers_left is None and not self._gather(chunk, slot):
                fillers_left = window
            if fillers_left is None:
                self._seal(seq, chunk, slot, epoch, h.CHECKED if self._checked else 0)
                faults.spoil(chunk, slot.payload(chunk.num_bytes))
            else:
                fillers_left -= 1
                self._seal(seq, chunk, slot, epoch, h.GIVEN_UP)
            in_flight.append(link.send(slot.message(chunk.num_bytes)))
        for operation in in_flight:
            operation.wait()

    def _gather(self, chunk: Chunk, slot: Slot) -> bool:
        with self._gathering:
            if not self._stopped:
                self._rows.gather(chunk, slot)
            return not self._stopped

    def _seal(self, seq: int, chunk: Chunk, slot: Slot, epoch: int, flags: int) -> None:
        checksum = checksum_of(slot.payload(chunk.num_bytes)) if flags & h.CHECKED else 0
        ids = (self.ticket.transfer_id, self.ticket.generation)
        write_header(slot, h.header_for(chunk, seq, epoch, *ids, flags, checksum).pack())

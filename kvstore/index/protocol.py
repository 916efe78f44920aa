"""The index: who owns which prefix.

Ownership is a hint. The worker's own block table is the authority, so a stale, empty or lost index makes answers
slower, never wrong.

    worker                                  router
    BlockEvents -> IndexPublisher -> apply | read, state, snapshot -> MirrorFollower -> Mirror -> lookup

Each worker writes under its own epoch and numbers its events; the index refuses a foreign epoch and answers RESYNC to a
hole in the numbers. Each router reads the one stream at its own cursor, so replicas need no coordination.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.index.events import BlockEvent, Cursor, IndexAnswer, IndexState


class PrefixIndex(Protocol):
    """The store of the index.

    Every method raises `StoreUnavailable` when the store cannot be reached; whether it had an effect is unknown then.
    """

    async def apply(self, event: BlockEvent) -> IndexAnswer:
        """Applies the event to the worker's set and appends it to the stream: both or neither.

        RESYNC when `event.seq` does not follow the last one, when a snapshot's parts are not all there, and while
        the worker has no lease (the store lost its state and the lease is not renewed yet).

        Raises:
            Fenced: a newer epoch holds the worker's lease.
        """

    async def position(self, worker_id: str, epoch: int) -> int:
        """Returns the seq of the last applied event; 0 once the set has expired or was lost."""

    async def state(self) -> IndexState:
        """Returns who owns anything, up to which event, and where the stream ends."""

    async def snapshot(self, worker_id: str, epoch: int) -> tuple[int, set[bytes]]:
        """Returns a seq and the entries; exact once all events after seq are applied to them, some perhaps again."""

    async def read(self, cursor: Cursor, wait_s: float) -> Sequence[tuple[Cursor, BlockEvent | None]]:
        """Returns at most `READ_EVENTS` events after `cursor`; waits for the first up to `wait_s`, perhaps less.

        None stands for one that cannot be read.
        """

    async def close(self) -> None: ...


READ_EVENTS = 128
"""Most events that are read at once."""

"""The index: which worker owns which prefix.

Ownership is a hint. The worker's block table is the authority, so a stale, empty or lost index makes responses slower,
never wrong.

    worker                                  router
    BlockEvents -> IndexPublisher -> apply | read, state, snapshot -> MirrorFollower -> Mirror -> lookup

Each worker writes under its own epoch and numbers its events. The index rejects a foreign epoch and answers RESYNC to a
gap in the numbers. Each router reads the one stream at its own cursor, so replicas need no coordination.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.index.events import BlockEvent, Cursor, IndexAnswer, IndexState


class PrefixIndex(Protocol):
    """Store of the index.

    Every method raises `StoreUnavailable` when the store cannot be reached; its effect is then unknown.
    """

    async def apply(self, event: BlockEvent) -> IndexAnswer:
        """Apply the event to the worker's set and append it to the stream: both or neither.

        Returns RESYNC if `event.seq` does not follow the last one, if a snapshot's parts are incomplete, and while the
        worker has no lease (the store lost its state and the lease is not renewed yet).

        Raises:
            Fenced: a newer epoch holds the worker's lease.
        """

    async def position(self, worker_id: str, epoch: int) -> int:
        """Return the seq of the last applied event; 0 if the set has expired or was lost."""

    async def state(self) -> IndexState:
        """Return the position of each worker that owns blocks, and the tip of the stream."""

    async def snapshot(self, worker_id: str, epoch: int) -> tuple[int, set[bytes]]:
        """Return a seq and the entries; exact after all events after seq are applied to them, some perhaps twice."""

    async def read(self, cursor: Cursor, wait_s: float) -> Sequence[tuple[Cursor, BlockEvent | None]]:
        """Return at most `READ_EVENTS` events after `cursor`; wait for the first up to `wait_s`, perhaps less.

        None stands for an event that cannot be read.
        """

    async def close(self) -> None: ...


READ_EVENTS = 128
"""Maximum number of events that are read at once."""

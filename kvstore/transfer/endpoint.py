"""gRPC service through which other workers reach a worker's KV, and the counts of all its transfers.

Every worker has one, whatever its role: it sends and receives KV transfers, pulls prefixes, and serves pulls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from baton import wire
from baton.blocks import HASH_BLOCK
from baton.cluster import OpenConnections, TransferCounts
from baton.errors import WorkerDraining
from baton.trust import Party, check_permit, open_permit
from baton.v1 import kv_pb2, kv_pb2_grpc
from kvstore.transfer.copy.blocks import choose_copies
from kvstore.transfer.device import LOSSES
from kvstore.transfer.prefix_pull import PrefixPuller
from kvstore.transfer.protocol.plan import begins_of
from kvstore.transfer.receiver import KvReceiver
from kvstore.transfer.sender import KvSender
from kvstore.transfer.transport.nccl import num_nccl_stalls
from kvstore.transfer.transport.nccl_counts import nccl_connections_by_carrier, num_stuck_aborts
from kvstore.transfer.transport.streams import num_shared_streams

if TYPE_CHECKING:
    from baton.config import TransferConfig
    from baton.messages import Ticket
    from engine.core.serving import ServingEngine
    from kvstore.transfer.local_worker import LocalWorker

logger = logging.getLogger(__name__)
MAX_STUCK_ABORTS = 2
POLL_S = 1.0


class KvEndpoint(kv_pb2_grpc.KvControlServicer):
    """KV transfer of one worker, on its event loop. Created after the model is loaded; takes seconds on a GPU.

    Attributes:
        sender: sends KV from the worker's cache.
        receiver: receives KV into the cache.
        prefixes: pulls prefixes from other workers.
    """

    def __init__(self, worker: LocalWorker, engine: ServingEngine, config: TransferConfig) -> None:
        choose_copies(worker.caches)
        self.sender = KvSender(worker, config)
        self.receiver = KvReceiver(worker, config)
        self.prefixes = PrefixPuller(worker.worker_id, engine, self.receiver, config.pull_timeout_s)
        self._engine = engine
        self._keys = worker.keys
        self._party = Party(worker.worker_id, worker.incarnation)
        self._max_keys = worker.max_tokens // HASH_BLOCK

    def counts(self) -> TransferCounts:
        """Return the counts that the worker's lease publishes."""
        sent, received = self.sender.stats, self.receiver.stats
        return TransferCounts(
            sent_committed=sent.committed,
            received_committed=received.committed,
            sent_failed=sent.failed,
            received_failed=received.failed,
            corrupted=sent.corrupted + received.corrupted,
            expired=sent.expired + received.expired,
            timed_out=sent.timed_out + received.timed_out,
            refused=sent.refused + received.refused,
            lost=sent.lost + received.lost,
            fenced=sent.fenced + received.fenced,
            resent=sent.resent,
            nccl_stalls=num_nccl_stalls(),
            nccl_stuck_aborts=num_stuck_aborts(),
            nccl_shared_streams=num_shared_streams(),
            failed_openings=self.sender.num_failed_openings,
            failed_pulls=self.prefixes.num_failed,
            pulled_tokens=self.prefixes.num_tokens,
            sent_bytes=sent.num_bytes,
            received_bytes=received.num_bytes,
            sent_chunks=sent.num_chunks,
            received_chunks=received.num_chunks,
            transfer_s=sent.transfer_s,
            exposed_s=sent.exposed_s,
            open_connections=self.sender.num_connections + self.receiver.num_connections,
            slots_in_use=self.sender.slots_in_use + self.receiver.slots_in_use,
            unsent_bytes=self.sender.unsent_bytes,
        )

    def connections(self) -> tuple[OpenConnections, ...]:
        """Return the number of open connections by kind of transport, as the worker's lease publishes it."""
        kinds = Counter(kind for kind in (*self.sender.open_kinds, *self.receiver.open_kinds) if kind != "nccl")
        nccl = (
            OpenConnections("nccl", carrier, number)
            for carrier, number in sorted(nccl_connections_by_carrier().items())
        )
        return (*nccl, *(OpenConnections(kind, "", number) for kind, number in sorted(kinds.items())))

    async def stuck(self) -> None:
        """Return once too many NCCL communicators are stuck: each end of one may keep its memory.

        Computation still works in this worker, and other workers can take it over.
        """
        while True:
            await asyncio.sleep(POLL_S)
            if (number := num_stuck_aborts()) >= MAX_STUCK_ABORTS:
                logger.error("%d NCCL communicators could not be closed: this worker shuts down", number)
                return

    async def device_lost(self) -> str:
        """Return the reason, once a transfer thread has found that a device no longer computes in this process.

        A worker without steps would not notice, and would continue to fail each transfer.
        """
        while True:
            await asyncio.sleep(POLL_S)
            if LOSSES.found:
                return LOSSES.found

    async def close(self) -> None:
        """End all transfers and connections."""
        await asyncio.gather(self.sender.close(), self.receiver.close())

    # -- what other workers call ---------------------------------------------------------------------------------------

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        """Serve one connection of a sender."""
        await self.receiver.session(request_iterator, context)

    async def Pull(  # noqa: N802 - the generated name
        self, request: kv_pb2.PullRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kv_pb2.PullResponse:
        """Send the cached part of a prefix to the requesting worker, within the limits of a router's permit.

        A cluster without a secret has no permits and trusts the requester.
        """
        pull = wire.pull_from_pb(request, max_keys=self._max_keys)
        ticket = pull.ticket
        if self._keys is not None:
            permit = open_permit(pull.permit, self._keys)
            check_permit(permit, self._party, ticket, pull.block_keys, time.time())
        self.sender.require_compatible(ticket)
        keys = pull.block_keys
        if not self._engine.spec.resumes_anywhere:  # the state is that of the last token
            keys = keys[: ticket.num_tokens // HASH_BLOCK]
        pin = await self._engine.pin_prefix(keys)
        try:
            num_tokens = min(pin.num_tokens, ticket.num_tokens)
            if not self._is_useful(ticket, num_tokens):
                return kv_pb2.PullResponse(num_tokens=0)
            async with self.sender.transfer(ticket, num_tokens) as transfer:
                transfer.extend(pin.block_ids)
                await transfer.finish(None)
            return kv_pb2.PullResponse(num_tokens=num_tokens)
        finally:
            self._engine.unpin(pin)

    def _is_useful(self, ticket: Ticket, num_tokens: int) -> bool:
        """Return whether the worker of a ticket can use its first `num_tokens` tokens."""
        if self._engine.spec.resumes_anywhere:
            return num_tokens > ticket.skip_tokens
        if num_tokens == 0 or num_tokens % ticket.layout.block_size:
            return False
        try:
            begins_of(ticket, num_tokens)
        except ValueError:
            return False
        return True


@dataclass(slots=True)
class WorkerContext:
    """The part of a worker that the RPC handlers of both roles use. The worker's member updates `is_draining`."""

    worker_id: str
    engine: ServingEngine
    kv: KvEndpoint
    is_draining: bool = False
    """True while the worker leaves its role; it takes no new work then."""

    def refusal(self) -> WorkerDraining:
        """Return the error of new work while the worker leaves its role."""
        return WorkerDraining(f"{self.worker_id} takes no new work")

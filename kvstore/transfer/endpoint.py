"""A worker's door for KV: it sends and receives, asks other workers for prefixes, and is asked for them.

Every worker has one, whatever its role. A pulled prefix goes into the worker's prefix cache, where the engine finds it
like any other; so a pull that fails, or finds less than was believed, costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import grpc

from baton import wire
from baton.blocks import GRANULE, block_keys
from baton.cluster import TransferCounts
from baton.engine.core.engine import Reserved
from baton.engine.core.sequence import Purpose
from baton.errors import BatonError, TransferTimeout
from baton.messages import PrefixSource, Pull, SequenceSpec, Ticket
from baton.rpc import from_rpc_error
from baton.tasks import cancel_and_wait
from baton.telemetry import tracing
from baton.v1 import kv_pb2, kv_pb2_grpc
from kvstore.transfer.connection.channel import open_channel
from kvstore.transfer.receiver import Arrival, KvReceiver
from kvstore.transfer.sender import KvSender
from kvstore.transfer.transport.gloo import num_nccl_stalls

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from baton.config import FaultsConfig, TransferConfig
    from baton.engine.core.loop import EngineLoop

logger = logging.getLogger(__name__)


class KvEndpoint(kv_pb2_grpc.KvControlServicer):
    """Made for the engine of one worker, on its event loop."""

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        loop: EngineLoop,
        wire_compat: str,
        config: TransferConfig,
        host: str,
        faults: FaultsConfig | None = None,
    ) -> None:
        caches = loop.engine.runner.caches
        self.sender = KvSender(worker_id, incarnation, caches, wire_compat, config, host, faults)
        self.receiver = KvReceiver(worker_id, incarnation, caches, wire_compat, config, host)
        self._worker_id = worker_id
        self._loop = loop
        self._config = config
        self._pulled_tokens = 0
        self._failed_pulls = 0

    def counts(self) -> TransferCounts:
        """What the worker's lease tells of its transfers."""
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
            failed_pulls=self._failed_pulls,
            pulled_tokens=self._pulled_tokens,
            sent_bytes=sent.num_bytes,
            received_bytes=received.num_bytes,
            sent_chunks=sent.num_chunks,
            received_chunks=received.num_chunks,
            transfer_s=sent.transfer_s,
            exposed_s=sent.exposed_s,
            open_pairs=self.sender.num_pairs + self.receiver.num_pairs,
            slots_in_use=self.sender.slots_in_use + self.receiver.slots_in_use,
            unsent_bytes=self.sender.unsent_bytes,
        )

    async def close(self) -> None:
        await asyncio.gather(self.sender.close(), self.receiver.close())

    # -- pulling -----------------------------------------------------------------------------------------------------

    async def fetch_prefix(self, spec: SequenceSpec, source: PrefixSource, arrived_s: float, trace: Context) -> int:
        """Pulls what another worker holds of a prompt into this worker's prefix cache.

        Args:
            arrived_s: when the request came, on the monotonic clock: the pull waits for blocks in its place.
            trace: of the request.

        Returns:
            Tokens that came; 0 where nothing did, for whatever reason: the engine computes what is missing.
        """
        if not self._loop.engine.runner.cache.spec.supports_prefix_reuse or source.worker_id == self._worker_id:
            return 0
        block_size = self.receiver.layout.block_size
        num_tokens = min(source.num_tokens, len(spec.token_ids) - 1) // block_size * block_size
        if num_tokens <= 0:
            return 0
        prefix = spec.prefix(num_tokens)
        began_s = time.monotonic()
        num_pulled = 0
        try:
            num_pulled = await self._fetch(prefix, source, arrived_s)
            self._pulled_tokens += num_pulled
        except BatonError as error:
            self._failed_pulls += 1
            logger.warning("the prefix of %s is computed, not pulled: %s", spec.sequence_id, error)
        labels: tracing.Attributes = {"baton.source": source.worker_id, "baton.pulled_tokens": num_pulled}
        tracing.record_span("kv.pull", trace, time.monotonic() - began_s, labels)
        return num_pulled

    async def _fetch(self, prefix: SequenceSpec, source: PrefixSource, arrived_s: float) -> int:
        async with self._loop.sequence(prefix, Purpose.RECEIVE, arrived_s) as handle:
            reserved = await handle.next()
            assert isinstance(reserved, Reserved)
            sequence, skip_tokens = reserved.sequence, reserved.skip_tokens
            if skip_tokens >= sequence.num_tokens:
                return 0
            transfer_id = f"{sequence.sequence_id}/prefix@{self._worker_id}"
            blocks = sequence.block_table
            ticket = self.receiver.expect(transfer_id, sequence.num_tokens, skip_tokens, blocks, partial=True)
            keys = tuple(block_keys(prefix.cache_seed, prefix.token_ids))
            try:
                async with asyncio.timeout(self._config.pull_timeout_s):
                    arrival = await self._pull(ticket, keys, source)
            except TimeoutError:
                raise TransferTimeout(f"it did not arrive within {self._config.pull_timeout_s:g} s") from None
            finally:
                await self.receiver.release(ticket)
            if arrival is None:
                return 0
            self._loop.adopt(sequence, arrival.num_tokens)
            return arrival.num_tokens - skip_tokens

    async def _pull(self, ticket: Ticket, keys: tuple[bytes, ...], source: PrefixSource) -> Arrival | None:
        """None: the source holds no more than is here already."""
        channel = open_channel(source.address)
        try:
            stub: Any = kv_pb2_grpc.KvControlStub(channel)
            asked = asyncio.ensure_future(stub.Pull(wire.pull_to_pb(Pull(ticket, keys))))
            arriving = asyncio.create_task(self.receiver.wait_committed(ticket))
            try:
                await asyncio.wait({asked, arriving}, return_when=asyncio.FIRST_COMPLETED)
                if arriving.done():
                    arriving.result()  # a failure ends the wait for the source, which may be dead
                response = await asked
                return await arriving if response.num_tokens > ticket.skip_tokens else None
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error, source.worker_id) from error
            finally:
                await cancel_and_wait((asked, arriving))
        finally:
            await channel.close()

    # -- what other workers call ---------------------------------------------------------------------------------------

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        await self.receiver.session(request_iterator, context)

    async def Pull(  # noqa: N802 - the generated name
        self, request: kv_pb2.PullRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> kv_pb2.PullResponse:
        cache = self._loop.engine.runner.cache
        pull = wire.pull_from_pb(request, max_keys=cache.num_blocks * cache.spec.block_size // GRANULE)
        ticket = pull.ticket
        blocks = self._loop.pin_prefix(pull.block_keys)
        try:
            num_tokens = min(len(blocks) * self.sender.layout.block_size, ticket.num_tokens)
            if num_tokens <= ticket.skip_tokens:
                return kv_pb2.PullResponse(num_tokens=0)
            async with self.sender.transfer(ticket, num_tokens) as transfer:
                transfer.attach(blocks)
                await transfer.finish(None)
            return kv_pb2.PullResponse(num_tokens=num_tokens)
        finally:
            self._loop.unpin(blocks)

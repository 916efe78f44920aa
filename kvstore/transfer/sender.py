"""The prefill side of the hand-over.

The life of a transfer, as the sender sees it:

1. `send` takes the caller's finished blocks. The caller pins them until `send` returns or raises.
2. The first ticket of a decode worker's incarnation opens a pair: session stream, Hello and Welcome, link.
3. The transfer waits its turn on the pair: links are first in, first out.
4. Offer. The decode worker posts receives and grants.
5. The pair's lane gathers, seals and sends chunk by chunk.
6. Commit with the first token; CommitAck ends it.

Whatever goes wrong between 4 and 6, the lane first stops reading the blocks, so the caller may unpin them; then, in the
background, Abort is sent and the link is brought back to a clean end before the next transfer's turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc

from baton import wire
from baton.config import FaultsConfig
from baton.errors import TransferError, TransferRefused, TransferTimeout, WorkerFailed
from baton.messages import (
    Abort,
    AbortAck,
    Commit,
    CommitAck,
    FromDecode,
    FromPrefill,
    Grant,
    HandedOver,
    Hello,
    Nack,
    Offer,
    Rendezvous,
    Ticket,
    Welcome,
)
from baton.v1 import kv_pb2_grpc
from kvstore.transfer.channel import open_channel
from kvstore.transfer.faults import FaultInjector, Faults, parse_faults
from kvstore.transfer.header import PROTOCOL_VERSION
from kvstore.transfer.lane import Lane
from kvstore.transfer.link import Link, Slot
from kvstore.transfer.outbound import Outbound
from kvstore.transfer.plan import plan, plan_digest, require_fitting_slots
from kvstore.transfer.reasons import from_reason, from_status, to_reason
from kvstore.transfer.staging import Rows
from kvstore.transfer.stats import TransferStats
from kvstore.transfer.torch_link import SENDER, SessionStore, open_link, usable_links

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from baton.config import TransferConfig
    from baton.engine.kv_cache import KVCache


class KvSender:
    """Hands over the blocks of one prefill worker's cache. For one event loop.

    Args:
        host: the address on which decode workers can reach this one's links.
    """

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        cache: KVCache,
        wire_compat: str,
        config: TransferConfig,
        host: str,
        faults: FaultsConfig | None = None,
    ) -> None:
        require_fitting_slots(cache.spec, config.slot_bytes)
        links = usable_links(cache.device, config.links)
        self._hello = Hello(PROTOCOL_VERSION, worker_id, incarnation, wire_compat, links)
        self._cache = cache
        self._config = config
        self._host = host
        self._faults = parse_faults((faults or FaultsConfig()).spec)
        self._pairs: dict[tuple[str, str], _Pair] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._stats = TransferStats()

    @property
    def stats(self) -> TransferStats:
        num_pairs = sum(pair.failure is None for pair in self._pairs.values())
        return dataclasses.replace(self._stats, num_pairs=num_pairs)

    async def send(
        self, ticket: Ticket, block_ids: Sequence[int], first_token: int, state_slot: int | None = None
    ) -> HandedOver:
        """Hands over a sequence's KV.

        Args:
            block_ids: all blocks of the sequence, in order; those of `ticket.skip_tokens` stay here.
            first_token: what the decode worker goes on from.
            state_slot: of the sequence, where the model has states.

        When it returns, raises or is cancelled, nothing reads the blocks any more.

        Raises:
            TransferRefused: the two sides do not fit.
            TransferError: the transfer failed; the decode worker may be well.
            WorkerFailed: the decode worker is gone.
        """
        outbound = self._outbound(ticket, block_ids, state_slot)
        digest = plan_digest(
            self._cache.spec,
            ticket.num_tokens,
            ticket.skip_tokens,
            outbound.chunks,
            self._config.window,
            self._config.checksum,
        )
        try:
            handed_over = await self._pair(ticket).transfer(outbound, digest, first_token)
        except (TransferError, WorkerFailed):
            self._stats.num_failed += 1
            raise
        self._stats.num_transfers += 1
        self._stats.num_bytes += handed_over.num_bytes
        self._stats.num_chunks += handed_over.num_chunks
        self._stats.transfer_s += handed_over.transfer_s
        return handed_over

    async def close(self) -> None:
        """Ends all pairs and their threads."""
        for pair in self._pairs.values():
            pair.lose(WorkerFailed("this prefill worker shuts down"))
        self._pairs.clear()
        if self._closing:
            await asyncio.wait(self._closing)

    def _outbound(self, ticket: Ticket, block_ids: Sequence[int], state_slot: int | None) -> Outbound:
        if ticket.wire_compat != self._hello.wire_compat:
            raise TransferRefused(
                f"decode worker {ticket.decode_worker_id} has KV of kind {ticket.wire_compat}, "
                f"this prefill worker {self._hello.wire_compat}"
            )
        spec = self._cache.spec
        try:
            chunks = plan(spec, ticket.num_tokens, ticket.skip_tokens, self._config.slot_bytes)
        except ValueError as error:
            raise TransferRefused(str(error)) from error
        span = slice(ticket.skip_tokens // spec.block_size, -(-ticket.num_tokens // spec.block_size))
        rows = Rows(self._cache, block_ids[span], state_slot)
        return Outbound(ticket, chunks, rows, self._config.checksum == "full")

    def _pair(self, ticket: Ticket) -> _Pair:
        key = (ticket.decode_worker_id, ticket.incarnation)
        pair = self._pairs.get(key)
        if pair is not None and pair.failure is None:
            return pair
        self._pairs = {k: p for k, p in self._pairs.items() if p.failure is None}
        pair = _Pair(self._hello, ticket, self._cache, self._config, self._host, self._faults, self._stats)
        self._pairs[key] = pair
        self._closing.add(pair.session)
        pair.session.add_done_callback(self._closing.discard)
        return pair


@dataclasses.dataclass(slots=True)
class _Talk:
    """The transfer whose turn it is, and what the decode worker has said about it."""

    outbound: Outbound
    granted: asyncio.Future[None]
    answer: asyncio.Future[None]
    """CommitAck, or the failure that a Nack or the session's end brought."""
    abort_acked: asyncio.Future[None]
    sent: asyncio.Future[None] | None = None


class _Pair:
    """This prefill worker and one incarnation of a decode worker: a session, a link and the lane that owns it.

    Attributes:
        failure: why the pair is over; None while it is good.
        session: its task; done once stream, link and thread are gone.
    """

    def __init__(
        self,
        hello: Hello,
        ticket: Ticket,
        cache: KVCache,
        config: TransferConfig,
        host: str,
        faults: Faults,
        stats: TransferStats,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._hello = hello
        self._worker_id = ticket.decode_worker_id
        self._incarnation = ticket.incarnation
        self._cache = cache
        self._config = config
        self._host = host
        self._faults = FaultInjector(faults)
        self._stats = stats
        self._turn = asyncio.Lock()
        self._out: asyncio.Queue[FromPrefill | None] = asyncio.Queue()
        self._talk: _Talk | None = None
        self._settling: set[asyncio.Task[None]] = set()
        self._epoch = 0
        self._link: Link | None = None
        self._slots: list[Slot] = []
        self._opened: asyncio.Future[None] = loop.create_future()
        self._store = SessionStore(lambda k, v: _post(loop, self._out.put_nowait, Rendezvous(k, v)))
        self._lane = Lane(f"kv-send-{self._worker_id}")
        self._channel = open_channel(ticket.kv_address)
        stub: Any = kv_pb2_grpc.KvControlStub(self._channel)
        self._call = stub.Session(self._requests())
        self.failure: TransferError | WorkerFailed | None = None
        self.session = loop.create_task(self._run())

    async def transfer(self, outbound: Outbound, digest: bytes, first_token: int) -> HandedOver:
        await self._turn.acquire()
        talk: _Talk | None = None
        try:
            await asyncio.shield(self._opened)
            self._raise_if_lost()
            talk = self._talk = _new_talk(outbound)
            start = time.monotonic()
            ids = (outbound.ticket.transfer_id, outbound.ticket.generation)
            self._out.put_nowait(Offer(*ids, digest, len(outbound.chunks)))
            await self._reach(talk, talk.granted, "grant the transfer")
            talk.sent = self._start(outbound)
            await self._reach(talk, talk.sent, None)
            self._out.put_nowait(Commit(*ids, first_token))
            await self._reach(talk, talk.answer, "acknowledge the commit")
            handed_over = HandedOver(outbound.num_bytes, len(outbound.chunks), time.monotonic() - start)
        except BaseException as error:
            outbound.stop()
            if talk is None:
                self._turn.release()
            else:
                settle = asyncio.create_task(self._settle(talk, error))
                self._settling.add(settle)
                settle.add_done_callback(self._settled)
            raise
        self._end_turn()
        return handed_over

    def lose(self, error: TransferError | WorkerFailed) -> None:
        """Ends the pair and all its transfers. Idempotent."""
        if self.failure is not None:
            return
        self.failure = error
        for future in (self._opened, self._talk.answer if self._talk else None):
            if future is not None and not future.done():
                future.set_exception(error)
                _retrieve(future)
        self._store.close()
        if self._link is not None:
            self._link.abort()
        self._lane.close(self._close_link)
        self._out.put_nowait(None)
        self._call.cancel()

    def _settled(self, settle: asyncio.Task[None]) -> None:
        """Not the coroutine's own last act: a task that is cancelled before its first step runs none of it."""
        self._settling.discard(settle)
        self._end_turn()

    def _end_turn(self) -> None:
        self._talk = None
        self._turn.release()

    def _start(self, outbound: Outbound) -> asyncio.Future[None]:
        assert self._link is not None
        return self._lane.submit(partial(outbound.run, self._link, self._slots, self._epoch, self._faults))

    async def _reach(self, talk: _Talk, step: asyncio.Future[None], what: str | None) -> None:
        """Waits for `step` or bad news. `what` the peer should do within the operation timeout; None: a link's step."""
        timeout_s = self._config.op_timeout_s if what else None
        await asyncio.wait({step, talk.answer}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if talk.answer.done():
            talk.answer.result()
        if not step.done():
            raise TransferTimeout(f"decode worker {self._worker_id} did not {what} within {timeout_s:g} s")
        try:
            step.result()
        except TransferError as error:
            self.lose(error)
            raise
        except Exception as error:  # whatever the device or the link may raise in its thread
            failure = TransferError(f"the hand-over failed on the prefill side: {error}")
            self.lose(failure)
            raise failure from error

    async def _settle(self, talk: _Talk, error: BaseException) -> None:
        """After a transfer was given up: leaves the link with nothing posted. The turn ends with this task."""
        ticket = talk.outbound.ticket
        reason = to_reason(error) if isinstance(error, TransferError) else "the sender cancelled"
        try:
            if self.failure is None:
                self._out.put_nowait(Abort(ticket.transfer_id, ticket.generation, reason))
                async with asyncio.timeout(2 * self._config.op_timeout_s):
                    await asyncio.wait({talk.granted, talk.abort_acked}, return_when=asyncio.FIRST_COMPLETED)
                    if talk.granted.done() and talk.sent is None and self.failure is None:
                        talk.sent = self._start(talk.outbound)
                    if talk.sent is not None:
                        await talk.sent
                    await talk.abort_acked
        except TimeoutError:
            self.lose(TransferTimeout(f"decode worker {self._worker_id} did not answer an abort"))
        except TransferError as link_error:
            self.lose(link_error)
        except Exception as error:  # whatever the device or the link may raise in its thread
            self.lose(TransferError(f"the link could not be brought to a clean end: {error}"))

    # -- the session -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        self._out.put_nowait(self._hello)
        try:
            async with asyncio.timeout(self._config.open_timeout_s):
                welcome = await self._read()
            self._join(welcome)
            while (message := await self._read()) is not None:
                self._on(message)
            self.lose(WorkerFailed(f"decode worker {self._worker_id} closed the session"))
        except TimeoutError:
            self.lose(WorkerFailed(f"decode worker {self._worker_id} did not answer at its KV address"))
        except TransferError as error:
            self.lose(error)
        except grpc.aio.AioRpcError as error:
            self.lose(_from_rpc(self._worker_id, error))
        except asyncio.CancelledError:  # by the call's own cancel, in `lose`
            if self.failure is None:
                raise
        finally:
            self.lose(WorkerFailed("the session was cancelled"))
            for task in self._settling:
                task.cancel()
            await asyncio.gather(*self._settling, return_exceptions=True)
            await self._channel.close()
            await self._lane.join(self._config.op_timeout_s + 1)

    async def _requests(self) -> AsyncIterator[Any]:
        while (message := await self._out.get()) is not None:
            yield wire.session_request(message)

    async def _read(self) -> FromDecode | None:
        """The next message of a kind that we know; None at the end."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            if (known := wire.session_response_from_pb(message)) is not None:
                return known
        return None

    def _join(self, welcome: FromDecode | None) -> None:
        if not isinstance(welcome, Welcome):
            raise TransferError(f"decode worker {self._worker_id} did not begin with Welcome")
        if welcome.incarnation != self._incarnation:
            raise TransferRefused(
                f"the ticket is from incarnation {self._incarnation} of decode worker {self._worker_id}, "
                f"and {welcome.incarnation} answers at its address"
            )
        self._epoch = welcome.pair_epoch
        opening = self._lane.submit(partial(self._open_link, welcome.link))
        opening.add_done_callback(self._link_opened)

    def _open_link(self, kind: str) -> None:
        config = self._config
        device = self._cache.device
        self._link = open_link(
            kind, self._store, SENDER, self._host, device, config.open_timeout_s, config.op_timeout_s
        )
        pinned = device.type == "cuda" and self._link.device.type == "cpu"
        self._slots = [Slot(config.slot_bytes, self._link.device, pinned) for _ in range(config.window)]

    def _link_opened(self, opening: asyncio.Future[None]) -> None:
        if opening.cancelled() or self._opened.done():
            return
        if error := opening.exception():
            self.lose(error if isinstance(error, TransferError) else TransferError(f"no link: {error}"))
        else:
            self._opened.set_result(None)

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()

    def _on(self, message: FromDecode) -> None:
        if isinstance(message, Rendezvous):
            self._store.deliver(message.key, message.value)
            return
        talk = self._talk
        if isinstance(message, Welcome) or talk is None or message.generation != talk.outbound.ticket.generation:
            self._stats.num_fenced += 1
            return
        match message:
            case Grant():
                _done(talk.granted)
            case CommitAck():
                _done(talk.answer)
            case AbortAck():
                _done(talk.abort_acked)
            case Nack() if not talk.answer.done():
                talk.answer.set_exception(from_reason(message.reason))
                _retrieve(talk.answer)

    def _raise_if_lost(self) -> None:
        if self.failure is not None:
            raise self.failure


def _new_talk(outbound: Outbound) -> _Talk:
    loop = asyncio.get_running_loop()
    return _Talk(outbound, loop.create_future(), loop.create_future(), loop.create_future())


def _from_rpc(worker_id: str, error: grpc.aio.AioRpcError) -> TransferError | WorkerFailed:
    text = error.details() or error.code().name
    lost = WorkerFailed(f"decode worker {worker_id} is gone: {text}")
    return from_status(error.code().name, text) or lost


def _post(loop: asyncio.AbstractEventLoop, callback: Any, *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is gone
        loop.call_soon_threadsafe(callback, *args)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _retrieve(future: asyncio.Future[None]) -> None:
    """Marks an exception as seen: nobody may be waiting."""
    if future.done() and not future.cancelled():
        future.exception()

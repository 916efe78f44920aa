"""One side of a control stream: outgoing messages, pings, the peer's silence, and the rendezvous on it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import unquote

import grpc

from baton.addresses import host_of, is_address
from baton.errors import TransferRefused
from baton.messages import FromReceiver, FromSender, Ping, Rendezvous
from baton.rpc import channel as opened_channel
from baton.rpc.member_auth import member_metadata
from baton.rpc.server import MEMBER_CHANNEL_OPTIONS
from baton.v1 import kv_pb2_grpc
from kvstore.transfer.pipeline.driven import post
from kvstore.transfer.transport.rendezvous import RendezvousStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from baton.config import TransferConfig
    from baton.tls import Tls
    from baton.trust import KeyFile

Out = TypeVar("Out", FromSender, FromReceiver)
OPTIONS = (
    *MEMBER_CHANNEL_OPTIONS,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """A receiving rank."""

    worker_id: str
    incarnation: str
    address: str
    rank: int


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """Open a channel with a separate TCP connection, so that a peer's death is detected at once.

    The control stream shows whether a peer is alive: transports notice its death late, or never.

    Raises:
        TransferRefused: the address is not `host:port`.
    """
    if not is_address(address):
        raise TransferRefused(f"{address!r:.100} is not host:port; KV cannot be transferred")
    return opened_channel(address, tls, OPTIONS)


def caller_of(context: Any) -> str:
    """Return the IP address of a call's client; "" if it does not use TCP.

    Args:
        context: the call's, whose peer is written `ipv4:10.0.0.1:5` or `ipv6:%5B::1%5D:5`.
    """
    family, _, address = unquote(context.peer()).partition(":")
    return host_of(address) if family in ("ipv4", "ipv6") else ""


def open_session(channel: grpc.aio.Channel, peer: Peer, requests: AsyncIterator[Any], keys: KeyFile | None) -> Any:
    """Open the call of a control stream to a peer.

    Args:
        keys: used to prove this worker's identity; None: the cluster has no secret.
    """
    stub: Any = kv_pb2_grpc.KvControlStub(channel)
    proof = member_metadata(keys, "/baton.v1.KvControl/Session", peer.incarnation)
    return stub.Session(requests, metadata=proof)


class ControlStream(Generic[Out]):
    """The part of a control stream that is the same on both sides. For one event loop.

    Attributes:
        rendezvous: the keys that both sides exchange while they open the transport.

    Args:
        peer_id: the worker on the other side.
        now: on the event loop's clock, as in every method.
    """

    def __init__(self, peer_id: str, config: TransferConfig, now: float) -> None:
        loop = asyncio.get_running_loop()
        self.rendezvous = RendezvousStore(
            lambda key, value: post(loop, self._out.put_nowait, Rendezvous(key, value)),
            max(config.open_timeout_s, config.nccl_open_timeout_s),
        )
        self._peer_id = peer_id
        self._silence_s = config.op_timeout_s
        self._ping_s = min(config.ping_s, config.op_timeout_s / 4)
        self._heard_s = now
        self._pinged_s = 0.0
        self._out: asyncio.Queue[Out | Ping | Rendezvous | None] = asyncio.Queue()

    @property
    def ping_s(self) -> float:
        """Time between two pings."""
        return self._ping_s

    def send(self, message: Out) -> None:
        """Queue a message; no effect after `close`."""
        self._out.put_nowait(message)

    def heard(self, now: float) -> None:
        """Record that the peer has sent something."""
        self._heard_s = now

    def beat(self, now: float, period_s: float) -> str:
        """Queue a ping if one is due, and return why the peer counts as lost, or "" if it does not.

        Args:
            period_s: time between two calls.
        """
        if now - self._pinged_s >= self._ping_s - period_s / 2:
            self._out.put_nowait(Ping())
            self._pinged_s = now
        if now - self._heard_s > self._silence_s:
            return f"worker {self._peer_id} has been silent for {self._silence_s:g} s"
        return ""

    async def outgoing(self) -> AsyncIterator[Out | Ping | Rendezvous]:
        """Yield the messages to write, until `close`."""
        while (message := await self._out.get()) is not None:
            yield message

    def close(self) -> None:
        """End `outgoing` after the queued messages, and fail the rendezvous if it is still running. Idempotent."""
        self._out.put_nowait(None)
        self.rendezvous.close()

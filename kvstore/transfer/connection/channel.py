"""The control session's connection. Its stream is what tells that a peer is alive: links notice late or never."""

from __future__ import annotations

import grpc

from baton.rpc.server import CHANNEL_OPTIONS

OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel of its own connection, so that a peer's death is seen on it at once."""
    return grpc.aio.insecure_channel(address, options=OPTIONS)

"""gRPC settings of the control session. Its stream is what tells that a peer is alive: links notice late or never."""

from __future__ import annotations

import grpc

_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
CHANNEL_OPTIONS = (*_KEEPALIVE, ("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))
SERVER_OPTIONS = (*_KEEPALIVE, ("grpc.http2.min_ping_interval_without_data_ms", 4000))
"""For the server that carries `KvReceiver`; without them it takes the sender's pings for an attack."""


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel of its own connection, so that a peer's death is seen on it at once."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

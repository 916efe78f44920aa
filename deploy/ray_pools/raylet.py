"""Health of a raylet, Ray's process on a node, as its gRPC server reports it."""

from __future__ import annotations

import asyncio
import contextlib
import os

from baton.addresses import address_of

CHECK_S = 10.0
"""Interval between checks."""
TIMEOUT_S = 5.0
"""Timeout of a check."""
MAX_FAILURES = 9
"""Consecutive failed checks after which a raylet counts as hung. The first ones may fail because it has not started."""


async def until_silent(address: str) -> None:
    """Return when the raylet has not answered `MAX_FAILURES` checks in a row.

    Args:
        address: host:port of its gRPC server; the host may be an IPv6 address without brackets.
    """
    host, _, port = address.rpartition(":")
    address = address_of(host, int(port))
    num_failures, has_answered = 0, False
    while num_failures < MAX_FAILURES:
        await asyncio.sleep(CHECK_S)
        is_well = await _answers(address)
        has_answered |= is_well
        num_failures = 0 if is_well or not has_answered else num_failures + 1


async def _answers(address: str) -> bool:
    """Return whether the raylet passes a health check; with Ray's own TLS, whether it accepts a connection."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return await _accepts(address)
    import grpc  # a node process on one machine does not need it
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with grpc.aio.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as link:
        try:
            stub = health_pb2_grpc.HealthStub(link)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return True


async def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, TimeoutError):
        _, writer = await asyncio.wait_for(asyncio.open_connection(host.strip("[]"), int(port)), TIMEOUT_S)
        writer.close()
        return True
    return False

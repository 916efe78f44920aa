"""The secret of the clusters that tests start, and calls that carry a member's proof."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from baton.cluster import WorkerInfo
from baton.rpc.member_auth import member_metadata
from baton.trust import KeyFile, Principal, draw_secret, write_private
from baton.v1 import worker_pb2_grpc
from engine.core.engine import Engine
from engine.core.loop import EngineLoop
from kvstore.index import RedisConnection
from kvstore.leases import RedisLeases

if TYPE_CHECKING:
    from worker.member import Member


@functools.cache
def secret_file() -> str:
    """A file with a secret for all clusters that this process starts."""
    folder = Path(tempfile.mkdtemp(prefix="baton-secret-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_private(folder / "secret", draw_secret())
    return str(folder / "secret")


@functools.cache
def keys_of(principal: Principal, secret: str = "") -> KeyFile:
    """A member's keys, by default of those clusters."""
    return KeyFile(secret or secret_file(), principal)


class Proving(grpc.UnaryUnaryClientInterceptor):
    """Gives each call of a channel a member's proof.

    Args:
        callee: the incarnation of the process that is called.
    """

    def __init__(self, keys: KeyFile, callee: str) -> None:
        self._keys = keys
        self._callee = callee

    def intercept_unary_unary(self, continuation: Callable[..., Any], client_call_details: Any, request: Any) -> Any:
        proof = member_metadata(self._keys, client_call_details.method, self._callee)
        return continuation(client_call_details._replace(metadata=proof), request)


def engine_of(member: Member) -> Engine:
    """The engine of a member, which lies behind what a member itself sees."""
    assert isinstance(member.engine, EngineLoop)
    return member.engine.engine


def leased(redis_url: str, content_id: str, worker_id: str) -> WorkerInfo:
    """A worker as its lease describes it."""

    async def read() -> WorkerInfo:
        leases = RedisLeases(RedisConnection(redis_url), content_id)
        try:
            return next(worker.info for worker in await leases.list_workers() if worker.info.id == worker_id)
        finally:
            await leases.close()

    return asyncio.run(read())


@contextlib.contextmanager
def control(info: WorkerInfo, keys: KeyFile | None = None) -> Iterator[worker_pb2_grpc.WorkerControlStub]:
    """Orders to a worker, by default with the controller's proofs."""
    proving = Proving(keys or keys_of(Principal.CONTROLLER), info.incarnation)
    with grpc.insecure_channel(info.address) as channel:
        yield worker_pb2_grpc.WorkerControlStub(grpc.intercept_channel(channel, proving))

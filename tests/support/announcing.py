"""Controllers that announce models and wake them, without Ray: a test starts the workers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from baton.cluster import ControllerInfo, ModelAnnouncement
from baton.rpc import RpcServer
from baton.rpc.member_auth import CONTROLLERS_RULES, member_auth
from baton.trust import KeyFile
from baton.v1 import admin_pb2, admin_pb2_grpc
from kvstore.index import RedisConnection
from kvstore.leases import RedisEndpoint, RedisLeases

PERIOD_S = 0.2


class _Orders(admin_pb2_grpc.AdminServicer):
    """Answers wake requests. Others are not implemented."""

    def __init__(self, wake: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._wake = wake

    async def WakeModel(  # noqa: N802
        self, request: admin_pb2.WakeModelRequest, context: Any
    ) -> admin_pb2.WakeModelResponse:
        await self._wake()
        return admin_pb2.WakeModelResponse()


class Announcer:
    """The controller of one model, as routers meet it. Leaving the block stops it without another word.

    Attributes:
        num_wakes: wake requests that have come.
        sizes: desired sizes of the pools, as the routers read them.
    """

    def __init__(
        self,
        model: ModelAnnouncement,
        redis_url: str,
        keys: KeyFile,
        *,
        endpoint: str = "baton",
        sizes: Mapping[str, int] | None = None,
        on_wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.num_wakes = 0
        self.sizes = dict(sizes or {"prefill": 1, "decode": 1})
        self._on_wake = on_wake
        self._redis_url, self._keys, self._endpoint = redis_url, keys, endpoint
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Announcer:
        self._thread.start()
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)
        return self

    def __exit__(self, *of_error: object) -> None:
        self._running.cancel()
        with contextlib.suppress(BaseException):
            self._running.result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _wake(self) -> None:
        self.num_wakes += 1
        if not any(self.sizes.values()):
            self.sizes = {"prefill": 1, "decode": 1}
            await asyncio.to_thread(self._on_wake)

    async def _run(self) -> None:
        incarnation = os.urandom(8).hex()
        make_orders: Any = _Orders  # not all of its methods are implemented
        orders = make_orders(self._wake)
        rpc = RpcServer(("baton.v1.Admin",), member_auth(self._keys, incarnation, CONTROLLERS_RULES))
        admin_pb2_grpc.add_AdminServicer_to_server(orders, rpc.server)
        port = rpc.bind("127.0.0.1", 0)
        await rpc.start()
        me = ControllerInfo(pid=os.getpid(), address=f"127.0.0.1:{port}", incarnation=incarnation)
        store = RedisEndpoint(RedisConnection(self._redis_url), self._endpoint, keys=self._keys)
        leases = RedisLeases(RedisConnection(self._redis_url), self.model.content_id, keys=self._keys)
        try:
            while True:
                await leases.announce_controller(me)
                await leases.set_desired(self.sizes)
                await store.announce_model(self.model)
                await asyncio.sleep(PERIOD_S)
        finally:
            await rpc.stop(0)
            await store.close()
            await leases.close()

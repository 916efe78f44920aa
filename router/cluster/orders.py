"""Operators' orders: those that register LoRA adapters, and those that the router forwards to the controller.

A router executes the first ones itself: it asks a worker, then writes to Redis.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

import grpc

from baton.cluster import ControllerInfo, Worker, WorkerState
from baton.errors import (
    BatonError,
    ModelNotFound,
    NoController,
    NotAMember,
    NoWorker,
    Overloaded,
    Unsupported,
    WorkerFailed,
)
from baton.messages import Adapter
from baton.registered_adapters import Adapters, CheckedAdapter, RegisteredAdapter, check_name, check_path
from baton.rpc import channel, from_rpc_error
from baton.rpc.errors import is_lost
from baton.rpc.member_auth import member_metadata
from baton.tls import Tls
from baton.trust import KeyFile
from baton.v1 import admin_pb2, admin_pb2_grpc
from kvstore.adapters import AdapterStore
from router.serve.worker_client import WorkerClient

logger = logging.getLogger(__name__)
MAX_ASKED = 3
"""Maximum number of workers that are asked, one after another, to check a folder."""


class AdapterOrders:
    """Registers and removes adapters.

    Args:
        workers: returns the workers with a lease.
        model_id: name of the served model, which no adapter may have.
    """

    def __init__(
        self, store: AdapterStore, client: WorkerClient, workers: Callable[[], tuple[Worker, ...]], model_id: str
    ) -> None:
        self._store = store
        self._client = client
        self._workers = workers
        self._model_id = model_id

    @property
    def adapters(self) -> Adapters:
        """The registered adapters, by name."""
        return self._store.adapters

    async def add(self, name: str, path: str) -> tuple[RegisteredAdapter, bool]:
        """Register an adapter, after one worker has checked its folder.

        Returns:
            The adapter, and whether one of this name was registered before.

        Raises:
            InvalidRequest: the name or the path is invalid, or the worker cannot apply what is in the folder.
            Unsupported: no worker serves adapters.
            NoWorker, Overloaded, WorkerFailed: no worker could check the folder.
            Conflict, StoreUnavailable: see `AdapterStore.put`.
        """
        check_name(name, self._model_id)
        check_path(path)
        facts = await self._checked(path)
        adapter = Adapter(name=name, path=path, digest=facts.digest, rank=facts.rank)
        registered = RegisteredAdapter(adapter=adapter, num_bytes=facts.num_bytes, since_s=time.time())
        is_replaced = await self._store.put(registered)
        logger.info("adapter %s is registered: %s, digest %s, rank %d", name, path, facts.digest[:12], facts.rank)
        return registered, is_replaced

    async def remove(self, name: str) -> None:
        """Remove an adapter.

        Raises:
            ModelNotFound: none has this name.
            Conflict, StoreUnavailable: see `AdapterStore.remove`.
        """
        if not await self._store.remove(name):
            raise ModelNotFound(f"no adapter is named {name!r:.200}; `baton adapters list` shows all", "name")
        logger.info("adapter %s is removed", name)

    async def _checked(self, path: str) -> CheckedAdapter:
        """Return what the first worker finds that can check the folder."""
        known = self._workers()
        able = [worker for worker in known if worker.info.max_adapters and worker.load.state is WorkerState.READY]
        if not able:
            if any(worker.info.max_adapters for worker in known) or not known:
                raise NoWorker("no worker is ready that could check the adapter; `baton status` shows the pools")
            raise Unsupported(
                "no worker serves adapters; set engine.max_adapters to the number that each may hold, and "
                "engine.runner to auto or transformers"
            )
        failure: BatonError = NoWorker("no worker could check the adapter")
        for worker in random.sample(able, min(MAX_ASKED, len(able))):
            try:
                return await self._client.check_adapter(worker, path)
            except (Overloaded, WorkerFailed) as error:
                failure = error
        raise failure


class ControllerClient:
    """Client of the current controller. Every method raises the controller's own typed errors.

    Args:
        known: returns the controller that is known now, if any.
        keys: authenticates the router to the controller; None: the cluster has no secret.

    Raises:
        NoController: no controller is known, or it does not answer, or it refuses this router.
    """

    def __init__(
        self, known: Callable[[], ControllerInfo | None], keys: KeyFile | None = None, tls: Tls | None = None
    ) -> None:
        self._known = known
        self._keys = keys
        self._tls = tls

    async def scale(self, request: admin_pb2.ScalePoolRequest) -> admin_pb2.ScalePoolResponse:
        answer: admin_pb2.ScalePoolResponse = await self._order("ScalePool", request)
        return answer

    async def drain(self, request: admin_pb2.DrainWorkerRequest) -> admin_pb2.DrainWorkerResponse:
        answer: admin_pb2.DrainWorkerResponse = await self._order("DrainWorker", request)
        return answer

    async def set_role(self, request: admin_pb2.SetWorkerRoleRequest) -> admin_pb2.SetWorkerRoleResponse:
        answer: admin_pb2.SetWorkerRoleResponse = await self._order("SetWorkerRole", request)
        return answer

    async def wake(self, request: admin_pb2.WakeModelRequest) -> admin_pb2.WakeModelResponse:
        answer: admin_pb2.WakeModelResponse = await self._order("WakeModel", request)
        return answer

    async def _order(self, method: str, request: Any) -> Any:
        """Send one order over a new channel: orders are rare, and a controller may restart at another address."""
        if (controller := self._known()) is None:
            raise NoController(
                "no controller is known, so the pools cannot be changed now; `baton up` or Kubernetes starts it again, "
                "which takes up to a minute if Ray has failed: try again then"
            )
        try:
            async with channel(controller.address, self._tls) as opened:
                proof = member_metadata(self._keys, f"/baton.v1.Admin/{method}", controller.incarnation)
                return await getattr(admin_pb2_grpc.AdminStub(opened), method)(request, metadata=proof)
        except grpc.aio.AioRpcError as error:
            raise _typed(error, controller) from error


def _typed(error: grpc.aio.AioRpcError, controller: ControllerInfo) -> BatonError:
    if is_lost(error):
        return NoController(
            f"the controller at {controller.address} does not answer; `baton up` or Kubernetes starts it again, "
            "which takes up to a minute if Ray has failed: try again then"
        )
    typed = from_rpc_error(error, f"the controller at {controller.address}")
    if isinstance(typed, NotAMember):
        return NoController(f"the controller at {controller.address} does not take orders of this router: {typed}")
    return typed

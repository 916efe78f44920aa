"""Operators' orders that register LoRA adapters. A router executes them: it asks a worker, then writes to Redis."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from baton.cluster import Worker, WorkerState
from baton.errors import BatonError, ModelNotFound, NoWorker, Overloaded, Unsupported, WorkerFailed
from baton.messages import Adapter
from baton.registered_adapters import Adapters, CheckedAdapter, RegisteredAdapter, check_name, check_path
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
            raise Unsupported("no worker serves adapters; set engine.max_adapters to the number that each may hold")
        failure: BatonError = NoWorker("no worker could check the adapter")
        for worker in random.sample(able, min(MAX_ASKED, len(able))):
            try:
                return await self._client.check_adapter(worker, path)
            except (Overloaded, WorkerFailed) as error:
                failure = error
        raise failure

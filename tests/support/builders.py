"""The values that tests need and do not care for, with defaults: a test names the fields that it is about."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from baton.cluster import (
    ClusterStatus,
    ModelAnnouncement,
    Role,
    ServedModel,
    Worker,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from baton.config import RouterConfig
from baton.costs import StepCosts
from baton.errors import NoController
from baton.messages import Adapter, SequenceSpec
from baton.registered_adapters import RegisteredAdapter
from baton.sampling import SamplingParams
from kvstore.adapters import MemoryAdapters
from kvstore.index import MemoryStore
from router.admission.tenants import DEFAULT_TENANT
from router.admission.validate import Claim
from router.cluster.orders import AdapterOrders
from router.placement import NO_OBJECTIVE, Weights
from router.placement.pool_view import PoolView
from router.serve import Waker
from router.serve.worker_client import WorkerClient

READY = WorkerLoad(state=WorkerState.READY)
BLOCK_SIZE = 16
_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams))
_STEP_COSTS = tuple(field.name for field in dataclasses.fields(StepCosts))


def worker_info(worker_id: str = "w", role: Role = Role.DECODE, **values: Any) -> WorkerInfo:
    """A worker's description.

    Args:
        values: further fields of `WorkerInfo`.
    """
    defaults: dict[str, Any] = {
        "address": "h:1",
        "pid": 1,
        "node": "node",
        "epoch": 1,
        "content_id": "content",
        "wire_compat": "wire",
        "block_size": BLOCK_SIZE,
        "max_model_len": 8192,
    }
    return WorkerInfo(id=worker_id, role=role, **defaults | values)


def model_announcement(content_id: str = "c" * 32, **values: Any) -> ModelAnnouncement:
    """A model as its controller announces it.

    Args:
        values: further fields of `ModelAnnouncement`.
    """
    defaults: dict[str, Any] = {"name": "m", "path": "/models/m", "release": "m-1", "files": "f" * 64}
    return ModelAnnouncement(content_id=content_id, **defaults | values)


def worker(worker_id: str = "w", role: Role = Role.DECODE, load: WorkerLoad = READY, **values: Any) -> Worker:
    """A worker as its lease describes it.

    Args:
        values: further fields of `WorkerInfo`.
    """
    return Worker(worker_info(worker_id, role, **values), load)


def sequence_spec(token_ids: Sequence[int] = (1, 2, 3), request_id: str = "r", **values: Any) -> SequenceSpec:
    """A choice that is greedy and ignores the end of sequence, unless it says something else.

    Args:
        values: further fields of `SequenceSpec`, and those of its `SamplingParams` beside them.
    """
    sampling: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "seed": 0, "ignore_eos": True}
    sampling |= {name: values.pop(name) for name in _SAMPLING if name in values}
    defaults: dict[str, Any] = {"choice_index": 0, "num_prompt_tokens": len(token_ids), "cache_seed": b"seed"}
    return SequenceSpec(
        request_id=request_id,
        token_ids=tuple(token_ids),
        **{"sampling": SamplingParams(**sampling)} | defaults | values,
    )


def registered_adapter(name: str = "poet", digest: str = "ab" * 32, **values: Any) -> RegisteredAdapter:
    """An adapter that an operator has registered.

    Args:
        values: further fields of `Adapter`.
    """
    fields: dict[str, Any] = {"path": f"/adapters/{name}", "rank": 8}
    adapter = Adapter(name=name, digest=digest, **fields | values)
    return RegisteredAdapter(adapter=adapter, num_bytes=4096, since_s=1_700_000_000.0)


def no_adapters() -> AdapterOrders:
    """Orders of a router that knows neither adapters nor workers."""
    return AdapterOrders(MemoryAdapters(MemoryStore()), WorkerClient(), lambda: (), "tiny")


def step_costs(**values: float) -> StepCosts:
    """Costs of a worker's steps, of which only those that are named are not zero.

    Args:
        values: fields of `StepCosts`.
    """
    return StepCosts(**dict.fromkeys(_STEP_COSTS, 0.0) | values)


def claim(**values: Any) -> Claim:
    """What a request of the default tenant without objectives may claim, arrived now."""
    defaults: dict[str, Any] = {
        "tenant": DEFAULT_TENANT,
        "priority": 0,
        "slo_class": "default",
        "objective": NO_OBJECTIVE,
        "weights": Weights(),
        "arrived_s": time.monotonic(),
    }
    return Claim(**defaults | values)


def waker(pools: PoolView, config: RouterConfig | None = None) -> Waker:
    """Of a model without a controller."""

    async def wake() -> None:
        raise NoController("no controller is known")

    return Waker(pools, wake, config or RouterConfig())


def cluster_status(*workers: Worker, **values: Any) -> ClusterStatus:
    """A healthy cluster of these workers, and of nothing else. Pools and controller are those of its only model."""
    contents = {each.info.content_id for each in workers} or {"content"}
    of_model = {"pools": values.get("pools", {}), "controller": values.get("controller")}
    models = tuple(
        ServedModel(id="tiny", path="/models/tiny", content_id=content, release="tiny-1", **of_model)
        for content in contents
    )
    defaults: dict[str, Any] = {"pools": {}, "routers": (), "redis_address": "", "redis_ok": True, "models": models}
    return ClusterStatus(workers=workers, **defaults | values)

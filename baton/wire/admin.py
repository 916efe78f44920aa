"""Contract of operators (`admin.proto`): the cluster's status, changes of its pools, explained placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from google.protobuf import json_format

from baton import api
from baton.cluster import ClusterStatus, ControllerInfo, PoolStatus, ServedModel, Worker
from baton.costs import StepCosts
from baton.registered_adapters import Adapters, RegisteredAdapter
from baton.timelines import RequestList, RequestTimeline
from baton.v1 import admin_pb2
from baton.wire.convert import from_pb, to_pb

DIGEST_SHOWN = 12
"""Digits of the digest that stand for an adapter without a name."""


def status_response(status: ClusterStatus) -> admin_pb2.GetStatusResponse:
    """Encode the output of `baton status`."""
    return admin_pb2.GetStatusResponse(
        pools=_pools(status),
        workers=_workers(status),
        routers=[to_pb(router, admin_pb2.Router) for router in status.routers],
        redis=admin_pb2.Redis(
            address=status.redis_address,
            ok=status.redis_ok,
            garbage=[to_pb(each, admin_pb2.StoreGarbage) for each in status.store_garbage],
        ),
        models=[_model(model) for model in status.models],
        controller=_controller(status.controller) if status.controller else None,
    )


def pools_response(status: ClusterStatus) -> admin_pb2.ListPoolsResponse:
    """Encode the pools of a status."""
    return admin_pb2.ListPoolsResponse(pools=_pools(status))


def workers_response(status: ClusterStatus) -> admin_pb2.ListWorkersResponse:
    """Encode the workers of a status."""
    return admin_pb2.ListWorkersResponse(workers=_workers(status))


def scale_response(pool: PoolStatus) -> admin_pb2.ScalePoolResponse:
    """Encode the resized pool."""
    return admin_pb2.ScalePoolResponse(pool=to_pb(pool, admin_pb2.Pool))


def drain_response(worker: Worker) -> admin_pb2.DrainWorkerResponse:
    """Encode the draining worker."""
    return admin_pb2.DrainWorkerResponse(worker=_worker(worker))


def role_response(worker: Worker) -> admin_pb2.SetWorkerRoleResponse:
    """Encode the worker whose role changes."""
    return admin_pb2.SetWorkerRoleResponse(worker=_worker(worker))


def registered_adapter(registered: RegisteredAdapter, model: str) -> admin_pb2.RegisteredAdapter:
    """Encode a registered adapter of a base model."""
    adapter = registered.adapter
    return admin_pb2.RegisteredAdapter(
        name=adapter.name,
        path=adapter.path,
        digest=adapter.digest,
        rank=adapter.rank,
        num_bytes=registered.num_bytes,
        since_s=registered.since_s,
        model=model,
    )


def adapter_as_json(message: admin_pb2.RegisteredAdapter) -> dict[str, Any]:
    """Return a registered adapter as `baton adapters list --json` prints it."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def adapters_response(adapters: Mapping[str, Adapters]) -> admin_pb2.ListAdaptersResponse:
    """Encode the registered adapters of base models, ordered by model and name."""
    listed = [registered_adapter(of[name], model) for model, of in sorted(adapters.items()) for name in sorted(of)]
    return admin_pb2.ListAdaptersResponse(adapters=listed)


def step_costs(message: admin_pb2.StepCosts) -> StepCosts:
    """Decode a worker's step costs from a status message."""
    return from_pb(message, StepCosts)


def explain_response(found: Sequence[RequestTimeline]) -> admin_pb2.ExplainResponse:
    """Encode the timelines of requests of one id, the latest first."""
    latest = {each.summary.tenant: each for each in reversed(found)}
    return admin_pb2.ExplainResponse(
        decisions=[to_pb(each, admin_pb2.Decision) for one in latest.values() for each in one.placements],
        requests=[to_pb(each, admin_pb2.RequestTimeline) for each in found],
    )


def explanations(message: admin_pb2.ExplainResponse) -> list[api.Explanation]:
    """Decode the explanations of choices' placements."""
    return [from_pb(decision, api.Explanation) for decision in message.decisions]


def timelines(message: admin_pb2.ExplainResponse) -> list[RequestTimeline]:
    """Decode the timelines of requests of one id, the latest first."""
    return [from_pb(each, RequestTimeline) for each in message.requests]


def requests_response(found: RequestList) -> admin_pb2.ListRequestsResponse:
    """Encode a list of requests."""
    return to_pb(found, admin_pb2.ListRequestsResponse)


def request_list(message: admin_pb2.ListRequestsResponse) -> RequestList:
    """Decode a list of requests."""
    return from_pb(message, RequestList)


def status_as_json(message: admin_pb2.GetStatusResponse) -> dict[str, Any]:
    """Return the output of `baton status --json`: the message's fields, including zeros and empty values."""
    result = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    for worker in result["workers"]:
        for name in ("epoch", "preemptions", "computed_tokens", "queued_tokens"):
            worker[name] = int(worker[name])  # protobuf's JSON writes 64-bit numbers as strings
        worker["transfers"] = {name: int(number) for name, number in worker["transfers"].items()}
    for garbage in result["redis"]["garbage"]:
        garbage["times"] = int(garbage["times"])
    for router in result["routers"]:
        for counted in (router, *router["models"]):
            for name in ("met", "missed", "rejected"):
                counted[name] = int(counted[name])
    return result


def _pools(of: ClusterStatus | ServedModel) -> dict[str, admin_pb2.Pool]:
    return {name: to_pb(pool, admin_pb2.Pool) for name, pool in of.pools.items()}


def _model(model: ServedModel) -> admin_pb2.ServedModel:
    return admin_pb2.ServedModel(
        id=model.id,
        path=model.path,
        content_id=model.content_id,
        release=model.release,
        share=model.share,
        state=model.state,
        pools=_pools(model),
        controller=_controller(model.controller) if model.controller else None,
        held=model.held,
        wake_s=model.wake_s,
        problem=model.problem,
    )


def _controller(info: ControllerInfo) -> admin_pb2.Controller:
    scaling = [to_pb(each, admin_pb2.PoolScaling) for each in info.scaling]
    return admin_pb2.Controller(pid=info.pid, address=info.address, scaling=scaling, version=info.version)


def _workers(status: ClusterStatus) -> list[admin_pb2.Worker]:
    held = {digest for worker in status.workers for digest in worker.load.adapters}
    names: dict[str, str] = {}
    for adapters in status.adapters.values() if held else ():
        names |= {each.adapter.digest: name for name, each in adapters.items() if each.adapter.digest in held}
    releases = {model.content_id: model.release for model in status.models}
    return [_worker(worker, names, releases.get(worker.info.content_id, "")) for worker in status.workers]


def _worker(
    worker: Worker, adapter_names: Mapping[str, str] = MappingProxyType({}), release: str = ""
) -> admin_pb2.Worker:
    """Encode a worker.

    Args:
        adapter_names: digests of registered adapters, with their names.
        release: release of its model; empty: not known.
    """
    info, load = worker.info, worker.load
    return admin_pb2.Worker(
        id=info.id,
        role=info.role,
        state=load.state,
        pid=info.pid,
        node=info.node,
        address=info.address,
        epoch=info.epoch,
        running=load.running,
        waiting=load.waiting,
        blocks=to_pb(load.blocks, admin_pb2.Blocks),
        state_rows=to_pb(load.state_rows, admin_pb2.Blocks) if load.state_rows.total else None,
        self_check=load.self_check,
        transfers=admin_pb2.Transfers(
            **{field.name: getattr(load.transfers, field.name) for field in admin_pb2.Transfers.DESCRIPTOR.fields}
        ),
        costs=to_pb(load.costs, admin_pb2.StepCosts),
        block_size=info.block_size,
        chunk_tokens=info.chunk_tokens,
        preemptions=load.preemptions,
        busy_s=load.busy_s,
        computed_tokens=load.computed_tokens,
        queued_tokens=load.queued_tokens,
        version=info.version,
        content_id=info.content_id,
        wire_compat=info.wire_compat,
        max_model_len=info.max_model_len,
        engine=info.engine,
        sampler=info.sampler,
        computes=to_pb(info.computes, admin_pb2.Computes),
        connections=[to_pb(each, admin_pb2.OpenConnections) for each in load.connections],
        max_adapters=info.max_adapters,
        adapters=[adapter_names.get(digest) or digest[:DIGEST_SHOWN] for digest in load.adapters],
        adapter_load_s=load.adapter_load_s,
        release=release,
    )

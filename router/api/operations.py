"""Endpoints below /api for the page: cluster status with alerts, history, a router's load, a worker's log, and orders.

The orders drain a worker, change its role, set the size of a pool, or add and remove an adapter.

All endpoints are for operators, see `router.api.http`. Orders always need an API key. Without a tenants file any client
that reaches the port could send them, so they are refused; `baton` sends them over gRPC instead. A body must be JSON: a
browser sends JSON to another website's host only if that host agrees, and ours never does.
"""

from __future__ import annotations

import dataclasses
import math
import time
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from baton import wire
from baton.cluster import VERSION, ClusterStatus, Role, Worker
from baton.config import SloClassConfig
from baton.errors import Forbidden
from baton.registered_adapters import MAX_NAME, MAX_PATH
from baton.timelines import DEFAULT_LIMIT, MAX_LIMIT, OUTCOMES, RequestList, RequestTimeline, list_json, timeline_json
from baton.v1 import admin_pb2
from router.admission.tenants import TenantBook
from router.api.exchange import JsonAnswer, at_a_reports_turn
from router.api.places import OpenConnections
from router.api.routes import Reader, answers
from router.cluster.history import SLOT_S, ClusterHistory
from router.cluster.watch import Alert, AlertBook, LoadMeter, RouterLoad
from router.models.entry import ModelEntry
from router.models.operated import OperatedModels
from router.models.table import ModelTable
from router.timeline.log import RequestFilter

NO_STORE = {"Cache-Control": "no-store"}
MAX_LOG_LINES = 200
MAX_POOL = 10_000
_TEXT: Schemas = {"type": "string"}
_COUNT: Schemas = {"type": "integer", "minimum": 0}
_SECONDS: Schemas = {"type": "number"}
_OBJECTIVE: Schemas = {"type": ["number", "null"]}
Schemas = dict[str, Any]
"""A JSON schema, or schemas by their names."""
_PLAIN: dict[type, Schemas] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    float: {"type": ["number", "null"]},  # JSON has no infinity, so null stands for an objective that is not set
    types.NoneType: {"type": "null"},
}
_NUMBER: Schemas = {"anyOf": [{"type": "number"}, {"enum": ["Infinity", "-Infinity", "NaN"]}]}
"""Schema of a double as protobuf's JSON writes it."""
_OF_PROTOBUF: dict[int, Schemas] = {
    FieldDescriptor.CPPTYPE_STRING: {"type": "string"},
    FieldDescriptor.CPPTYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.CPPTYPE_DOUBLE: _NUMBER,
    FieldDescriptor.CPPTYPE_INT32: {"type": "integer"},
    FieldDescriptor.CPPTYPE_UINT32: {"type": "integer"},
    FieldDescriptor.CPPTYPE_UINT64: {"type": "integer"},
}
PATH = "/api/requests"
FRESH = {"Cache-Control": "no-store"}
_Tenant = Annotated[str, Query(description="Tenant of the requests; empty: all tenants.")]
_Model = Annotated[str, Query(description="Name, release or content id of the model; empty: the only one.")]
_OUTCOMES = Query(
    description="Outcomes of the requests; none: all.", json_schema_extra={"items": {"enum": list(OUTCOMES)}}
)


def described(properties: Schemas, optional: typing.Collection[str] = ()) -> Schemas:
    """Return the schema of an object with these properties; all but the optional ones are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def many(schema: Schemas) -> Schemas:
    """Return the schema of a list."""
    return {"type": "array", "items": schema}


def of_dataclass(kind: type) -> Schemas:
    """Return the schema of `dataclasses.asdict` of a dataclass."""
    hints = typing.get_type_hints(kind)
    return described({each.name: _of_type(hints[each.name]) for each in dataclasses.fields(kind)})


def _of_type(annotation: Any) -> Schemas:
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return of_dataclass(annotation)
    if isinstance(annotation, types.UnionType):
        return {"anyOf": [_of_type(each) for each in typing.get_args(annotation)]}
    if typing.get_origin(annotation) is tuple:
        return many(_of_type(typing.get_args(annotation)[0]))
    return _PLAIN[annotation]


def of_message(message: Descriptor) -> Schemas:
    """Return the schema of a protobuf message whose JSON includes zeros, and writes 64-bit numbers as numbers."""
    fields = {field.name: _of_field(field) for field in message.fields}
    return described(fields, {field.name for field in message.fields if field.has_presence})


def _of_field(field: FieldDescriptor) -> Schemas:
    if field.message_type is None:
        schema = _OF_PROTOBUF[field.cpp_type]
    elif field.message_type.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _of_field(field.message_type.fields_by_name["value"])}
    else:
        schema = of_message(field.message_type)
    return many(schema) if field.is_repeated else schema


def _by_name(schema: Schemas) -> Schemas:
    return {"type": "object", "additionalProperties": schema}


_CLUSTER = of_message(admin_pb2.GetStatusResponse.DESCRIPTOR)
STATUS = described(
    {
        "now_s": _SECONDS,
        "version": _TEXT,
        "router": _TEXT,
        "not_ready": _TEXT,
        "takes_orders": {"type": "boolean"},
        "slo_classes": _by_name(described(dict.fromkeys(("ttft_s", "itl_s", "e2e_s"), _OBJECTIVE))),
        "alerts": many(of_dataclass(Alert)),
        "load": of_dataclass(RouterLoad),
        **_CLUSTER["properties"],
    },
    optional=_CLUSTER["properties"].keys() - _CLUSTER["required"],
)
_SLOT = described({"slot": _COUNT, "num_routers": _COUNT, "counts": _by_name(_SECONDS)})
HISTORY = described({"now_s": _SECONDS, "slot_s": _COUNT, "bounds": _by_name(many(_SECONDS)), "slots": many(_SLOT)})
REQUESTS = of_dataclass(RequestList)
_WHOLE = of_dataclass(RequestTimeline)["properties"]
_TIMELINE = described(_WHOLE.pop("summary")["properties"] | _WHOLE)
TIMELINES = described({"requests": many(_TIMELINE)})
DRAINED = described({"worker": _TEXT, "state": {"const": "draining"}})
LOG = described({"worker": _TEXT, "lines": many(_TEXT)})
_ADAPTER = of_message(admin_pb2.RegisteredAdapter.DESCRIPTOR)
ADAPTERS = described({"adapters": many(_ADAPTER)})
ADDED = described({"adapter": _ADAPTER, "is_replaced": {"type": "boolean"}})
REMOVED = described({"name": _TEXT})
MOVED = described({"worker": _TEXT, "role": {"enum": ["prefill", "decode"]}})
RELEASE = described({"version": _TEXT})
WOKEN = described({"model": _TEXT})
SIZED = described({"pool": _TEXT, "desired": _COUNT, "ready": _COUNT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Parts of a router that the operator endpoints use."""

    router_id: str
    status: Callable[[Collection[str]], ClusterStatus]
    """Returns the status of the models of these content ids; none: of all."""
    history: ClusterHistory
    load: LoadMeter
    """Load of this router."""
    alerts: AlertBook
    connections: OpenConnections
    """Connections to the HTTP port."""
    classes: Mapping[str, SloClassConfig]
    models: OperatedModels


class Order(BaseModel):
    """Body of an order."""

    model_config = ConfigDict(extra="forbid")
    model: Annotated[str, Field(max_length=MAX_NAME)] = ""
    """Name, release or content id of the model; empty: the only one."""


class RoleOrder(Order):
    """Body of an order that changes a worker's role."""

    role: Role


class SizeOrder(Order):
    """Body of an order that sets the size of a pool."""

    workers: Annotated[int, Field(strict=True, ge=0, le=MAX_POOL)]


class RemoveOrder(Order):
    """Body of an order that removes an adapter, whose name may have slashes."""

    name: Annotated[str, Field(max_length=MAX_NAME)]


class AddOrder(RemoveOrder):
    """Body of an order that registers an adapter."""

    path: Annotated[str, Field(max_length=MAX_PATH)]


AnyOrder = TypeVar("AnyOrder", bound=Order)


def add_operations(app: FastAPI, operations: Operations, tenants: TenantBook, is_ready: Callable[[], str]) -> None:
    """Add the endpoints.

    Args:
        is_ready: returns "" if requests can be served, else the reason why not.
    """
    _add_views(app, operations, tenants, is_ready)
    _add_orders(app, operations, tenants)


def _add_views(app: FastAPI, operations: Operations, tenants: TenantBook, is_ready: Callable[[], str]) -> None:
    @app.get("/api/status", responses=answers(STATUS))
    async def status(request: Request) -> JSONResponse:
        """Return the cluster's state: pools, workers, routers, Redis, objectives, alerts, and the router's load."""
        async with at_a_reports_turn(request):
            return JsonAnswer(report(), headers=NO_STORE)

    def report() -> dict[str, Any]:
        return {
            "now_s": time.time(),
            "version": VERSION,
            "router": operations.router_id,
            "not_ready": is_ready(),
            "takes_orders": not tenants.is_open,
            "slo_classes": {name: _objectives(each) for name, each in operations.classes.items()},
            "alerts": [asdict(each) for each in operations.alerts.alerts()],
            "load": asdict(operations.load.now()),
            **wire.status_as_json(wire.status_response(operations.status(()))),
        }

    @app.get("/api/history", responses=answers(HISTORY))
    async def history(
        request: Request,
        since: Annotated[int, Query(description="Number of the first slot to return.")] = 0,
        model: Annotated[str, Query(description="Name, release or content id of the model; empty: all models.")] = "",
    ) -> JSONResponse:
        """Return the counts of all routers over the last hour, in slots of ten seconds."""
        releases = {each.announcement.release for each in operations.models.named(model)} if model else ()
        async with at_a_reports_turn(request):
            slots = [
                {"slot": number, "num_routers": slot.num_routers, "counts": slot.counts}
                for number, slot in operations.history.slots(since, releases).items()
            ]
            shown = {"now_s": time.time(), "slot_s": SLOT_S, "bounds": operations.history.bounds, "slots": slots}
            return JsonAnswer(shown, headers=NO_STORE)

    @app.get("/api/adapters", responses=answers(ADAPTERS))
    async def adapters(request: Request) -> JSONResponse:
        """List the registered LoRA adapters."""
        async with at_a_reports_turn(request):
            found = {each.model.facts.id: each.adapters.adapters for each in operations.models.named("")}
            listed = wire.adapters_response(found).adapters
            return JsonAnswer({"adapters": [wire.adapter_as_json(each) for each in listed]}, headers=NO_STORE)

    @app.get("/api/workers/{worker_id}/log", responses=answers(LOG))
    async def log(worker_id: str, model: _Model = "") -> JSONResponse:
        """Return the latest 200 lines of a worker's output, log lines as text."""
        entry = operations.models.one(model)
        lines = await entry.client.read_log(_worker(entry, worker_id), MAX_LOG_LINES)
        return JsonAnswer({"worker": worker_id, "lines": lines}, headers=NO_STORE)


def _add_orders(app: FastAPI, operations: Operations, tenants: TenantBook) -> None:
    @app.post("/api/workers/{worker_id}/drain", responses=answers(DRAINED))
    async def drain(request: Request, read: Reader[Order], worker_id: str) -> JSONResponse:
        """Drain and replace a worker: its requests migrate to other workers."""
        asked = await _order(read, tenants)
        controller = operations.models.one(asked.model).controller
        await controller.drain(admin_pb2.DrainWorkerRequest(worker_id=worker_id))
        return JsonAnswer({"worker": worker_id, "state": "draining"})

    @app.post("/api/workers/{worker_id}/role", responses=answers(MOVED))
    async def role(request: Request, read: Reader[RoleOrder], worker_id: str) -> JSONResponse:
        """Move a worker to the other pool, with its cache."""
        asked = await _order(read, tenants)
        controller = operations.models.one(asked.model).controller
        await controller.set_role(admin_pb2.SetWorkerRoleRequest(worker_id=worker_id, role=asked.role))
        return JsonAnswer({"worker": worker_id, "role": asked.role})

    @app.post("/api/pools/{pool}", responses=answers(SIZED))
    async def size(request: Request, read: Reader[SizeOrder], pool: str) -> JSONResponse:
        """Set the desired number of workers of a pool."""
        asked = await _order(read, tenants)
        controller = operations.models.one(asked.model).controller
        answer = await controller.scale(admin_pb2.ScalePoolRequest(pool=pool, desired=asked.workers))
        return JsonAnswer({"pool": pool, "desired": answer.pool.desired, "ready": answer.pool.ready})

    @app.post("/api/adapters", responses=answers(ADDED))
    async def add(request: Request, read: Reader[AddOrder]) -> JSONResponse:
        """Register a LoRA adapter, or replace its weights, after a worker has checked its folder."""
        asked = await _order(read, tenants)
        entry = operations.models.one(asked.model)
        registered, is_replaced = await entry.adapters.add(asked.name, asked.path)
        adapter = wire.adapter_as_json(wire.registered_adapter(registered, entry.model.facts.id))
        return JsonAnswer({"adapter": adapter, "is_replaced": is_replaced})

    @app.post("/api/adapters/remove", responses=answers(REMOVED))
    async def remove(request: Request, read: Reader[RemoveOrder]) -> JSONResponse:
        """Remove a LoRA adapter; its running requests complete."""
        asked = await _order(read, tenants)
        await operations.models.one(asked.model).adapters.remove(asked.name)
        return JsonAnswer({"name": asked.name})

    @app.post("/api/models/wake", responses=answers(WOKEN))
    async def wake(request: Request, read: Reader[Order]) -> JSONResponse:
        """Start the workers of a model that sleeps."""
        asked = await _order(read, tenants)
        entry = operations.models.one(asked.model)
        await entry.controller.wake(admin_pb2.WakeModelRequest())
        return JsonAnswer({"model": entry.announcement.release})


async def _order(read: Reader[AnyOrder], tenants: TenantBook) -> AnyOrder:
    """Return the body of an order. Raises Forbidden if no tenants are configured; see `read_body` for other errors."""
    if tenants.is_open:
        raise Forbidden("orders over HTTP need an operator's API key, and router.tenants_file is not set; use `baton`")
    return await read()


def _worker(entry: ModelEntry, worker_id: str) -> Worker:
    """Return the worker of a model with this id. Raises HTTPException 404 if there is none."""
    for worker in entry.pools.workers:
        if worker.info.id == worker_id:
            return worker
    raise HTTPException(404, f"there is no worker {worker_id!r:.100}")


def _objectives(slo: SloClassConfig) -> dict[str, Any]:
    """Return the objectives of a class in seconds; None: no objective."""
    found = {"ttft_s": slo.ttft_ms, "itl_s": slo.itl_ms, "e2e_s": slo.e2e_ms}
    return {name: ms / 1e3 if math.isfinite(ms) else None for name, ms in found.items()}


def _wanted(
    tenant: _Tenant = "",
    slo_class: Annotated[str, Query(description="SLO class of the requests; empty: all classes.")] = "",
    outcome: Annotated[tuple[str, ...], _OUTCOMES] = (),
    model: Annotated[str, Query(description="Name or release of the model; empty: all models.")] = "",
    limit: Annotated[int, Query(json_schema_extra={"minimum": 1, "maximum": MAX_LIMIT})] = DEFAULT_LIMIT,
) -> RequestFilter:
    return RequestFilter(tenant=tenant, slo_class=slo_class, outcomes=outcome, model=model, limit=limit)


def add_requests(app: FastAPI, models: ModelTable) -> None:
    """Add the list of requests and the timeline of one."""

    @app.get(PATH, responses=answers(REQUESTS))
    async def requests(request: Request, wanted: Annotated[RequestFilter, Depends(_wanted)]) -> JsonAnswer:
        """Return the latest requests of a router, without their content."""
        async with at_a_reports_turn(request):
            return JsonAnswer(list_json(models.requests.listed(wanted)), headers=FRESH)

    @app.get(f"{PATH}/{{request_id:path}}", responses=answers(TIMELINES))
    async def request(request_id: str, tenant: _Tenant = "") -> JsonAnswer:
        """Return the timelines of a request: of all calls with this id that the router keeps."""
        found = models.requests.explain(request_id, tenant)
        if not found:
            raise HTTPException(
                404, f"this router does not know a request {request_id!r:.300}; {models.requests.keeps}"
            )
        return JsonAnswer({"requests": [timeline_json(each) for each in found]}, headers=FRESH)

"""Workers, routers and the controller as JSON. Unknown fields are skipped: a newer release may run beside this one."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from baton.cluster import (
    BlockCounts,
    ControllerInfo,
    PoolScaling,
    Role,
    RouterInfo,
    TransferCounts,
    Worker,
    WorkerInfo,
    WorkerLoad,
    WorkerState,
)
from baton.costs import PRIOR, StepCosts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def encode(value: WorkerInfo | WorkerLoad | RouterInfo | ControllerInfo) -> str:
    return json.dumps(dataclasses.asdict(value), separators=(",", ":"))


def decode_worker(info: bytes, load: bytes) -> Worker:
    info_fields = _fields(WorkerInfo, json.loads(info))
    load_fields = _fields(WorkerLoad, json.loads(load))
    info_fields["role"] = Role(info_fields["role"])
    load_fields["state"] = WorkerState(load_fields["state"])
    load_fields["blocks"] = BlockCounts(**_fields(BlockCounts, load_fields["blocks"]))
    load_fields["costs"] = StepCosts(**load_fields["costs"]) if "costs" in load_fields else PRIOR
    load_fields["transfers"] = TransferCounts(**_fields(TransferCounts, load_fields.get("transfers", {})))
    return Worker(WorkerInfo(**info_fields), WorkerLoad(**load_fields))


def decode_router(info: bytes) -> RouterInfo:
    return RouterInfo(**_fields(RouterInfo, json.loads(info)))


def decode_controller(info: bytes) -> ControllerInfo:
    fields = _fields(ControllerInfo, json.loads(info))
    scaling = (PoolScaling(**_fields(PoolScaling, pool)) for pool in fields.pop("scaling", ()))
    return ControllerInfo(**fields, scaling=tuple(scaling))


def _fields(cls: type[DataclassInstance], values: dict[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values}

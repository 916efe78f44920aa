"""Workers, routers and the controller as JSON.

Unknown fields are skipped, at any depth, and what is new has a default: a newer or older release may run beside this
one. Everything else is checked: what is read may be anything.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from baton.blocks import GRANULE
from baton.cluster import ControllerInfo, RouterInfo, Worker, WorkerInfo, WorkerLoad
from kvstore.index.values import MAX_EPOCH, MAX_SEQ, MAX_TEXT

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
ADDRESS = re.compile(r"[\w.\-\[\]:%]+:[0-9]{1,5}", re.ASCII)
MAX_BYTES = 2**20
"""Of one value; a worker's has a thousandth of it."""
MAX_ITEMS = 1000
MAX_INT32 = 2**31 - 1
MAX_S = 1e9
"""Seconds, and all other fractions: 30 years."""
MAX_COST_S = 3600.0
LEAST = {"block_size": GRANULE, "max_model_len": 1, "chunk_tokens": 1}
"""Of a number, where that is not 0."""
MOST: dict[str, float] = {
    **dict.fromkeys(("pid", "block_size", "max_model_len", "chunk_tokens", "running", "waiting", "wanted"), MAX_INT32),
    **dict.fromkeys(("total", "free", "cached", "in_use", "open_pairs", "slots_in_use"), MAX_INT32),
    **dict.fromkeys(("s_overhead", "s_per_token", "s_per_pair"), MAX_COST_S),
    **dict.fromkeys(("s_weights", "s_per_sequence", "s_per_kv_token"), MAX_COST_S),
    "epoch": MAX_EPOCH,
}
"""Of a number, where that is not `MAX_SEQ` or `MAX_S`."""


def encode(value: WorkerInfo | WorkerLoad | RouterInfo | ControllerInfo) -> str:
    return json.dumps(dataclasses.asdict(value), separators=(",", ":"))


def decode_worker(info: bytes, load: bytes) -> Worker:
    """Raises ValueError."""
    worker = Worker(_decode(WorkerInfo, info), _decode(WorkerLoad, load))
    if worker.info.block_size % GRANULE:
        raise ValueError(f"block_size {worker.info.block_size} is no multiple of {GRANULE}")
    if not ADDRESS.fullmatch(worker.info.address):
        raise ValueError(f"{worker.info.address!r:.100} is no HOST:PORT")
    return worker


def decode_router(info: bytes) -> RouterInfo:
    """Raises ValueError."""
    return _decode(RouterInfo, info)


def decode_controller(info: bytes) -> ControllerInfo:
    """Raises ValueError."""
    return _decode(ControllerInfo, info)


def _decode(cls: type[T], packed: bytes) -> T:
    if len(packed) > MAX_BYTES:
        raise ValueError(f"it has {len(packed)} bytes")
    try:
        found = json.loads(packed)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return _object(cls, found, cls.__name__)


def _object(cls: type[T], found: Any, where: str) -> T:
    if not isinstance(found, dict):
        raise ValueError(f"{where} is no object")
    kinds = _kinds(cls)
    values = {name: _value(kinds[name], found[name], name) for name in kinds.keys() & found.keys()}
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _value(kind: Any, found: Any, name: str) -> Any:
    """One field's, of the type that the field has."""
    if dataclasses.is_dataclass(kind):
        return _object(typing.cast("type[DataclassInstance]", kind), found, name)
    if typing.get_origin(kind) is tuple:
        if not isinstance(found, list) or len(found) > MAX_ITEMS:
            raise ValueError(f"{name} is no list of at most {MAX_ITEMS}")
        return tuple(_value(typing.get_args(kind)[0], item, name) for item in found)
    if issubclass(kind, Enum):
        return kind(found)
    if kind is str:
        if not isinstance(found, str) or len(found) > MAX_TEXT:
            raise ValueError(f"{name} is no text of at most {MAX_TEXT} characters")
        found.encode()  # half a surrogate pair is no text
        return found
    return _number(kind, found, name)


def _number(kind: type[int] | type[float], found: Any, name: str) -> int | float:
    least, most = LEAST.get(name, 0), MOST.get(name, MAX_SEQ if kind is int else MAX_S)
    if type(found) not in (int, kind) or not least <= found <= most:  # nor is NaN
        raise ValueError(f"{name} is {found!r:.100}, and no number from {least} to {most}")
    return kind(found)


@cache
def _kinds(cls: type[DataclassInstance]) -> dict[str, Any]:
    return typing.get_type_hints(cls)

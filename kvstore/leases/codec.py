"""JSON encoding of workers, routers and the controller.

Unknown fields are skipped at any depth, and new fields have defaults, so a newer or an older release may run next to
this one. Everything else is checked, because a stored value may be anything.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from baton.addresses import is_address
from baton.blocks import HASH_BLOCK
from baton.cluster import BlockCounts, ControllerInfo, RouterInfo, TransferCounts, WorkerInfo, WorkerLoad
from kvstore.index.values import MAX_EPOCH, MAX_SEQ, MAX_TEXT, label

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Reader: TypeAlias = Callable[[Any], Any]
"""Converts a JSON value to a field's value; raises ValueError."""
MAX_BYTES = 2**16
"""Largest JSON text of one value; both values of a worker have a few thousand bytes."""
MAX_ITEMS = 1000
MAX_INT32 = 2**31 - 1
MAX_S = 1e9
"""Largest number of seconds, and of any other fraction: 30 years."""
MAX_COST_S = 3600.0
LABELS = {
    "engine",
    "sampler",
    "transport",
    "carrier",
    "dtype",
    "weights",
    "kv_dtype",
    "attention",
    "kv_copies",
    "adapters",
}
"""Text fields that are read as names of a bounded form."""
LEAST = {"block_size": HASH_BLOCK, "max_model_len": HASH_BLOCK, "chunk_tokens": 1}
"""Lower bounds of numbers; the default is 0."""
MOST: dict[str, float] = {
    **dict.fromkeys(
        ("pid", "block_size", "max_model_len", "chunk_tokens", "running", "waiting", "wanted", "ready_workers"),
        MAX_INT32,
    ),
    **dict.fromkeys(
        ("total", "free", "cached", "in_use", "open_connections", "slots_in_use", "num_unplaced"), MAX_INT32
    ),
    **dict.fromkeys(("num_ranks", "num_graphs", "num_fused", "max_adapters", "image_placeholder"), MAX_INT32),
    **dict.fromkeys(("s_overhead", "s_per_token", "s_per_pair"), MAX_COST_S),
    **dict.fromkeys(("s_weights", "s_per_sequence", "s_per_kv_token", "adapter_load_s"), MAX_COST_S),
    "epoch": MAX_EPOCH,
}
"""Upper bounds of numbers; the default is `MAX_SEQ`, for fractions `MAX_S`."""


def encode(value: WorkerInfo | WorkerLoad | RouterInfo | ControllerInfo) -> str:
    return json.dumps(dataclasses.asdict(value), separators=(",", ":"))


def encode_load(load: WorkerLoad) -> bytes:
    """Encode a load for an event: without the fields that have their defaults."""
    return json.dumps(_differences(load, WorkerLoad()), separators=(",", ":"), default=dataclasses.asdict).encode()


def _differences(value: DataclassInstance, usual: DataclassInstance) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in dataclasses.fields(value):
        own = getattr(value, each.name)
        if own != getattr(usual, each.name):
            has_defaults = isinstance(own, (BlockCounts, TransferCounts))
            found[each.name] = _differences(own, type(own)()) if has_defaults else own
    return found


def decode_info(found: bytes) -> WorkerInfo:
    """Decode a worker's description; raises ValueError."""
    info = _decode(WorkerInfo, found)
    if info.block_size % HASH_BLOCK:
        raise ValueError(f"block_size {info.block_size} is no multiple of {HASH_BLOCK}")
    if not is_address(info.address):
        raise ValueError(f"{info.address!r:.100} is no HOST:PORT")
    return info


def decode_load(found: bytes) -> WorkerLoad:
    """Decode a worker's load; raises ValueError."""
    return _decode(WorkerLoad, found)


def decode_router(info: bytes) -> RouterInfo:
    """Decode a router; raises ValueError."""
    return _decode(RouterInfo, info)


def decode_controller(info: bytes) -> ControllerInfo:
    """Decode the controller; raises ValueError."""
    controller = _decode(ControllerInfo, info)
    if not is_address(controller.address):
        raise ValueError(f"{controller.address!r:.100} is no HOST:PORT")
    return controller


def decode_sizes(found: bytes) -> dict[str, int]:
    """Decode the desired sizes of all pools; raises ValueError."""
    try:
        sizes = json.loads(found)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(sizes, dict) or not all(type(size) is int and 0 <= size <= MAX_INT32 for size in sizes.values()):
        raise ValueError("it has no sizes of pools")
    return sizes


def _decode(cls: type[T], packed: bytes) -> T:
    if len(packed) > MAX_BYTES:
        raise ValueError(f"it has {len(packed)} bytes")
    try:
        found = json.loads(packed)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return _object(cls, found)


def _object(cls: type[T], found: Any) -> T:
    if not isinstance(found, dict):
        raise ValueError(f"{cls.__name__} is no object")
    try:
        return cls(**{name: read(found[name]) for name, read in _readers(cls) if name in found})
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from None


@cache
def _readers(cls: type[DataclassInstance]) -> tuple[tuple[str, Reader], ...]:
    """Return the readers of a class's fields, cached, because leases are read every second while tokens wait."""
    return tuple((name, _reader(kind, name)) for name, kind in typing.get_type_hints(cls).items())


def _reader(kind: Any, name: str) -> Reader:
    """Return the reader of a field of that type; the reader raises ValueError."""
    if dataclasses.is_dataclass(kind):
        return partial(_object, typing.cast("type[DataclassInstance]", kind))
    if typing.get_origin(kind) is tuple:
        return partial(_items, _reader(typing.get_args(kind)[0], name), name)
    if issubclass(kind, Enum):
        return partial(kind)
    if name in LABELS:
        return label
    if kind is str:
        return partial(_text, name)
    least, most = LEAST.get(name, 0), MOST.get(name, MAX_SEQ if kind is int else MAX_S)

    def number(found: Any) -> Any:
        of_type = type(found)
        if (of_type is kind or of_type is int) and least <= found <= most:  # NaN is neither
            return found if of_type is kind else kind(found)
        raise ValueError(f"{name} is {found!r:.100}, and no number from {least} to {most}")

    return number


def _items(read: Reader, name: str, found: Any) -> tuple[Any, ...]:
    if not isinstance(found, list) or len(found) > MAX_ITEMS:
        raise ValueError(f"{name} is no list of at most {MAX_ITEMS}")
    return tuple(map(read, found))


def _text(name: str, found: Any) -> str:
    if not isinstance(found, str) or len(found) > MAX_TEXT:
        raise ValueError(f"{name} is no text of at most {MAX_TEXT} characters")
    found.encode()  # raises for a lone surrogate
    return found

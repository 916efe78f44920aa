"""JSON encoding of workers, routers, controllers and models.

Unknown fields are skipped at any depth, and new fields have defaults, so a newer or an older release may run next to
this one. Everything else is checked, because a stored value may be anything.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Callable
from enum import Enum
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from baton.addresses import is_address
from baton.blocks import HASH_BLOCK
from baton.cluster import (
    MAX_REASON,
    BlockCounts,
    ControllerInfo,
    ModelAnnouncement,
    RoutedModel,
    RouterInfo,
    TransferCounts,
    WorkerInfo,
    WorkerLoad,
)
from kvstore.index.values import MAX_EPOCH, MAX_NAME_BYTES, MAX_SEQ, MAX_TEXT, label
from kvstore.leases.protocol import MAX_MODELS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
Reader: TypeAlias = Callable[[Any], Any]
"""Converts a JSON value to a field's value; raises ValueError."""
MAX_BYTES = 2**16
"""Largest JSON text of one value; both values of a worker have a few thousand bytes."""
ROUTER_BYTES = 2**18
"""Largest JSON text of a router with the counts of `MAX_MODELS` models, each of at most 240 bytes."""
MAX_ITEMS = 1000
MAX_INT32 = 2**31 - 1
MAX_S = 1e9
"""Largest number of seconds, and of any other fraction: 30 years."""
MAX_COST_S = 3600.0
MAX_PATH = 4096
"""Longest path of a model, in characters."""
MODES = ("auto", "disaggregated", "aggregated")
"""Values of `router.mode`."""
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
    "content_id",
}
"""Text fields that are read as names of a bounded form."""
MOST_CHARACTERS = {"name": MAX_NAME_BYTES, "release": MAX_NAME_BYTES, "path": MAX_PATH, "problem": MAX_REASON}
"""Maximum lengths of texts; the default is `MAX_TEXT`."""
MOST_ITEMS = {"models": MAX_MODELS}
"""Maximum lengths of lists; the default is `MAX_ITEMS`."""
LEAST = {"block_size": HASH_BLOCK, "chunk_tokens": 1}
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
    **dict.fromkeys(("in_flight", "held"), MAX_INT32),
    **dict.fromkeys(("s_overhead", "s_per_token", "s_per_pair"), MAX_COST_S),
    **dict.fromkeys(("s_weights", "s_per_sequence", "s_per_kv_token", "adapter_load_s"), MAX_COST_S),
    "epoch": MAX_EPOCH,
    "created_s": MAX_EPOCH // 1000,
}
"""Upper bounds of numbers; the default is `MAX_SEQ`, for fractions `MAX_S`."""
_DIGEST = re.compile(r"([0-9a-f]{16,128})?")


def encode(value: WorkerInfo | WorkerLoad | RouterInfo | ControllerInfo | ModelAnnouncement) -> str:
    """Encode a value.

    The counts of a router's models lack their zeros, so that those of many models stay short. The problem of a model is
    cut to `MAX_REASON`, because a reader would refuse the announcement.
    """
    fields = dataclasses.asdict(value)
    if isinstance(value, RouterInfo):
        fields["models"] = [_differences(each, RoutedModel(content_id="")) for each in value.models]
    elif isinstance(value, ModelAnnouncement):
        fields["problem"] = value.problem[:MAX_REASON]
    return json.dumps(fields, separators=(",", ":"))


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
    if info.max_model_len < HASH_BLOCK:
        raise ValueError(f"max_model_len is {info.max_model_len}, and must be at least {HASH_BLOCK}")
    if not is_address(info.address):
        raise ValueError(f"{info.address!r:.100} is no HOST:PORT")
    return info


def decode_load(found: bytes) -> WorkerLoad:
    """Decode a worker's load; raises ValueError."""
    return _decode(WorkerLoad, found)


def decode_router(info: bytes) -> RouterInfo:
    """Decode a router; raises ValueError."""
    return _decode(RouterInfo, info, ROUTER_BYTES)


def decode_controller(info: bytes) -> ControllerInfo:
    """Decode the controller; raises ValueError."""
    controller = _decode(ControllerInfo, info)
    if not is_address(controller.address):
        raise ValueError(f"{controller.address!r:.100} is no HOST:PORT")
    return controller


def decode_model(found: bytes) -> ModelAnnouncement:
    """Decode the announcement of a model; raises ValueError."""
    model = _decode(ModelAnnouncement, found)
    for name in ("name", "release"):
        shown = getattr(model, name)
        if not shown or not shown.isprintable():
            raise ValueError(f"{name} is {shown!r:.100}, and no printable text")
    if not model.files:
        raise ValueError("it has no digest of files")
    if model.mode not in MODES:
        raise ValueError(f"mode is {model.mode!r:.100}, and none of {', '.join(MODES)}")
    return model


def decode_sizes(found: bytes) -> dict[str, int]:
    """Decode the desired sizes of all pools; raises ValueError."""
    try:
        sizes = json.loads(found)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(sizes, dict) or not all(type(size) is int and 0 <= size <= MAX_INT32 for size in sizes.values()):
        raise ValueError("it has no sizes of pools")
    return sizes


def _decode(cls: type[T], packed: bytes, most: int = MAX_BYTES) -> T:
    if len(packed) > most:
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
    if name == "files":
        return _digest
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
    most = MOST_ITEMS.get(name, MAX_ITEMS)
    if not isinstance(found, list) or len(found) > most:
        raise ValueError(f"{name} is no list of at most {most}")
    return tuple(map(read, found))


def _text(name: str, found: Any) -> str:
    most = MOST_CHARACTERS.get(name, MAX_TEXT)
    if not isinstance(found, str) or len(found) > most:
        raise ValueError(f"{name} is no text of at most {most} characters")
    found.encode()  # raises for a lone surrogate
    return found


def _digest(found: Any) -> str:
    if not isinstance(found, str) or not _DIGEST.fullmatch(found):
        raise ValueError(f"{found!r:.100} is no digest")
    return found

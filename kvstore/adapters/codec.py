"""Encoding of the registry of adapters.

    stamp (8 bytes, big-endian) | proof (SIGNATURE_BYTES) | JSON

The stamp is a time in milliseconds that rises with each change. The proof is a router's signature of the key's name,
the stamp and the JSON. If the cluster has no secret, the proof is their hash, which reveals damage but proves no
author. The stamp and the proof form the head. The value with the greater head wins, so all readers agree, whatever the
order in which they read.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

from baton.errors import Conflict, InvalidRequest
from baton.messages import Adapter
from baton.registered_adapters import (
    DIGEST,
    MAX_ADAPTERS,
    MAX_RANK,
    Adapters,
    RegisteredAdapter,
    check_name,
    check_path,
)
from baton.trust import KeyFile, Principal
from baton.trust.keys import SIGNATURE_BYTES
from kvstore.index.signed import packed
from kvstore.index.values import MAX_SEQ

_HEAD = struct.Struct(f">Q{SIGNATURE_BYTES}s")
HEAD_BYTES = _HEAD.size
MAX_BYTES = 6 * 2**20
"""Maximum size of the registry, in bytes. Routers read the whole registry after each change."""
MAX_TIME_S = 1e11


def with_changed(adapters: Adapters, name: str, adapter: RegisteredAdapter | None) -> dict[str, RegisteredAdapter]:
    """Return the registry with an adapter added or replaced, or removed if `adapter` is None.

    Raises:
        Conflict: the registry would have too many adapters.
    """
    changed = {each: one for each, one in adapters.items() if each != name}
    if adapter is not None:
        changed[name] = adapter
        if len(changed) > MAX_ADAPTERS:
            raise Conflict(f"{MAX_ADAPTERS} adapters are registered, the maximum; remove one first")
    return changed


def encode(key: str, stamp: int, adapters: Adapters, keys: KeyFile | None) -> bytes:
    """Return the value of the registry.

    Args:
        keys: the router's keys; None: the cluster has no secret.

    Raises:
        Conflict: the value would exceed `MAX_BYTES`.
    """
    body = json.dumps([_listed(each) for each in adapters.values()], separators=(",", ":")).encode()
    if HEAD_BYTES + len(body) > MAX_BYTES:
        raise Conflict(f"the registry of adapters would exceed {MAX_BYTES} bytes; remove one, or use shorter paths")
    message = packed(key, stamp, body)
    proof = _hash(message) if keys is None else keys.keys.sign("value", message)
    return _HEAD.pack(stamp, proof) + body


def authentic(key: str, value: bytes, keys: KeyFile | None) -> tuple[int, bytes]:
    """Return the stamp and the JSON of a value. Raise ValueError unless a router has written the value."""
    if len(value) < HEAD_BYTES:
        raise ValueError(f"it has {len(value)} bytes")
    stamp, proof = _HEAD.unpack_from(value)
    body = value[HEAD_BYTES:]
    message = packed(key, stamp, body)
    is_whole = _hash(message) == proof if keys is None else keys.verify("value", Principal.ROUTER, message, proof)
    if not is_whole or stamp > MAX_SEQ:
        raise ValueError("it is damaged" if keys is None else "it is not signed by a router of this cluster")
    return stamp, body


def _hash(message: bytes) -> bytes:
    return hashlib.blake2b(message).digest().ljust(SIGNATURE_BYTES, b"\0")


def decode(body: bytes) -> dict[str, RegisteredAdapter]:
    """Decode the registry, and skip fields that this release does not know. Raise ValueError if it is not valid."""
    try:
        found = json.loads(body)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(found, list) or len(found) > MAX_ADAPTERS:
        raise ValueError(f"it is no list of at most {MAX_ADAPTERS} adapters")
    return {adapter.name: adapter for adapter in map(_adapter, found)}


def _listed(registered: RegisteredAdapter) -> dict[str, Any]:
    adapter = registered.adapter
    return {
        "name": adapter.name,
        "path": adapter.path,
        "digest": adapter.digest,
        "rank": adapter.rank,
        "num_bytes": registered.num_bytes,
        "since_s": registered.since_s,
    }


def _adapter(found: Any) -> RegisteredAdapter:
    if not isinstance(found, dict):
        raise ValueError("an adapter is no object")
    name, path, digest, rank, num_bytes, since_s = (
        found.get(each) for each in ("name", "path", "digest", "rank", "num_bytes", "since_s")
    )
    if not isinstance(name, str) or not isinstance(path, str) or not isinstance(digest, str):
        raise ValueError("the name, path or digest of an adapter is no text")
    try:
        check_name(name, "")
        check_path(path)
    except InvalidRequest as error:
        raise ValueError(str(error)) from None
    if not DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r:.100} is no digest")
    if type(rank) is not int or not 0 < rank <= MAX_RANK or type(num_bytes) is not int or not 0 <= num_bytes <= MAX_SEQ:
        raise ValueError(f"the rank or size of {name!r} is out of range")
    if not isinstance(since_s, int | float) or not 0 <= since_s <= MAX_TIME_S:  # NaN fails this comparison
        raise ValueError(f"the time of {name!r} is no time")
    adapter = Adapter(name=name, path=path, digest=digest, rank=rank)
    return RegisteredAdapter(adapter=adapter, num_bytes=num_bytes, since_s=float(since_s))

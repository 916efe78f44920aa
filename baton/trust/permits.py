"""Permit with which one worker pulls a prefix from another's cache, signed by the router that places the request.

    until (8 bytes, ms since 1970) | tokens (4) | keys (32) | five texts, each with its length (2) | signature (72)

The texts are the puller's id, incarnation and address, as in its lease, and the source's id and incarnation. `keys` is
the SHA-256 of all block keys of the prefix, one for each 16 tokens. Since keys are chained, the last key alone names
the whole prefix to a process that has its tokens. But a source has no tokens and finds each block by its own key, so a
request could name another tenant's blocks before that last one. The digest of the whole list prevents this.

A permit may be used repeatedly until it expires: it brings the same blocks to the same process.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.blocks import KEY_BYTES
from baton.errors import TransferRefused
from baton.trust.keys import SIGNATURE_BYTES, Principal
from baton.trust.proofs import MAX_SKEW_S

if TYPE_CHECKING:
    from baton.messages import Ticket
    from baton.trust.key_file import KeyFile
    from baton.trust.keys import KeyRing

PERMIT_S = 120.0
"""Validity of a permit, in seconds: the longest wait of a request at a worker before its pull, with a margin."""
MAX_PERMIT_BYTES = 4096
_PURPOSE = "pull"
_HEAD = struct.Struct("<QI32s")
_LENGTH = struct.Struct("<H")
_NUM_TEXTS = 5


@dataclass(frozen=True, slots=True)
class Party:
    """One start of a worker's process, as in the worker's lease."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """Right of one worker to one prefix in the cache of another."""

    puller: Party
    address: str
    """host:port of the puller's KvControl service, the only allowed destination of the KV."""
    source: Party
    keys: bytes
    """`keys_digest` of the block keys that may be named."""
    num_tokens: int
    """Maximum number of tokens that may be requested."""
    until_s: float
    """Time at which it expires, in seconds since 1970."""

    def signed(self, keys: KeyRing) -> bytes:
        """Return the permit with the signature of the router that owns these keys."""
        packed = self._packed()
        return packed + keys.sign(_PURPOSE, packed)

    def _packed(self) -> bytes:
        puller, source = self.puller, self.source
        texts = (puller.worker_id, puller.incarnation, self.address, source.worker_id, source.incarnation)
        encoded = [text.encode() for text in texts]
        head = _HEAD.pack(round(self.until_s * 1e3), self.num_tokens, self.keys)
        return head + b"".join(_LENGTH.pack(len(text)) + text for text in encoded)


def keys_digest(block_keys: Sequence[bytes]) -> bytes:
    """Return the digest of block keys in a permit: the SHA-256 of all of them, 32 bytes.

    Raises:
        TransferRefused: a key has a wrong length, so that the list would be ambiguous.
    """
    if any(len(key) != KEY_BYTES for key in block_keys):
        raise TransferRefused(f"a block key has {KEY_BYTES} bytes, and not all of these have")
    return hashlib.sha256(b"".join(block_keys)).digest()


def open_permit(data: bytes, keys: KeyFile | KeyRing) -> Permit:
    """Return the decoded permit.

    Raises:
        TransferRefused: there is none, it has another form, or no router of this cluster signed it.
    """
    if not data:
        raise TransferRefused("KV is sent only with a router's permit, and this request has none")
    packed, signature = data[:-SIGNATURE_BYTES], data[-SIGNATURE_BYTES:]
    if len(data) > MAX_PERMIT_BYTES or not keys.verify(_PURPOSE, Principal.ROUTER, packed, signature):
        raise TransferRefused("the permit is not signed by a router of this cluster")
    try:
        return _read(packed)
    except (struct.error, ValueError) as error:
        raise TransferRefused("the permit has another form; is the router of another release?") from error


def check_permit(permit: Permit, source: Party, ticket: Ticket, block_keys: Sequence[bytes], now_s: float) -> None:
    """Check that a permit covers a request.

    Args:
        source: this process.
        ticket: the destination and the amount of the KV.
        block_keys: the requested blocks, one key for each 16 tokens.
        now_s: the wall clock; the router's may differ by `MAX_SKEW_S`.

    Raises:
        TransferRefused: it does not; the message names the difference.
    """
    puller = Party(ticket.decode_worker_id, ticket.incarnation)
    if now_s > permit.until_s + MAX_SKEW_S:
        raise TransferRefused(f"the permit ended {now_s - permit.until_s:.0f} s ago")
    if permit.source != source:
        raise TransferRefused(f"the permit is for KV of worker {permit.source.worker_id}, or of an earlier start of it")
    if (permit.puller, permit.address) != (puller, ticket.kv_address):
        raise TransferRefused(
            f"the permit is worker {permit.puller.worker_id}'s at {permit.address}, and the KV would go to worker "
            f"{puller.worker_id} at {ticket.kv_address}, or to another start of it"
        )
    if ticket.num_tokens > permit.num_tokens:
        raise TransferRefused(f"the permit is for {permit.num_tokens} tokens, and {ticket.num_tokens} are asked for")
    if keys_digest(block_keys) != permit.keys:
        raise TransferRefused("the permit is for other blocks than the request names")


def _read(packed: bytes) -> Permit:
    until_ms, num_tokens, keys = _HEAD.unpack_from(packed)
    at, texts = _HEAD.size, list[str]()
    for _ in range(_NUM_TEXTS):
        (length,) = _LENGTH.unpack_from(packed, at)
        at += _LENGTH.size + length
        texts.append(packed[at - length : at].decode())
    if at != len(packed):
        raise ValueError("it has another length")
    puller_id, puller_incarnation, address, source_id, source_incarnation = texts
    return Permit(
        puller=Party(puller_id, puller_incarnation),
        address=address,
        source=Party(source_id, source_incarnation),
        keys=keys,
        num_tokens=num_tokens,
        until_s=until_ms / 1e3,
    )

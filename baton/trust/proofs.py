"""Proof of identity in the metadata of a call from one member to another.

    time (8 bytes, ms since 1970) | nonce (16) | caller (1) | signature (72)

The signature covers all of that, the method, and the incarnation of the called process. So a proof is not valid for
another process or method, nor later, nor twice.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from baton.errors import NotAMember
from baton.trust.keys import SIGNATURE_BYTES, Principal

if TYPE_CHECKING:
    from baton.trust.key_file import KeyFile
    from baton.trust.keys import KeyRing

PROOF_KEY = "baton-proof-bin"
"""Name of the metadata entry that contains the proof."""
MAX_SKEW_S = 60.0
"""Longest time between the creation and the check of a proof, by the two processes' clocks."""
_HEAD = struct.Struct("<Q16sB")
_PRINCIPALS: tuple[Principal, ...] = tuple(Principal)
_PURPOSE = "call"


def prove(keys: KeyRing, method: str, callee: str) -> bytes:
    """Return a new proof that the caller is the owner of these keys.

    Args:
        method: the full name, as gRPC has it: `/package.Service/Method`.
        callee: the incarnation of the called process.
    """
    head = _HEAD.pack(time.time_ns() // 1_000_000, os.urandom(16), _PRINCIPALS.index(keys.principal))
    return head + keys.sign(_PURPOSE, _message(head, method, callee))


class ProofBook:
    """Verifier of proofs of calls to this process; it remembers those of the last two minutes, to reject replays.

    Args:
        callee: this process' incarnation: random, and new with each start, like the verifier's memory.
    """

    def __init__(self, key_file: KeyFile, callee: str) -> None:
        self._key_file = key_file
        self._callee = callee
        self._young: set[bytes] = set()
        """Nonces of the period that started at `_turned_s`, in monotonic seconds, independent of clock changes."""
        self._old: set[bytes] = set()
        """Nonces of the previous period."""
        self._turned_s = time.monotonic()

    def check(self, proof: bytes, method: str, allowed: Collection[Principal]) -> Principal:
        """Return the calling member.

        Raises:
            NotAMember: the proof is not a member's, is for another process, method or time, or was used before, or the
                member may not call this method.
        """
        if not allowed:
            raise NotAMember(f"no member may call {method}")
        if len(proof) != _HEAD.size + SIGNATURE_BYTES:
            raise NotAMember(f"{method} accepts calls only from {_names(allowed)}, and this call has no proof")
        made_ms, nonce, index = _HEAD.unpack_from(proof)
        head, signature = proof[: _HEAD.size], proof[_HEAD.size :]
        member: Principal | None = _PRINCIPALS[index] if index < len(_PRINCIPALS) else None
        if member not in allowed or member is None:
            raise NotAMember(f"{method} accepts calls only from {_names(allowed)}")
        if not self._key_file.verify(_PURPOSE, member, _message(head, method, self._callee), signature):
            raise NotAMember(
                f"the proof of this call of {method} is not of this cluster, or was made for another process; "
                "compare the files that cluster.secret names"
            )
        now = time.time()
        if abs(now - made_ms / 1e3) > MAX_SKEW_S:
            raise NotAMember(
                f"the proof of this call of {method} is {now - made_ms / 1e3:+.0f} s old; the clocks of a cluster's "
                f"machines may differ by {MAX_SKEW_S:g} s"
            )
        self._take(nonce)
        return member

    def _take(self, nonce: bytes) -> None:
        """Record a nonce. Raises NotAMember if it is already recorded."""
        now = time.monotonic()
        if now - self._turned_s > 2 * MAX_SKEW_S:  # the validity of a proof, counted from its own time
            self._old, self._young = self._young, set()
            self._turned_s = now
        if nonce in self._young or nonce in self._old:
            raise NotAMember("the proof of this call was used before")
        self._young.add(nonce)


def _message(head: bytes, method: str, callee: str) -> bytes:
    return b"\0".join((method.encode(), callee.encode(), head))


def _names(members: Collection[Principal]) -> str:
    return ", ".join(sorted(members))

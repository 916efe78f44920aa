from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from baton.blocks import block_keys
from baton.errors import TransferRefused
from baton.kv_layout import KvLayout
from baton.messages import Ticket
from baton.trust import (
    KeyRing,
    Party,
    Permit,
    Principal,
    check_permit,
    draw_secret,
    keys_digest,
    load_keys,
    open_permit,
)

SECRET = draw_secret()
NOW_S = 1_800_000_000.0
KEYS = block_keys(b"seed", range(99))
SOURCE = Party("prefill-1", "0011")
PERMIT = Permit(
    puller=Party("decode-0", "aa"),
    address="10.0.0.7:7001",
    source=SOURCE,
    keys=keys_digest(KEYS),
    num_tokens=96,
    until_s=NOW_S + 60,
)
TICKET = Ticket(
    transfer_id="t",
    generation=3,
    decode_worker_id="decode-0",
    incarnation="aa",
    kv_address="10.0.0.7:7001",
    num_tokens=96,
    skip_tokens=0,
    wire_compat="wire",
    layout=KvLayout(16, 1, ()),
)


def ring(member: Principal, secret: str = SECRET) -> KeyRing:
    return load_keys(secret, member, "a test")


def check(permit: Permit = PERMIT, source: Party = SOURCE, keys: Sequence[bytes] = KEYS, **changes: Any) -> None:
    check_permit(permit, source, dataclasses.replace(TICKET, **changes), keys, NOW_S)


def test_a_permit_says_at_the_source_what_the_router_signed() -> None:
    signed = PERMIT.signed(ring(Principal.ROUTER))
    assert open_permit(signed, ring(Principal.WORKER)) == PERMIT
    assert len(signed) < 250
    check()
    check(num_tokens=16)
    check_permit(PERMIT, SOURCE, TICKET, KEYS, PERMIT.until_s + 59)  # clocks differ


def test_only_a_router_of_the_cluster_signs_permits() -> None:
    worker = ring(Principal.WORKER)
    signed = PERMIT.signed(ring(Principal.ROUTER))
    packed = signed[:-72]
    others = [PERMIT.signed(ring(member)) for member in Principal if member is not Principal.ROUTER]
    others += [PERMIT.signed(ring(Principal.ROUTER, draw_secret()))]
    others += [packed + ring(Principal.ROUTER).sign("call", packed)]
    others += [signed + b"\0", signed[:-1], signed[72:], signed * 40, b"x"]
    others += [signed[:at] + bytes([signed[at] ^ 1]) + signed[at + 1 :] for at in range(len(signed))]
    for bad in others:
        with pytest.raises(TransferRefused, match="not signed by a router of this cluster"):
            open_permit(bad, worker)
    with pytest.raises(TransferRefused, match="this request has none"):
        open_permit(b"", worker)


def test_what_a_router_of_another_release_signs_is_refused_in_words() -> None:
    router, rng = ring(Principal.ROUTER), random.Random(3)
    packed = PERMIT.signed(router)[:-72]
    for other in (b"", packed[:-1], packed[:44], *(rng.randbytes(length) for length in (1, 43, 44, 46, 80, 200))):
        with pytest.raises(TransferRefused, match="another form"):
            open_permit(other + router.sign("pull", other), ring(Principal.WORKER))


@pytest.mark.parametrize(
    ("match", "asked"),
    [
        ("ended 61 s ago", {"permit": dataclasses.replace(PERMIT, until_s=NOW_S - 61)}),
        ("for KV of worker prefill-1", {"source": Party("prefill-2", "0011")}),
        ("an earlier start of it", {"source": Party("prefill-1", "0012")}),
        (
            "worker decode-0's at 10.0.0.7:7001, and the KV would go to worker decode-1",
            {"decode_worker_id": "decode-1"},
        ),
        ("another start of it", {"incarnation": "ab"}),
        ("at 10.0.0.8:7001", {"kv_address": "10.0.0.8:7001"}),
        ("at 10.0.0.7:7002", {"kv_address": "10.0.0.7:7002"}),
        ("96 tokens, and 97 are asked for", {"num_tokens": 97}),
        ("other blocks", {"keys": []}),
        ("other blocks", {"keys": KEYS[:-1]}),
        ("other blocks", {"keys": [*KEYS, KEYS[-1]]}),
        ("other blocks", {"keys": [bytes(16), *KEYS[1:]]}),
        ("other blocks", {"keys": [KEYS[1], KEYS[0], *KEYS[2:]]}),
        ("16 bytes", {"keys": [KEYS[0] + KEYS[1], *KEYS[2:]]}),
    ],
)
def test_a_permit_is_for_one_puller_source_and_prefix_for_a_while(match: str, asked: dict[str, Any]) -> None:
    with pytest.raises(TransferRefused, match=match):
        check(**asked)

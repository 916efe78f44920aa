"""What each kind of transport takes of its peer's rendezvous, whatever the bytes are: no value raises anything."""

from __future__ import annotations

import random
import struct

import pytest

from baton.addresses import addresses_of
from kvstore.transfer.transport.base import RECEIVER, SENDER, FarSide
from kvstore.transfer.transport.select import KINDS

PEER = "10.1.2.3"
TOKEN = b"0123456789abcdef" * 2
NAME = b"\0baton-kv-" + TOKEN
NCCL_ID = struct.pack("@QHH4s", 99, 2, 7, bytes([10, 1, 2, 3])).ljust(128, b"\0")
GOOD: dict[str, list[tuple[int, str, bytes]]] = {
    "tcp": [
        (SENDER, "tcp", TOKEN + b" 10.1.2.3 7"),
        (SENDER, "tcp", TOKEN + b" ::ffff:10.1.2.3 65535"),
        (RECEIVER, "tcp/joined", b""),
    ],
    "shm": [(SENDER, "shm", NAME), (RECEIVER, "shm/joined", b"")],
    "ipc": [(SENDER, "ipc", NAME), (RECEIVER, "ipc/joined", b"")],
    "nccl": [
        (SENDER, "signals/tcp", TOKEN + b" 10.1.2.3 7"),
        (SENDER, "0", NCCL_ID),
        (RECEIVER, "nccl/device/1", TOKEN),
        (RECEIVER, "nccl/word/1/7", b"back"),
    ],
}


def is_taken(kind: str, rank: int, key: str, value: bytes) -> bool:
    return KINDS[kind].is_well_formed(FarSide(rank, addresses_of(PEER)), key, value)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_peer_says_is_taken_from_its_rank_and_its_host_alone(kind: str) -> None:
    for rank, key, value in GOOD[kind]:
        assert is_taken(kind, rank, key, value)
        assert not is_taken(kind, 1 - rank, key, value)
        assert not KINDS[kind].is_well_formed(FarSide(rank, frozenset()), key, value) or PEER.encode() not in value


@pytest.mark.parametrize(
    "address",
    [
        *(b"10.1.2.4 7", b"10.1.2.3 0", b"10.1.2.3 65536", b"10.1.2.3 07", b"10.1.2.3 -7", b"10.1.2.3 7 ", b"10.1.2.3"),
        *(b" 7", b"localhost 7", b"10.1.2.3.nip.io 7", b"0x0a010203 7", b"10.66051 7", b"010.1.2.3 7", b"[10.1.2.3] 7"),
        *(
            b"unix:/run/x 7",
            b"10.1.2.3\n 7",
            b"10.1.2.3 7\n",
            b"::1 7",
            b"0.0.0.0 7",
            b":: 7",
            b"\xff 7",
            b"10.1.2.3:1 7",
        ),
    ],
)
def test_a_tcp_address_is_an_ip_address_of_the_peer_and_a_port(address: bytes) -> None:
    assert not is_taken("tcp", SENDER, "tcp", TOKEN + b" " + address)


@pytest.mark.parametrize("token", [b"", TOKEN[:-2], TOKEN + b"00", TOKEN[:-1] + b"g", TOKEN.upper(), TOKEN[:-1] + b" "])
def test_a_token_has_16_bytes(token: bytes) -> None:
    assert not is_taken("tcp", SENDER, "tcp", token + b" 10.1.2.3 7")


@pytest.mark.parametrize("kind", KINDS)
def test_garbage_is_refused_and_raises_nothing(kind: str) -> None:
    """4,000 values for each: bytes at random, and what is right with some of them changed, cut or doubled."""
    rng, taken = random.Random(11), 0
    for _ in range(1000):
        rank, key, value = rng.choice(GOOD[kind])
        changed = bytearray(value)
        for _ in range(rng.randint(1, 4)):
            if changed and rng.random() < 0.8:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        how = rng.randrange(4)
        bad = (
            bytes(changed),
            value[: rng.randrange(len(value) + 1)],
            value * 2 + b"\0",
            rng.randbytes(rng.randrange(200)),
        )
        taken += is_taken(kind, rank, key, bad[how]) and bad[how] != value
        is_taken(kind, rng.choice((SENDER, RECEIVER)), rng.choice(("", "0", "0/0", key, key * 99, "nccl/")), bad[how])
    assert taken < 1000, "but for another port, or NCCL's own numbers"

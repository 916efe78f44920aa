from __future__ import annotations

import time
from pathlib import Path

import pytest

from baton.errors import NotAMember
from baton.trust import KeyFile, Principal, ProofBook, draw_secret, prove, write_private

METHOD, CALLEE = "/baton.v1.WorkerCalls/Serve", "a1b2"
ROUTERS = frozenset({Principal.ROUTER})


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    write_private(path, draw_secret())
    return path


@pytest.fixture
def book(secret: Path) -> ProofBook:
    return ProofBook(KeyFile(secret, Principal.WORKER), CALLEE)


def made(secret: Path, member: Principal = Principal.ROUTER, method: str = METHOD, callee: str = CALLEE) -> bytes:
    return prove(KeyFile(secret, member).keys, method, callee)


def test_a_members_proof_is_taken_once(secret: Path, book: ProofBook) -> None:
    proof = made(secret)
    assert book.check(proof, METHOD, ROUTERS) is Principal.ROUTER
    with pytest.raises(NotAMember, match="used before"):
        book.check(proof, METHOD, ROUTERS)
    assert book.check(made(secret), METHOD, ROUTERS) is Principal.ROUTER


def test_a_proof_is_for_one_member_process_and_method(secret: Path, book: ProofBook, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_private(other, draw_secret())
    for proof, said in (
        (made(secret, Principal.WORKER), "accepts calls only from router"),
        (made(secret, method="/baton.v1.WorkerControl/Drain"), "for another process"),
        (made(secret, callee="c3d4"), "for another process"),
        (made(other), "not of this cluster"),
        (b"", "has no proof"),
        (made(secret)[:-1], "has no proof"),
        (made(secret) + b"\0", "has no proof"),
    ):
        with pytest.raises(NotAMember, match=said):
            book.check(proof, METHOD, ROUTERS)


def test_no_bit_of_a_proof_can_be_changed(secret: Path, book: ProofBook) -> None:
    proof = made(secret)
    for bit in range(len(proof) * 8):
        forged = bytearray(proof)
        forged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(NotAMember):
            book.check(bytes(forged), METHOD, frozenset(Principal))
    book.check(proof, METHOD, ROUTERS)


@pytest.mark.parametrize("late_s", [-61, -59, 59, 61])
def test_a_proof_is_good_for_a_minute(
    late_s: float, secret: Path, book: ProofBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof, now = made(secret), time.time()
    monkeypatch.setattr(time, "time", lambda: now + late_s)
    if abs(late_s) < 60:
        book.check(proof, METHOD, ROUTERS)
    else:
        with pytest.raises(NotAMember, match="clocks"):
            book.check(proof, METHOD, ROUTERS)


def test_a_nonce_is_remembered_until_its_proof_is_too_old(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e9
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time_ns", lambda: int((now + 59) * 1e9))  # from a clock that is early
    book = ProofBook(KeyFile(secret, Principal.WORKER), CALLEE)
    taken = []
    for _ in range(40):
        proof = made(secret)
        taken.append((now, proof))
        book.check(proof, METHOD, ROUTERS)
        now += 5
        for made_s, old in taken:
            with pytest.raises(NotAMember, match="used before" if now - made_s <= 119 else "clocks"):
                book.check(old, METHOD, ROUTERS)
    assert len(book._young) + len(book._old) <= 50, "what is too old is forgotten"


def test_a_clock_that_is_set_and_set_back_makes_no_proof_good_again(
    secret: Path, book: ProofBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: what was taken was forgotten with each jump of the clock, and two of them were enough."""
    first, now = made(secret), time.time()
    book.check(first, METHOD, ROUTERS)
    for ahead_s in (3600.0, -3600.0, 7200.0, 0.0):
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: now + ahead_s)
        monkeypatch.setattr(time, "time_ns", lambda ahead_s=ahead_s: int((now + ahead_s) * 1e9))
        book.check(made(secret), METHOD, ROUTERS)
    with pytest.raises(NotAMember, match="used before"):
        book.check(first, METHOD, ROUTERS)

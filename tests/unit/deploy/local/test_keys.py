"""Each process has its own member's keys, and they follow the cluster's secret while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.trust import KeyFile, Principal, ProofBook, draw_secret, key_file, load_keys, prove, write_private
from deploy.local import keys
from deploy.local.keys import FollowedSecret, member_files, write_keys
from tests.support.waiting import until

METHOD = "/baton.v1.WorkerCalls/Serve"


def opened(files: Mapping[Principal, Path]) -> dict[Principal, KeyFile]:
    return {member: KeyFile(path, member) for member, path in files.items()}


def test_a_drawn_secret_is_in_no_file(tmp_path: Path) -> None:
    (other_folder := tmp_path / "other").mkdir()
    drawn = member_files("", tmp_path)
    files = drawn.files
    rings = {member: each.keys for member, each in opened(files).items()}
    assert files.keys() == set(Principal)
    assert len({ring.fingerprint for ring in rings.values()}) == 1
    files[Principal.ROUTER].unlink()  # as what cleans temporary folders does
    drawn.look()
    assert opened(files)[Principal.ROUTER].keys.fingerprint == rings[Principal.ROUTER].fingerprint
    for member, path in files.items():
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text().count("private") == 1, "its own"
        for other in set(Principal) - {member}:
            with pytest.raises(ConfigError, match=r"neither a secret nor"):
                KeyFile(path, other)
    assert len({draw.files[Principal.ROUTER].read_text() for draw in (drawn, member_files("", other_folder))}) == 2


async def test_a_secret_changes_while_calls_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two steps, in either order of the two lines, and even in one: each caller and callee reads its file when it
    gets to it.
    """
    monkeypatch.setattr(keys, "FOLLOW_S", 0.05)
    monkeypatch.setattr(key_file, "CHECK_S", 0.1)
    monkeypatch.setattr(key_file, "KEPT_S", 1.0)
    secret = tmp_path / "secret"
    first, second, third, fourth = (draw_secret() for _ in range(4))
    write_private(secret, first)
    followed = member_files(str(secret), tmp_path)
    files = followed.files
    held = opened(files)
    books = [ProofBook(KeyFile(files[Principal.WORKER], Principal.WORKER), f"w{number}") for number in range(3)]
    num_calls = 0

    async def call() -> None:
        nonlocal num_calls
        while True:
            for number, book in enumerate(books):
                proof = prove(held[Principal.ROUTER].keys, METHOD, f"w{number}")
                assert book.check(proof, METHOD, {Principal.ROUTER}) is Principal.ROUTER
                num_calls += 1
                await asyncio.sleep(0.001)

    keeping, calling = (asyncio.create_task(work) for work in (followed.keep(), call()))
    newest = first
    for text in (f"{second}\n{first}", second, f"{second}\n{third}", third, fourth):
        write_private(secret, text)
        newest, since = text.split()[0], num_calls
        fingerprint = load_keys(newest, Principal.ROUTER, "").fingerprint
        await until(lambda: held[Principal.ROUTER].keys.fingerprint == fingerprint, 20.0)  # noqa: B023 - at once
        await until(lambda: calling.done() or num_calls >= since + 100, 20.0)  # noqa: B023
        assert not calling.done(), calling.exception()
    await until(lambda: len(held[Principal.ROUTER].keys.fingerprints) == 1, 20.0)
    for task in (keeping, calling):
        task.cancel()
    await asyncio.wait([keeping, calling])
    assert calling.cancelled(), calling.exception()
    for book in books:
        with pytest.raises(Exception, match="not of this cluster"):
            book.check(prove(load_keys(first, Principal.ROUTER, ""), METHOD, "w0"), METHOD, {Principal.ROUTER})


def test_a_secret_that_is_none_changes_nothing_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret, out = tmp_path / "secret", tmp_path / "router.keys"
    write_private(secret, draw_secret())
    followed = FollowedSecret(secret, {Principal.ROUTER: out})
    followed.write()
    written, inode = out.read_text(), out.stat().st_ino
    followed.look()
    assert out.stat().st_ino == inode, "what has not changed is not written again"
    write_private(secret, "short")
    followed.look()
    followed.look()
    assert out.read_text() == written
    assert [record.message for record in caplog.records] == [
        f"line 1 of {secret} is no secret: it has fewer than 32 characters; the last good keys stay"
    ]
    with pytest.raises(ConfigError, match=r"cannot read the keys in .*none"):
        write_keys(tmp_path / "none", out, Principal.ROUTER)

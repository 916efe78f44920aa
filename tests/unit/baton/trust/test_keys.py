from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.trust import KeyFile, Principal, draw_secret, load_keys, member_file, open_keys, write_private
from baton.trust import key_file as key_files

ONE, OTHER = "5eC2e7" * 8, "0743r5" * 8


@pytest.mark.parametrize(("signer", "claimed"), list(itertools.product(Principal, Principal)))
def test_a_signature_is_its_members_and_its_purposes(signer: Principal, claimed: Principal) -> None:
    signature = load_keys(ONE, signer, "").sign("lease", b"text")
    keys = load_keys(ONE, Principal.ROUTER, "")
    assert keys.verify("lease", claimed, b"text", signature) == (signer is claimed)
    assert not keys.verify("permit", claimed, b"text", signature)
    assert not keys.verify("lease", claimed, b"texT", signature)


def test_another_clusters_signature_counts_for_nothing() -> None:
    signature = load_keys(OTHER, Principal.WORKER, "").sign("lease", b"text")
    keys = load_keys(ONE, Principal.ROUTER, "")
    assert not keys.verify("lease", Principal.WORKER, b"text", signature)
    own = load_keys(ONE, Principal.WORKER, "").sign("lease", b"text")
    assert keys.verify("lease", Principal.WORKER, b"text", own)
    for forged in (b"", own[:8], own[:-1], own + b"\0", own[:8] + signature[8:], signature[:8] + own[8:]):
        assert not keys.verify("lease", Principal.WORKER, b"text", forged)


def test_a_drawn_secret_is_a_new_one() -> None:
    drawn = {draw_secret() for _ in range(10)}
    assert len(drawn) == 10
    assert len({load_keys(secret, Principal.WORKER, "").fingerprint for secret in drawn}) == 10


def test_the_first_secret_signs_and_all_count() -> None:
    old, both, new = (load_keys(text, Principal.WORKER, "") for text in (ONE, f"{OTHER}\n{ONE}\n", OTHER))
    assert both.verify("x", Principal.WORKER, b"m", old.sign("x", b"m"))
    assert both.verify("x", Principal.WORKER, b"m", new.sign("x", b"m"))
    assert new.verify("x", Principal.WORKER, b"m", both.sign("x", b"m"))
    assert not old.verify("x", Principal.WORKER, b"m", both.sign("x", b"m"))
    assert both.fingerprint == new.fingerprint != old.fingerprint


@pytest.mark.parametrize("member", list(Principal))
def test_a_members_file_has_the_same_keys_and_no_secret(member: Principal) -> None:
    text = f"# ours\n{OTHER}  # new\n\n{ONE}\n"
    written = member_file(text, member, "")
    assert ONE not in written
    assert OTHER not in written
    from_file, from_secret = load_keys(written, member, ""), load_keys(text, member, "")
    assert from_file.sign("x", b"m") == from_secret.sign("x", b"m")
    assert from_file.public.keys() == from_secret.public.keys()
    assert all(list(from_file.public[each]) == list(from_secret.public[each]) for each in Principal)
    for other in set(Principal) - {member}:
        with pytest.raises(ConfigError, match=f"neither the {other}'s private key"):
            load_keys(written, other, "FILE")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "FILE has neither a secret nor the keys of the worker"),
        ("# nothing\n\n", "FILE has neither"),
        ("S" * 31, "line 1 of FILE .* fewer than 32 characters"),
        (f"{ONE}\nprivate worker S3=\n", "line 2 of FILE .* another form"),
        (f"{ONE}\npublic worker {'QQ==' * 8}\n", "line 2 of FILE"),
        (f"{ONE}\npublic nobody QQ==\n", "line 2 of FILE .* another form"),
        (f"{ONE}\none two\n", "line 2 of FILE .* another form"),
        (f"{ONE}\nprivate router {'A' * 43}=\n", "line 2 of FILE .* neither the worker's private key"),
        ("\n".join(f"{number:040}" for number in range(17)), "more than 16 secrets"),
        ("private worker " + "A" * 43 + "=", "neither a secret nor the keys"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence_without_its_keys(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_keys(text, Principal.WORKER, "FILE")
    assert not any(word in str(caught.value) for word in text.split() if len(word) > 8)


def test_keys_are_derived_from_secrets_alone() -> None:
    with pytest.raises(ConfigError, match="line 2 of FILE is no secret"):
        member_file(member_file(ONE, Principal.ROUTER, ""), Principal.WORKER, "FILE")
    with pytest.raises(ConfigError, match="FILE has no secret"):
        member_file("# none", Principal.WORKER, "FILE")
    with pytest.raises(ConfigError, match="line 1 of FILE is no secret: it has fewer than 32"):
        member_file("short", Principal.WORKER, "FILE")


def test_a_file_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_files, "CHECK_S", 0)
    path = tmp_path / "keys"
    write_private(path, ONE)
    assert path.stat().st_mode & 0o777 == 0o600
    file = KeyFile(path, Principal.WORKER)
    assert file.keys.fingerprint == load_keys(ONE, Principal.WORKER, "").fingerprint
    write_private(path, f"{OTHER}\n{ONE}")
    changed = file.keys
    assert changed.fingerprint == load_keys(OTHER, Principal.WORKER, "").fingerprint
    assert file.keys is changed, "an unchanged file is not read"
    spoils: list[Callable[[], None]] = [lambda: write_private(path, "short"), lambda: path.chmod(0o644), path.unlink]
    for spoil in spoils:
        caplog.clear()
        spoil()
        assert file.keys is changed
        assert file.keys is changed
    assert len(caplog.records) == 1, "it complains once"
    write_private(path, ONE)
    assert file.keys.fingerprint == load_keys(ONE, Principal.WORKER, "").fingerprint


def test_keys_count_for_a_while_when_they_are_no_longer_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes read theirs a little later, and sign by the old ones until then."""
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    path = tmp_path / "keys"
    write_private(path, ONE)
    file = KeyFile(path, Principal.WORKER)
    old, new = (load_keys(text, Principal.ROUTER, "") for text in (ONE, OTHER))
    write_private(path, OTHER)
    now_s = 0.5
    assert file.keys.fingerprint == old.fingerprint, "it is not looked at all the time"
    assert not file.keys.verify("x", Principal.ROUTER, b"m", new.sign("x", b"m"))
    assert file.verify("x", Principal.ROUTER, b"m", new.sign("x", b"m")), "but when somebody signs by other keys"
    assert list(file.keys.fingerprints) == [new.fingerprint, old.fingerprint]
    assert new.verify("x", Principal.WORKER, b"m", file.keys.sign("x", b"m"))
    now_s += key_files.KEPT_S - 0.1
    assert file.verify("x", Principal.ROUTER, b"m", old.sign("x", b"m"))
    now_s += 0.2
    assert not file.verify("x", Principal.ROUTER, b"m", old.sign("x", b"m")), "it was withdrawn"
    assert list(file.keys.fingerprints) == [new.fingerprint]


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(ONE)
    for mode, is_private in (
        (0o600, True),
        (0o400, True),
        (0o440, True),
        (0o604, False),
        (0o660, False),
        (0o606, False),
    ):
        path.chmod(mode)
        if is_private:
            KeyFile(path, Principal.ROUTER)
        else:
            with pytest.raises(ConfigError, match="chmod 600"):
                KeyFile(path, Principal.ROUTER)


def test_without_a_secret_there_are_no_keys(tmp_path: Path) -> None:
    write_private(tmp_path / "keys", ONE)
    assert open_keys("", Principal.ROUTER) is None
    opened = open_keys(str(tmp_path / "keys"), Principal.ROUTER)
    assert opened is not None
    assert opened.keys.principal is Principal.ROUTER


def test_what_is_no_file_of_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    with pytest.raises(ConfigError, match=r"cannot read the keys in .*keys: No such file"):
        KeyFile(path, Principal.ROUTER)
    for data, said in ((b"\xff" * 40, "not ASCII"), (b"S" * (2**16 + 1), "more than 65536 bytes")):
        path.write_bytes(data)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=said):
            KeyFile(path, Principal.ROUTER)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write the keys to .*: No such file"):
        write_private(tmp_path / "none" / "keys", ONE)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write_private(tmp_path / "folder", ONE)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]

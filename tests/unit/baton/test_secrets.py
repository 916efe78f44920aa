"""What of the settings is secret, and that it is shown and handed on to nobody who does not need it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from baton.cluster import Role
from baton.config import (
    REDIS_URL,
    Config,
    IndexConfig,
    RouterConfig,
    child_environment,
    load,
    password_of,
    process_config,
    with_password,
    without_password,
)
from baton.config.section import SECRET
from baton.errors import ConfigError
from kvstore.index import RedisConnection
from router.admission.tenants import TenantBook

PLANTED = "planted-5f1d"
SECRETS = {
    f"{section.name}.{name}"
    for section in dataclasses.fields(Config)
    for name, field in getattr(Config(), section.name).__pydantic_fields__.items()
    if SECRET in field.metadata
}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://:secret@h:1/0", "redis://:***@h:1/0"),
        ("rediss://me:secret@h:1/0", "rediss://me:***@h:1/0"),
        ("unix:///a/b", "unix:///a/b"),
        ("unix://me:secret@/a/b?db=1", "unix://me:***@/a/b?db=1"),
        ("redis://h:1/0?password=secret&db=2", "redis://h:1/0?password=***&db=2"),
        ("rediss://h:1/0?ssl_password=secret", "rediss://h:1/0?ssl_password=***"),
        ("redis://:se/cret@h:1/0", "redis://***"),
        ("redis://:12#secret@h:1/0", "redis://***"),
        ("redis://:12?secret@h:1/0", "redis://***"),
        ("redis://[:secret@h", "redis://***"),
        ("", ""),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize("password", ["plain", "a/b#c?d@e:f %", "ключ"])
@pytest.mark.parametrize("url", ["redis://h:1/0", "rediss://me@h:1/0", "unix:///a/b?db=1", "unix://me@/a/b"])
def test_a_password_is_taken_out_and_put_in(url: str, password: str) -> None:
    whole = with_password(url, password)
    assert password_of(whole) == password
    assert with_password(whole, "") == url
    connection = RedisConnection(whole)
    assert connection._redis.connection_pool.connection_kwargs["password"] == password


def test_a_url_that_is_none_is_refused_without_a_word_of_it() -> None:
    with pytest.raises(ConfigError, match="is not a Redis URL") as caught:
        RedisConnection(f"redis://:{PLANTED}/x@h:1/0")
    assert PLANTED not in f"{caught.value!r}{caught.value.__cause__!r}"


# -- which settings are secret -----------------------------------------------------------------------------------------


def test_these_settings_are_secret() -> None:
    assert {"index.redis_url", "router.cache_secret"} == SECRETS


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_a_secret_is_in_no_error_and_no_repr(name: str, tmp_path: Path) -> None:
    section, key = name.split(".")
    path = tmp_path / "baton.yaml"
    for text in (f"{section}: {{{key}: [{PLANTED}]}}", f"{section}:\n  {key}: [{PLANTED}\n  x: y"):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load(path, {})
        assert PLANTED not in str(caught.value)
    assert PLANTED not in repr(load(None, {f"BATON_{section}_{key}".upper(): PLANTED}))


def test_a_tenants_file_that_cannot_be_read_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(f"acme:\n  key_sha256: [{PLANTED}\n")
    with pytest.raises(ConfigError, match=r"expected ',' or ']'.*in line 3, column 1") as caught:
        TenantBook.load(path)
    assert PLANTED not in str(caught.value)


# -- who gets them -----------------------------------------------------------------------------------------------------


def planted() -> Config:
    index = IndexConfig(redis_url=f"redis://:{PLANTED}-redis@h:1/0", lease_s=7.0)
    return Config(router=RouterConfig(cache_secret=f"{PLANTED}-scopes", mode="disaggregated"), index=index)


def test_workers_and_the_controller_get_what_they_need_alone() -> None:
    assert PLANTED not in planted().for_pool(Role.DECODE).to_json()
    assert planted().for_pool(Role.DECODE).index.lease_s == 7.0
    controllers = planted().for_controller().to_json()
    assert f"{PLANTED}-scopes" not in controllers
    assert Config.from_json(controllers).index == planted().index
    assert Config.from_json(controllers).router.mode == "disaggregated"


def test_a_worker_has_redis_password_from_its_nodes_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CONFIG_JSON", planted().for_pool(Role.DECODE).to_json())
    for own in (None, "redis://:other@elsewhere:1/0"):
        if own:
            monkeypatch.setenv(REDIS_URL, own)
        with pytest.raises(
            ConfigError, match=r"password of Redis at redis://:\*\*\*@h:1/0 is not known on this Ray node"
        ):
            _ = process_config().index.url
    monkeypatch.setenv(REDIS_URL, planted().index.redis_url)
    assert process_config().index.url == planted().index.redis_url


def test_a_worker_has_redis_password_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "password"
    index = IndexConfig(redis_url="redis://me@h:1/0", redis_password_file=str(path))
    monkeypatch.setenv("BATON_CONFIG_JSON", Config(index=index).for_pool(Role.DECODE).to_json())
    with pytest.raises(ConfigError, match=f"cannot read the password file {path}: No such file"):
        _ = process_config().index.url
    path.write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        _ = process_config().index.url
    path.write_text(f"{PLANTED}/#\n")
    assert process_config().index.url == f"redis://me:{PLANTED}%2F%23@h:1/0"


def test_a_child_gets_no_settings_but_those_that_it_is_given() -> None:
    environ: dict[str, Any] = {
        "PATH": "/bin",
        "BATON_ROUTER_CACHE_SECRET": PLANTED,
        "BATON_API_KEY": PLANTED,
        REDIS_URL: PLANTED,
        "HF_TOKEN": PLANTED,
    }
    assert child_environment(environ) == {"PATH": "/bin"}
    assert child_environment(environ, REDIS_URL) == {"PATH": "/bin", REDIS_URL: PLANTED}

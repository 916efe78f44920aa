"""Where settings come from: the precedence of `load`, and no secret in what is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.config import DEFAULT, HIDDEN, SettingOrigin, load, origins
from baton.errors import ConfigError


def found(path: Path | None = None, **environ: str) -> dict[str, SettingOrigin]:
    return {each.name: each for each in origins(path, environ)}


def test_without_file_and_environment_everything_is_a_default() -> None:
    settings = found()
    assert len(settings) > 100
    assert {each.origin for each in settings.values()} == {DEFAULT}
    assert settings["cluster.grpc_port"].value == load(None, {}).cluster.grpc_port
    json.dumps([each.value for each in settings.values()])


def test_the_environment_goes_before_the_file_and_each_is_named(tmp_path: Path) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("cluster: {grpc_port: 1111, http_port: 2222}\nmodel:\n")
    settings = found(path, BATON_GRPC_PORT="3333", BATON_ADDRESS="no setting", HOME="/")
    assert settings["cluster.grpc_port"] == SettingOrigin("cluster.grpc_port", 3333, "BATON_GRPC_PORT")
    assert settings["cluster.http_port"] == SettingOrigin("cluster.http_port", 2222, str(path))
    assert settings["cluster.host"].origin == DEFAULT


def test_secrets_are_hidden_and_what_is_not_set_is_seen_to_be_empty() -> None:
    given = {
        "BATON_INDEX_REDIS_URL": "redis://user:password@host:1/0",
        "BATON_ROUTER_CACHE_SECRET": "word",
        "BATON_TELEMETRY_OTLP_ENDPOINT": "http://user:password@host:4317",
    }
    settings = found(None, **given)
    assert settings["index.redis_url"].value == f"redis://user:{HIDDEN}@host:1/0"
    assert settings["router.cache_secret"].value == HIDDEN
    assert settings["telemetry.otlp_endpoint"].value == f"http://user:{HIDDEN}@host:4317"
    assert "word" not in json.dumps([each.value for each in settings.values()])
    assert (found()["router.cache_secret"].value, found()["index.redis_url"].value) == ("", "")
    like_a_url = found(None, BATON_ROUTER_CACHE_SECRET="s3cret://host")["router.cache_secret"]
    assert like_a_url.value == HIDDEN


def test_a_mapping_is_shown_as_the_file_would_have_it() -> None:
    settings = found(None, BATON_ROUTER_SLO_CLASSES='{"default": {}, "fast": {"ttft_ms": 5}}')
    assert settings["router.slo_classes"].value["fast"]["ttft_ms"] == 5


def test_what_load_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(ConfigError, match="BATON_NO_SUCH is not a setting"):
        found(None, BATON_NO_SUCH="1")
    with pytest.raises(ConfigError, match=r"cluster\.grpc_port"):
        found(None, BATON_GRPC_PORT="x")

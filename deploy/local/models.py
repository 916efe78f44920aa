"""The models that one `baton up` serves: a configuration for each of them.

The first one is the configuration of the cluster. Every further model has the same settings, except those in its own
file, and it has its own name, Ray namespace and state file. Pure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from baton.blocks import content_id
from baton.cluster import Role
from baton.config import Config, ModelConfig
from baton.errors import ConfigError

SECTIONS = ("model", "engine", "pools", "transfer", "autoscale", "testing")
"""Sections that may differ between the models of a cluster."""
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "cluster": ("prefill", "decode", "gpus_per_worker", "name", "state_file", "controller_port"),
    "router": ("mode",),
}
"""Settings of other sections that may differ between the models."""
OF_ONE_MODEL = ("id", "served_name", "path", "revision", "chat_template")
"""Settings of `model` that apply to one model only; the others apply to every model."""


def another_model(base: Config, values: Mapping[str, Any], source: str) -> Config:
    """Return the configuration of a further model: that of the cluster, with the values of the model's file.

    Args:
        base: configuration of the cluster, and of its first model.
        values: sections of the file.
        source: name of the file in errors.

    Raises:
        ConfigError: a setting is unknown, applies to all models, or has an invalid value.
    """
    for name, section in values.items():
        _require_own(name, section, source)
    config = _without_own_names(base, is_same_model=_is_same_model(base.model, values.get("model", {})))
    try:
        changed = {
            name: dataclasses.replace(getattr(config, name), **section) for name, section in values.items() if section
        }
        return dataclasses.replace(config, **changed)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _require_own(name: str, section: Any, source: str) -> None:
    """Raise ConfigError unless these settings may differ between the models."""
    if not isinstance(section, dict):
        raise ConfigError(f"{source}: {name} must be a section of settings")
    if name in SECTIONS:
        return
    for setting in section:
        if setting not in SETTINGS.get(name, ()):
            known = ", ".join([*(each for each in SECTIONS if each != "testing"), *_names(SETTINGS)])
            raise ConfigError(
                f"{source} has the settings of a further model, but {name}.{setting} applies to all models: set it in "
                f"the first file; a further model may have its own {known}"
            )


def _names(settings: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{section}.{name}" for section, names in settings.items() for name in names]


def _is_same_model(base: ModelConfig, values: Mapping[str, Any]) -> bool:
    """Return whether a further model is the first one again, for example in another weight format."""
    return all(values.get(name, getattr(base, name)) == getattr(base, name) for name in ("id", "path"))


def _without_own_names(base: Config, *, is_same_model: bool) -> Config:
    """Return the configuration of the cluster without the settings that apply to its first model only."""
    model = dataclasses.replace(base.model, release="", share=1.0)
    cluster = dataclasses.replace(base.cluster, name="", state_file="", controller_port=0)
    if is_same_model:
        return dataclasses.replace(base, model=model, cluster=cluster)
    defaults = ModelConfig()
    model = dataclasses.replace(model, **{name: getattr(defaults, name) for name in OF_ONE_MODEL})
    engine = dataclasses.replace(base.engine, draft_model="")
    own = {
        pool.value: dataclasses.replace(
            base.pools.of(pool),
            engine={name: value for name, value in base.pools.of(pool).engine.items() if name != "draft_model"},
        )
        for pool in Role
    }
    pools = dataclasses.replace(base.pools, **own)
    return dataclasses.replace(base, model=model, cluster=cluster, engine=engine, pools=pools)


def require_distinct(configs: Sequence[Config]) -> None:
    """Raise ConfigError if two models cannot be served together. Their revisions must be known.

    Two models may have the same name: their shares divide its sessions.
    """
    contents: dict[str, Config] = {}
    releases: dict[str, Config] = {}
    for config in configs:
        model, release = config.model, file_name(config.release)
        if contents.setdefault(content_id(config.kv_identity), config) is not config:
            raise ConfigError(
                f"{model.served_name} ({model.id}) is listed twice: it has the same weights in the same format "
                f"(model.weights) as another model of this cluster; use --decode for more workers"
            )
        if releases.setdefault(release, config) is not config:
            raise ConfigError(f"two models have the release {release!r}; set model.release to another name for one")
    files = [config.cluster.state_file for config in configs if config.cluster.state_file]
    if len({*files}) < len(files):
        raise ConfigError("two models have the same cluster.state_file; set it to a separate file for each model")
    names = [config.cluster.name for config in configs if config.cluster.name]
    if len({*names}) < len(names):
        raise ConfigError("two models have the same cluster.name; set it to a separate name for each model")


def apart(configs: Sequence[Config]) -> list[Config]:
    """Return the configurations with a Ray namespace and a state file for each model, named after its release.

    The first model's are as configured; its `cluster.name` must be set.
    """
    first, *others = configs
    return [first, *(_apart(config, first) for config in others)]


def _apart(config: Config, first: Config) -> Config:
    cluster, release = config.cluster, file_name(config.release)
    name = cluster.name or f"{first.cluster.name}-{release}"
    path = cluster.state_file
    if first.cluster.state_file and not path:
        path = str(beside(Path(first.cluster.state_file), release))
    return dataclasses.replace(config, cluster=dataclasses.replace(cluster, name=name, state_file=path))


def beside(path: Path, release: str) -> Path:
    """Return the path of another model's file: the release stands before the suffix."""
    return path.with_name(f"{path.stem}-{release}{path.suffix}")


def file_name(release: str) -> str:
    """Return the name of a release as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", release)

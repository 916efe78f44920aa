"""The whole configuration, and where it comes from. No other file reads the environment for settings."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from baton.config.cluster import AutoscaleConfig, ClusterConfig, KubernetesConfig
from baton.config.engine import EngineConfig, ModelConfig
from baton.config.secrets import why_unreadable, without_password
from baton.config.section import build, section
from baton.config.serving import IndexConfig, RouterConfig
from baton.config.telemetry import TelemetryConfig
from baton.config.transfer import FaultsConfig, TransferConfig
from baton.errors import ConfigError
from baton.spelling import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SHORT_NAMES = {
    "BATON_GRPC_PORT": ("cluster", "grpc_port"),
    "BATON_HTTP_PORT": ("cluster", "http_port"),
    "BATON_CACHE": ("cluster", "cache_dir"),
    "BATON_FAULTS": ("faults", "spec"),
}
REDIS_URL = "BATON_INDEX_REDIS_URL"
HUB_TOKENS = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
NOT_SETTINGS = {
    "BATON_ADDRESS",
    "BATON_API_KEY",
    "BATON_CA",
    "BATON_CERTIFICATE",
    "BATON_CONFIG_JSON",
    "BATON_KEY",
    "BATON_TLS",
}


@section()
class Config:
    """All settings of all processes."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig)

    def __post_init__(self) -> None:
        ranks, gpus = self.engine.tensor_parallel, self.cluster.gpus_per_worker
        if ranks > 1 and gpus and gpus != ranks:
            raise ConfigError(
                f"cluster.gpus_per_worker is {gpus:g} and engine.tensor_parallel {ranks}: each rank has one GPU; "
                "leave cluster.gpus_per_worker at 0"
            )
        if self.engine.kv_dtype in ("int8", "fp8") and self.transfer.wire_dtype != "auto":
            raise ConfigError(
                f"transfer.wire_dtype is {self.transfer.wire_dtype}, and pages of engine.kv_dtype "
                f"{self.engine.kv_dtype} travel as they are; set transfer.wire_dtype to auto"
            )

    @property
    def router_ports(self) -> tuple[tuple[str, str, int], ...]:
        """Where a router listens: the variable that sets the port, the host and the port."""
        cluster, telemetry = self.cluster, self.telemetry
        own = (("BATON_TELEMETRY_PORT", telemetry.host, telemetry.port),) if telemetry.port else ()
        ports = (("BATON_GRPC_PORT", cluster.grpc_port), ("BATON_HTTP_PORT", cluster.http_port))
        return (*((name, cluster.host, port) for name, port in ports), *own)

    @property
    def kv_identity(self) -> str:
        """What KV is computed with: the model's identity, and whether nothing beside it has a say in its bits. Only
        workers with the same one exchange KV.
        """
        return f"{self.model.identity}\0batch_invariant" if self.engine.batch_invariant else self.model.identity

    def for_controller(self) -> Config:
        """What the controller needs: no secret of the routers."""
        return dataclasses.replace(self, router=dataclasses.replace(self.router, cache_secret=""))

    def for_workers(self) -> Config:
        """What workers need. Ray passes it on and keeps it, so it has no secret."""
        return dataclasses.replace(self, router=RouterConfig(), index=self.index.for_workers())

    def to_json(self) -> str:
        """The settings that differ from their defaults: a process of the previous release refuses names it does not
        know.
        """
        return json.dumps(_changed(self, dataclasses.asdict(self)))

    @staticmethod
    def from_json(text: str) -> Config:
        return build(Config, json.loads(text))


def _changed(settings: Any, as_dict: dict[str, Any]) -> dict[str, Any]:
    """The values of a section, or of all sections, that differ from the defaults."""
    found = {}
    for each in dataclasses.fields(settings):
        value = getattr(settings, each.name)
        if dataclasses.is_dataclass(value):
            if inner := _changed(value, as_dict[each.name]):
                found[each.name] = inner
        elif value != (each.default if each.default_factory is dataclasses.MISSING else each.default_factory()):
            found[each.name] = as_dict[each.name]
    return found


def load(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration from file and environment.

    Raises:
        ConfigError: an unknown name, or a value that is not allowed; the message names it.
    """
    environ = os.environ if environ is None else environ
    values = read_file(path)
    for variable, name, key in variables(environ):
        if isinstance(values.setdefault(name, {}), dict):  # else `build` refuses it by name
            values[name][key] = environ[variable]
    return build(Config, values)


def read_file(path: Path | None) -> dict[str, Any]:
    """The sections of a file of settings, not checked yet; without a file there are none.

    Raises:
        ConfigError: the file cannot be read, or holds no sections.
    """
    try:
        values: dict[str, Any] = (yaml.safe_load(path.read_text()) or {}) if path else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {why_unreadable(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold sections such as 'engine:' and 'cluster:'")
    return {name: {} if section is None else section for name, section in values.items()}


def variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """The variables of the environment that are settings: each with its setting's section and name.

    Raises:
        ConfigError: a variable that begins with BATON_ is no setting.
    """
    for name in environ:
        if name.startswith("BATON_") and name not in NOT_SETTINGS:
            yield name, *(SHORT_NAMES.get(name) or _split(name))


def process_config() -> Config:
    """The configuration that a parent process passed to this one, whole, in BATON_CONFIG_JSON.

    A worker's lacks the password of Redis: the URL of this process's own environment is the same one with it.
    """
    text = os.environ.get("BATON_CONFIG_JSON")
    if not text:
        return load()
    config, own = Config.from_json(text), os.environ.get(REDIS_URL, "")
    if own and without_password(own) == config.index.redis_url:
        config = dataclasses.replace(config, index=dataclasses.replace(config.index, redis_url=own))
    return config


def child_environment(environ: Mapping[str, str], *kept: str) -> dict[str, str]:
    """Returns the environment for a process that gets its settings in BATON_CONFIG_JSON: without this one's own, and
    without tokens of a model hub, because children find the model in a folder.

    Args:
        kept: variables that it needs all the same.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not (name.startswith("BATON_") or name in HUB_TOKENS)
    }


def _split(variable: str) -> tuple[str, str]:
    """The section and the name of the setting that the environment variable stands for."""
    name, _, key = variable.removeprefix("BATON_").lower().partition("_")
    sections = {each.name: each.default_factory for each in dataclasses.fields(Config)}
    if name not in sections or key not in sections[name].__dataclass_fields__:  # type: ignore[union-attr]
        words = variable.removeprefix("BATON_")
        meant = nearest(words, [each.removeprefix("BATON_") for each in _variables()])
        advice = (
            f"did you mean BATON_{meant}?" if meant else f"it would begin with one of {', '.join(sorted(sections))}"
        )
        raise ConfigError(f"the environment variable {variable} is not a setting of Baton; {advice}")
    return name, key


def _variables() -> set[str]:
    """The environment variables of all settings."""
    return SHORT_NAMES.keys() | {
        f"BATON_{section.name}_{key}".upper()
        for section in dataclasses.fields(Config)
        for key in section.default_factory.__dataclass_fields__  # type: ignore[union-attr]
    }

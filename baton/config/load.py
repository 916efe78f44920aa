"""The whole configuration, loaded from file and environment. No other file reads settings from the environment."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml

from baton.blocks import content_id
from baton.cluster import Role
from baton.config.cluster import AutoscaleConfig, ClusterConfig, KubernetesConfig
from baton.config.engine import VLLM_ARGS_OF_MODEL, EngineConfig, ModelConfig
from baton.config.pools import POOL_SETTINGS, PoolsConfig
from baton.config.secrets import why_unreadable, without_password
from baton.config.section import UNLISTED, build, is_listed, section
from baton.config.serving import IndexConfig, RouterConfig
from baton.config.telemetry import TelemetryConfig
from baton.config.testing import TestingConfig
from baton.config.transfer import TransferConfig
from baton.errors import ConfigError
from baton.spelling import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SHORT_NAMES = {
    "BATON_GRPC_PORT": ("cluster", "grpc_port"),
    "BATON_HTTP_PORT": ("cluster", "http_port"),
    "BATON_CACHE": ("cluster", "cache_dir"),
}
REDIS_URL = "BATON_INDEX_REDIS_URL"
HUB_TOKENS = {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}
UNCONVERTED = frozenset({"int8", "fp8"})
"""Types of KV pages that transfers cannot convert."""
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
    pools: PoolsConfig = field(default_factory=PoolsConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    kubernetes: KubernetesConfig = field(default_factory=KubernetesConfig)
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    testing: Annotated[TestingConfig, UNLISTED] = field(default_factory=TestingConfig)

    def __post_init__(self) -> None:
        for pool in Role:
            self._check(pool)
        types = {pool: self.engine_of(pool).kv_dtype for pool in Role}
        if len(set(types.values())) > 1 and not UNCONVERTED.isdisjoint(types.values()):
            raise ConfigError(
                f"pages of kv_dtype int8 and fp8 transfer only to pages of the same type, but the prefill pool has "
                f"{types[Role.PREFILL]} and the decode pool {types[Role.DECODE]}; set both pools to the same type"
            )

    def _check(self, pool: Role) -> None:
        """Raise ConfigError if the settings of this pool's workers do not go together."""
        engine = self.engine_of(pool)
        ranks, gpus = engine.tensor_parallel, self.gpus_per_worker(pool)
        ranks_name, gpus_name = self.name_of(pool, "tensor_parallel"), self.name_of_gpus(pool)
        if ranks > 1 and gpus and gpus != ranks:
            raise ConfigError(
                f"{gpus_name} is {gpus:g} and {ranks_name} {ranks}: each rank has one GPU; set {gpus_name} to 0"
            )
        if ranks > 1 and self.testing.arithmetic:
            raise ConfigError(f"testing.arithmetic has one rank; set {ranks_name} to 1")
        if ranks > 1 and engine.runner == "vllm" and self.router.mode == "disaggregated":
            raise ConfigError(
                f"router.mode is disaggregated, but vLLM workers with several ranks ({ranks_name} is {ranks}) exchange "
                "no KV; set router.mode to aggregated"
            )
        if engine.kv_dtype in UNCONVERTED and self.transfer.wire_dtype != "auto":
            raise ConfigError(
                f"transfer.wire_dtype is {self.transfer.wire_dtype}, but pages of {self.name_of(pool, 'kv_dtype')} "
                f"{engine.kv_dtype} cannot be converted; set transfer.wire_dtype to auto"
            )

    def name_of(self, pool: Role, setting: str) -> str:
        """Return the name of the setting that holds this value of the pool's engine."""
        return f"pools.{pool}.engine.{setting}" if setting in self.pools.of(pool).engine else f"engine.{setting}"

    def name_of_gpus(self, pool: Role) -> str:
        """Return the name of the setting that holds the GPUs per worker of this pool."""
        return f"pools.{pool}.gpus_per_worker" if self.pools.of(pool).gpus_per_worker else "cluster.gpus_per_worker"

    def engine_of(self, pool: Role) -> EngineConfig:
        """Return the engine of the workers that start in this pool."""
        return self.pools.of(pool).applied(self.engine, f"pools.{pool}.engine")

    @property
    def engine_differences(self) -> tuple[str, ...]:
        """Settings of `engine` that differ between the pools. Workers change their roles only if there are none."""
        engines = [self.engine_of(pool) for pool in Role]
        return tuple(name for name in sorted(POOL_SETTINGS) if len({getattr(each, name) for each in engines}) > 1)

    def differing_settings(self, pool: Role) -> tuple[str, ...]:
        """Return the settings of this pool's engine that differ from the other pool's, such as tensor_parallel=2."""
        engine = self.engine_of(pool)
        return tuple(f"{name}={getattr(engine, name)}" for name in self.engine_differences)

    def worker_settings(self, pool: Role) -> str:
        """Return what a worker of this pool must be started again for if it changes: its engine and its GPUs, as JSON.

        Defaults are left out, so that a release with more settings starts no worker again.
        """
        engine = self.engine_of(pool)
        own = _changed(engine, dataclasses.asdict(engine)), self.gpus_per_worker(pool)
        return json.dumps(own, sort_keys=True)

    def gpus_per_worker(self, pool: Role) -> float:
        """Return the configured GPUs of a worker that starts in this pool; 0: none are configured."""
        return self.pools.of(pool).gpus_per_worker or self.cluster.gpus_per_worker

    @property
    def router_ports(self) -> tuple[tuple[str, str, int], ...]:
        """Addresses on which a router listens: (environment variable that sets the port, host, port)."""
        cluster, telemetry = self.cluster, self.telemetry
        own = (("BATON_TELEMETRY_PORT", telemetry.host, telemetry.port),) if telemetry.port else ()
        ports = [("BATON_GRPC_PORT", cluster.grpc_port), ("BATON_HTTP_PORT", cluster.http_port)]
        if self.router.picker_port:
            ports.append(("BATON_ROUTER_PICKER_PORT", self.router.picker_port))
        return (*((name, cluster.host, port) for name, port in ports), *own)

    @property
    def kv_identity(self) -> str:
        """Identity of computed KV: the model's identity, and the settings of the engine that change what it computes.

        Only workers with the same identity exchange KV.
        """
        parts, given = [self.model.identity], self.engine.vllm_args
        if self.engine.batch_invariant:
            parts.append("batch_invariant")
        if changing := {name: given[name] for name in VLLM_ARGS_OF_MODEL & given.keys()}:
            parts.append(json.dumps(changing, sort_keys=True))
        return "\0".join(parts)

    @property
    def release(self) -> str:
        """Name of the release of the model: the configured one, else the served name with digits of the content id."""
        return self.model.release or f"{self.model.served_name}-{content_id(self.kv_identity)[:8]}"

    def for_controller(self) -> Config:
        """Return the configuration of the controller, without the routers' secret."""
        return dataclasses.replace(self, router=dataclasses.replace(self.router, cache_secret=""))

    def for_pool(self, pool: Role) -> Config:
        """Return the configuration of the workers that start in this pool: `engine` and `cluster` hold its settings.

        It has no secrets, because Ray passes it on and stores it.
        """
        cluster = dataclasses.replace(self.cluster, gpus_per_worker=self.gpus_per_worker(pool))
        return dataclasses.replace(
            self,
            engine=self.engine_of(pool),
            pools=PoolsConfig(),
            cluster=cluster,
            router=RouterConfig(),
            index=self.index.for_workers(),
        )

    def to_json(self) -> str:
        """Return the settings that differ from their defaults, as JSON.

        Defaults are left out because a process of the previous release refuses names that it does not know.
        """
        return json.dumps(_changed(self, dataclasses.asdict(self)))

    @staticmethod
    def from_json(text: str) -> Config:
        return build(Config, json.loads(text))


def _changed(settings: Any, as_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a section, or of all sections, that differ from the defaults."""
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
    """Load the configuration from file and environment.

    Raises:
        ConfigError: a name is unknown, or a value is not allowed; the message names the setting.
    """
    environ = os.environ if environ is None else environ
    values = read_file(path)
    for variable, name, key in variables(environ):
        if isinstance(values.setdefault(name, {}), dict):  # else `build` refuses it by name
            values[name][key] = environ[variable]
    return build(Config, values)


def read_file(path: Path | None) -> dict[str, Any]:
    """Read the sections of a settings file, without validating them. Without a file, return no sections.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping of sections.
    """
    try:
        values: dict[str, Any] = (yaml.safe_load(path.read_text()) or {}) if path else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {why_unreadable(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold sections such as 'engine:' and 'cluster:'")
    return {name: {} if section is None else section for name, section in values.items()}


def variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the environment variables that are settings, each with the section and the name of its setting.

    Raises:
        ConfigError: a variable starts with BATON_ but is not a setting.
    """
    for name in environ:
        if name.startswith("BATON_") and name not in NOT_SETTINGS:
            yield name, *(SHORT_NAMES.get(name) or _split(name))


def process_config() -> Config:
    """Return the whole configuration that the parent process passed in BATON_CONFIG_JSON; without one, load it.

    A worker's configuration lacks the password of Redis. If BATON_INDEX_REDIS_URL has the same URL with its password,
    that one is used.
    """
    text = os.environ.get("BATON_CONFIG_JSON")
    if not text:
        return load()
    config, own = Config.from_json(text), os.environ.get(REDIS_URL, "")
    if own and without_password(own) == config.index.redis_url:
        config = dataclasses.replace(config, index=dataclasses.replace(config.index, redis_url=own))
    return config


def child_environment(environ: Mapping[str, str], *kept: str) -> dict[str, str]:
    """Return the environment for a process that gets its settings in BATON_CONFIG_JSON.

    It lacks this process's own settings, and tokens of model hubs, because children load the model from a folder.

    Args:
        kept: variables that the process needs nevertheless.
    """
    return {
        name: value
        for name, value in environ.items()
        if name in kept or not (name.startswith("BATON_") or name in HUB_TOKENS)
    }


def _split(variable: str) -> tuple[str, str]:
    """Return the section and the name of the setting that an environment variable sets."""
    name, _, key = variable.removeprefix("BATON_").lower().partition("_")
    sections = {each.name: each.default_factory for each in dataclasses.fields(Config)}
    if name not in sections or key not in sections[name].__dataclass_fields__:  # type: ignore[union-attr]
        words = variable.removeprefix("BATON_")
        meant = nearest(words, [each.removeprefix("BATON_") for each in _variables()])
        listed = ", ".join(each for each in sorted(sections) if is_listed(Config, each))
        advice = f"did you mean BATON_{meant}?" if meant else f"the sections are {listed}"
        raise ConfigError(f"the environment variable {variable} is not a setting of Baton; {advice}")
    return name, key


def _variables() -> set[str]:
    """Return the environment variables of all listed settings."""
    return SHORT_NAMES.keys() | {
        f"BATON_{section.name}_{key}".upper()
        for section in dataclasses.fields(Config)
        if is_listed(Config, section.name)
        for key in section.default_factory.__dataclass_fields__  # type: ignore[union-attr]
    }

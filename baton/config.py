"""Every setting of every process, in one place.

A setting comes from, in rising order of precedence: the defaults below, one YAML file (`baton up --config FILE`), the
environment. `section.field` in YAML is `BATON_SECTION_FIELD` in the environment, with these short forms besides:

    BATON_GRPC_PORT   cluster.grpc_port        BATON_CACHE    cluster.cache_dir
    BATON_HTTP_PORT   cluster.http_port        BATON_FAULTS   faults.spec

This is the only file that reads the environment, except that the client commands take BATON_ADDRESS for --address and
BATON_API_KEY for --api-key.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import yaml

from baton.blocks import GRANULE
from baton.errors import ConfigError

if typing.TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")
FloatOrAuto: TypeAlias = float | Literal["auto"]

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_PORT = 65_535
MAX_TIMEOUT_S = 7 * 86_400
"""For whatever an operator may have to wait for."""


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def _require_at_least_one(section: str, config: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ConfigError(f"{section}.{name} must be at least 1, got {getattr(config, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What is served."""

    id: str = "smollm2-135m-instruct"
    """A model of Baton's own catalogue, a Hugging Face hub id, or a local folder of safetensors."""
    served_name: str = ""
    """The id clients use. Empty: the last part of `id`."""
    path: str = ""
    """The resolved local folder; `baton up` fills it in."""
    revision: str = ""
    """Identity of the weights; seeds the block keys. `baton up` fills it in."""
    dtype: str = "auto"
    """auto (float32 on a CPU, the model's own on a GPU), float32, bfloat16 or float16."""
    device: str = "auto"
    """auto, cpu or cuda."""

    def __post_init__(self) -> None:
        _require_one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _require_one_of("model.device", self.device, ("auto", "cpu", "cuda"))


ENGINE_COUNTS = ("max_num_seqs", "max_num_batched_tokens", "max_waiting", "num_threads", "tensor_parallel")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One worker's engine."""

    runner: str = "transformers"
    """transformers, or arithmetic: a model whose answers can be worked out by hand, for tests and benchmarks."""
    arithmetic_step_ms: float = 0.0
    """What a step of the arithmetic model takes at least, slept; a real model takes what it takes."""
    arithmetic_token_ms: float = 0.0
    """The same for each token that a step computes."""
    block_size: int = 16
    """Tokens a KV block; a multiple of 16."""
    kv_cache_gib: FloatOrAuto = "auto"
    """Memory of the KV pool, in GiB; with several ranks, of each of them. auto, or 0: of the free memory that weights
    leave, 85 % on a GPU, half on a machine, which its workers share, but there not more than 2 GiB, or than weights and
    process take if that is more. More than there is is refused."""
    memory_share: float = 1.0
    """Of the memory of its machine or of its GPU: on so much a worker counts where `kv_cache_gib` is auto, as far as it
    is free. For what else is there. The workers of one Ray node share evenly by themselves; on GPUs each has the part
    of one that Ray gives it (`cluster.gpus_per_worker`)."""
    num_blocks: int = 0
    """Blocks of the KV pool; 0: as many as fit into `kv_cache_gib`."""
    max_num_seqs: int = 64
    """Sequences that hold blocks: in the running batch, or reserved for KV that is on its way."""
    max_num_batched_tokens: int = 512
    """Tokens in one step; longer prompts are prefilled in chunks."""
    max_model_len: int = 0
    """Longest prompt + answer in tokens; 0: what the model says, as far as the KV pool holds it."""
    max_waiting: int = 1024
    """Sequences that may wait for blocks before a worker refuses more."""
    output_reservation: int = 512
    """Answer tokens for which a decode worker reserves blocks up front; longer answers grow block by block."""
    num_threads: int = 1
    """Compute threads of one rank. Two contended threads can be 40 times slower than one."""
    tensor_parallel: int = 1
    """Ranks of one worker: processes on one machine, each with a GPU of its own where there are GPUs, which share the
    model's weights and KV heads and compute every step together. Has to divide the number of KV heads."""
    rank_timeout_s: float = 60.0
    """With several ranks: a step that takes longer will never end, since a rank hangs; then the worker ends."""

    def __post_init__(self) -> None:
        _require_one_of("engine.runner", self.runner, ("transformers", "arithmetic"))
        _require_at_least_one("engine", self, ENGINE_COUNTS)
        if self.runner == "arithmetic" and self.tensor_parallel > 1:
            raise ConfigError("engine.runner arithmetic has one rank; set engine.tensor_parallel to 1")
        if self.max_model_len and self.max_model_len < GRANULE:
            raise ConfigError(f"engine.max_model_len must be 0 or at least {GRANULE} tokens, got {self.max_model_len}")
        if self.kv_cache_gib != "auto" and not 0 < self.kv_cache_gib < math.inf:
            raise ConfigError(f"engine.kv_cache_gib must be auto or more than 0 GiB, got {self.kv_cache_gib}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"engine.memory_share must be more than 0 and at most 1, got {self.memory_share}")
        if not self.rank_timeout_s > 0:
            raise ConfigError(f"engine.rank_timeout_s must be more than 0 seconds, got {self.rank_timeout_s}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least engine.max_num_seqs "
                f"({self.max_num_seqs}), or some sequences would never get a turn"
            )
        if self.block_size < GRANULE or self.block_size % GRANULE:
            raise ConfigError(f"engine.block_size must be a multiple of {GRANULE}, got {self.block_size}")


LINK_KINDS = ("nccl", "shm", "tcp", "gloo")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """The KV hand-over."""

    slot_bytes: int = 4 * 2**20
    """Largest payload of one chunk. No sender's may exceed its receivers'."""
    span_tokens: int = 512
    """Tokens that travel together; a finished prefill chunk leaves while the next is computed. The same on every
    worker; best equal to engine.max_num_batched_tokens."""
    num_slots: int = 16
    """Staging slots of one side for all its pairs. Pairs over shared memory have their own."""
    window: int = 4
    """Staging slots that one pair may hold at a time."""
    max_pairs: int = 0
    """Pairs that a sender keeps open, one for each rank there and here; the one that was idle longest makes room. 0: 8
    where nccl is used, of which each takes about 30 MB of the GPU, else 64 a rank."""
    open_timeout_s: float = 10.0
    """Longest wait for a session with another worker, and its link, to be open."""
    op_timeout_s: float = 10.0
    """Longest wait for one message of a link, or for the peer's answer to one of the session."""
    pull_timeout_s: float = 2.0
    """Longest wait for a prefix that another worker is believed to hold; then it is computed."""
    ping_s: float = 2.0
    """How often each side of a session says that it lives; the sender's ping renews its leases."""
    resend_s: float = 1.0
    """What the peer has not answered is said again after this time."""
    lease_s: float = 30.0
    """A reservation is given up when its sender has not been heard of for so long. A sender offers as soon as it has
    the request, however long its queue is."""
    max_unsent_mib: int = 1024
    """A prefill worker takes no new prompt while more KV than this is computed and not sent; those in its queue go on,
    as far as the KV pool has room."""
    checksum: str = "full"
    """full or off."""
    wire_dtype: str = "auto"
    """auto (the narrower of the two caches'), float32, bfloat16, float16 or int8 (one scale a head and page). A type
    narrower than both caches' is lossy: split and aggregated answers may then differ."""
    links: tuple[str, ...] = ("nccl", "shm", "tcp")
    """Link kinds to offer and to take, best first. nccl needs CUDA and a single rank on both sides, shm two CPU caches
    on one host; tcp suits all. gloo does too, at four thirds of tcp's processor time, and listens as long as the worker
    lives, keeping whatever connects to it: only for where tcp does not do. An nccl link has its signals on gloo."""

    def __post_init__(self) -> None:
        _require_one_of("transfer.checksum", self.checksum, ("full", "off"))
        _require_one_of("transfer.wire_dtype", self.wire_dtype, ("auto", "float32", "bfloat16", "float16", "int8"))
        for kind in self.links:
            _require_one_of("transfer.links", kind, LINK_KINDS)
        if not self.links:
            raise ConfigError(f"transfer.links must name at least one of {', '.join(LINK_KINDS)}")
        counts = ("slot_bytes", "span_tokens", "num_slots", "window", "max_unsent_mib")
        _require_at_least_one("transfer", self, counts)
        for name in ("open_timeout_s", "op_timeout_s", "pull_timeout_s", "ping_s", "resend_s", "lease_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"transfer.{name} must be more than 0 seconds, got {getattr(self, name)}")
        for limit in ("op_timeout_s", "lease_s"):
            if self.ping_s > getattr(self, limit):
                raise ConfigError(
                    f"transfer.ping_s ({self.ping_s}) must not exceed transfer.{limit} ({getattr(self, limit)})"
                )
        if self.max_pairs < 0:
            raise ConfigError(f"transfer.max_pairs must be 0 (automatic) or more, got {self.max_pairs}")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """Who owns which prefix, and who is alive: kept in Redis."""

    redis_url: str = ""
    """redis://HOST:PORT/DB or unix://PATH. Empty: `baton up` starts an embedded one."""
    lease_s: float = 10.0
    """Whoever has not renewed its lease for so long is gone."""
    renew_s: float = 1.0
    """How often leases are renewed."""
    blocks_ttl_s: float = 60.0
    """Life of a dead worker's block set."""
    stream_max_events: int = 100_000
    """Of who owns which prefix, that are kept for routers to catch up with."""
    poll_s: float = 1.0
    """How often a router reads the leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClassConfig:
    """What the requests of one class are held against, and how their placement weighs."""

    ttft_ms: float = 60_000.0
    """Objective: time to first token. A request that is predicted to miss it because others come first is refused."""
    itl_ms: float = 1_000.0
    """Objective: mean time between tokens. Workers compute no more of other prompts in a step than keeps it."""
    e2e_ms: float = math.inf
    """Objective: time to the last token; .inf: none. It is held against the answer, and refuses nobody."""
    affinity_weight: float = 1.0
    """For each prompt token that another worker's cache has and the chosen one's has not, in times of computing it. It
    keeps conversations where their past is, so that the pool's caches hold fewer copies."""
    interference_weight: float = 0.02
    """For each sequence that a worker decodes while it computes a prompt, in times of that computing."""

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "itl_ms", "e2e_ms"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"an objective must be more than 0, got {name} {getattr(self, name)}")
        for name in ("affinity_weight", "interference_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")


DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    id: str = "router-0"
    mode: str = "auto"
    """auto, split (always prefill on a prefill worker) or aggregated (always on the decode worker)."""
    max_in_flight: int = 512
    """Choices being served before new requests are refused."""
    max_attempts: int = 4
    """Placements of one choice that may fail, with hardly a token between them, before its client sees the failure."""
    drain_timeout_s: float = 5.0
    """How long requests in flight may go on when the router is told to end."""
    max_connection_age_s: float = math.inf
    """A gRPC client is asked to connect anew after so long; what it has asked for goes on. Behind a balancer of
    connections it finds all routers so, and none that is about to end; .inf: never."""
    worker_wait_s: float = 30.0
    """How long an accepted request waits for a worker to become ready. A router whose workers are all gone says for as
    long that it is ready."""
    pull_above_tokens: int = 64
    """The worker that computes a prompt pulls a prefix from another one which holds at least so many tokens more of
    it. A number above the context window: never."""
    slo_classes: dict[str, SloClassConfig] = field(default_factory=lambda: {DEFAULT_CLASS: SloClassConfig()})
    """By name, in the environment as JSON. A tenant names its own (`router.admission.tenants`); without
    one it is `default`. What a request's `slo` sets goes before."""
    expected_output_floor: int = 64
    """Answer tokens for which a decode worker has room before a prompt is computed: nine in ten of the tenant's answers
    so far are no longer, but never fewer than this where the request allows as many."""
    expected_output_default: int = 256
    """The same before any answer was seen."""
    default_max_tokens: int = 0
    """Answer length when a client gives none; 0: up to the context window."""
    cache_secret: str = ""
    """Keys the tenants' cache scopes; the same on every router. `baton up` draws one."""
    tenants_file: str = ""
    """YAML file of the tenants and the SHA-256 of their API keys (`printf %s KEY | sha256sum`);
    `router.admission.tenants` lists the fields. Read once at start. Empty: everybody is let in, whatever key they
    send."""

    def __post_init__(self) -> None:
        _require_one_of("router.mode", self.mode, ("auto", "split", "aggregated"))
        _require_at_least_one("router", self, ("max_in_flight", "max_attempts", "pull_above_tokens"))
        _require_at_least_one("router", self, ("expected_output_floor", "expected_output_default"))
        if not self.max_connection_age_s > 0:
            raise ConfigError(
                f"router.max_connection_age_s must be more than 0 seconds, got {self.max_connection_age_s}"
            )
        if DEFAULT_CLASS not in self.slo_classes:
            raise ConfigError(f"router.slo_classes must have a class {DEFAULT_CLASS!r}")

    def slo_class(self, name: str) -> SloClassConfig:
        """Raises ConfigError for a name that is not among `slo_classes`; "" is the default one."""
        if (found := self.slo_classes.get(name or DEFAULT_CLASS)) is None:
            raise ConfigError(f"no SLO class is called {name!r}; router.slo_classes has {', '.join(self.slo_classes)}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    prefill: int = 1
    decode: int = 1
    host: str = "127.0.0.1"
    """Where the router listens."""
    grpc_port: int = 50051
    http_port: int = 8000
    advertise_host: str = ""
    """Under which others find the router, or the controller, where it listens on all addresses of a machine. Empty: as
    `host` and `controller_host` say."""
    controller_host: str = "127.0.0.1"
    """Where the controller listens. It takes orders from whoever reaches it; only routers ask for an operator's key."""
    controller_port: int = 0
    """0: any that is free."""
    name: str = ""
    """Of this cluster among others in one Ray. Empty: `baton up` draws one; `baton run` needs one."""
    cache_dir: str = ""
    """Converted models. Empty: the user's cache folder, `baton/`."""
    routers: int = 1
    """Router processes that `baton up` runs behind one address. They share nothing but Redis."""
    ray_address: str = ""
    """host:port of a Ray cluster to join, whose nodes take as many workers as they have of the resource `baton_worker`.
    Where the label `baton.dev/pool` names a pool, they take workers that begin in that one. One of the nodes has to be
    this machine. The others need to reach `index.redis_url`, and to have the model at the same path. Empty: `baton up`
    starts one of this machine alone."""
    ray_node_ip: str = ""
    """The controller joins Ray by the node of this address, and waits until it is there. Empty: by any that runs on its
    machine, the head first."""
    state_file: str = ""
    """Where the controller keeps the desired pool sizes, so that they outlive it and go before `prefill` and `decode`;
    one cluster a file. Empty: they are kept for the life of `baton up`, and with `ray_address` a file in the cache
    folder says which workers to end if all of it is killed."""
    gpus_per_worker: float = 0.0
    """0: one for each of `engine.tensor_parallel`; for a single rank an equal share of all nodes' GPUs, where the pools
    start with more workers than there are GPUs. Where nodes are for one pool alone, say what a worker is to have."""
    drain_timeout_s: float = 30.0
    """How long a worker that leaves may take to hand over what it does. What is left then is computed again."""
    start_timeout_s: float = 180.0
    """For the whole cluster, and afterwards for every worker that is started, once a node has room for it."""
    stop_timeout_s: float = 20.0
    """How long each part may take to end before it is killed."""

    def __post_init__(self) -> None:
        _require_at_least_one("cluster", self, ("routers",))
        for name in ("grpc_port", "http_port", "controller_port"):
            if not 0 <= getattr(self, name) <= MAX_PORT:
                raise ConfigError(f"cluster.{name} must be a port, 0 to {MAX_PORT}, got {getattr(self, name)}")
        for name in ("drain_timeout_s", "start_timeout_s", "stop_timeout_s"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                bound = f"more than 0 seconds, and at most {MAX_TIMEOUT_S}"
                raise ConfigError(f"cluster.{name} must be {bound}, got {getattr(self, name)}")
        if not 0 <= self.gpus_per_worker < math.inf:
            raise ConfigError(f"cluster.gpus_per_worker must be at least 0, got {self.gpus_per_worker}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesConfig:
    """Where the pools' sizes are kept in Kubernetes: in ServingPools, which `kubectl scale`, autoscalers, the CLI and
    `Admin.ScalePool` all change. The chart fills it in."""

    namespace: str = ""
    """Empty: this is not Kubernetes."""
    prefill_pool: str = "prefill"
    """The name of its ServingPool."""
    decode_pool: str = "decode"
    prefill_deployment: str = ""
    """Its pods are Ray nodes, one for a worker, and the controller keeps as many as it needs. Empty: somebody else adds
    nodes for workers that wait, as KubeRay's autoscaler does."""
    decode_deployment: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """How the controller sizes the pools by itself. `baton autoscale --dry-run` tells what these settings would do."""

    enabled: bool = False
    """The controller sizes the pools by itself."""
    dry_run: bool = False
    """Decide and log, and order nothing."""
    min_prefill: int = 1
    """Not in mode `aggregated`, in which nobody uses that pool."""
    min_decode: int = 1
    """Workers of the decode pool, at least."""
    max_prefill: int = 0
    """0: as many as `max_workers` allows."""
    max_decode: int = 0
    """As `max_prefill`."""
    max_workers: int = 0
    """Of both pools together. 0: as many as there are, which change their roles and do not become more or fewer."""
    window_s: float = 10.0
    """What is measured is measured over so long, and then decided on."""
    cool_down_s: float = 30.0
    """Nothing is changed for so long after a change, and after the controller began. Measurements are smoothed over it,
    too."""
    scale_in_s: float = 300.0
    """A worker is stopped when the pools could have done without it for so long."""
    target_utilisation: float = 0.7
    """Of a pool: of its time that prompts may take, or of the sequences and the KV with which it still keeps the
    objectives. Above it, workers are moved or started; at 0.7 of it with a worker less, that worker is stopped."""
    goodput_target: float = 0.95
    """No worker is stopped while a smaller share of requests meets its objectives."""

    def __post_init__(self) -> None:
        for name in ("min_prefill", "max_prefill", "max_decode", "max_workers"):
            if getattr(self, name) < 0:
                raise ConfigError(f"autoscale.{name} must be at least 0, got {getattr(self, name)}")
        _require_at_least_one("autoscale", self, ("min_decode",))
        for pool in ("prefill", "decode"):
            least, most = getattr(self, f"min_{pool}"), getattr(self, f"max_{pool}")
            if 0 < most < least:
                raise ConfigError(f"autoscale.max_{pool} ({most}) must be at least autoscale.min_{pool} ({least})")
        if 0 < self.max_workers < self.min_prefill + self.min_decode:
            raise ConfigError(
                f"autoscale.max_workers ({self.max_workers}) must be at least autoscale.min_prefill and "
                f"autoscale.min_decode together ({self.min_prefill + self.min_decode})"
            )
        for name in ("window_s", "cool_down_s", "scale_in_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"autoscale.{name} must be more than 0, got {getattr(self, name)}")
        for name in ("target_utilisation", "goodput_target"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"autoscale.{name} must be more than 0 and at most 1, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    otlp_endpoint: str = ""
    """host:port of an OTLP gRPC receiver for traces; empty: spans are not exported."""
    sample_ratio: float = 1.0
    """Share of the traces that begin here which are exported."""
    log_level: str = "info"
    """debug, info, warning, error or critical."""
    log_format: str = "text"
    """text, or json: an object a line, with the trace of the request that the line is about."""
    vllm_aliases: bool = False
    """/metrics shows what it can under vLLM's names, too, for dashboards and gateways that know those."""

    def __post_init__(self) -> None:
        _require_one_of("telemetry.log_format", self.log_format, ("text", "json"))
        _require_one_of("telemetry.log_level", self.log_level, ("debug", "info", "warning", "error", "critical"))


@dataclass(frozen=True, slots=True)
class FaultsConfig:
    """Faults on purpose, for tests. Off by default."""

    spec: str = ""
    """Comma-separated: NAME=N for every Nth chunk of a KV transfer; the names are the fields of
    `kvstore.transfer.transport.faults.Faults`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
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

    def to_json(self) -> str:
        """What differs from the defaults: a process of the release before this one refuses settings that it does not
        know."""
        return json.dumps(_changed(self, dataclasses.asdict(self)))

    @staticmethod
    def from_json(text: str) -> Config:
        return _build(Config, json.loads(text), "")


def _changed(settings: Any, as_dict: dict[str, Any]) -> dict[str, Any]:
    """Of a section, or of all of them, what differs from the defaults."""
    found = {}
    for each in dataclasses.fields(settings):
        value = getattr(settings, each.name)
        if dataclasses.is_dataclass(value):
            if inner := _changed(value, as_dict[each.name]):
                found[each.name] = inner
        elif value != (each.default if each.default_factory is dataclasses.MISSING else each.default_factory()):
            found[each.name] = as_dict[each.name]
    return found


SHORT_NAMES = {
    "BATON_GRPC_PORT": ("cluster", "grpc_port"),
    "BATON_HTTP_PORT": ("cluster", "http_port"),
    "BATON_CACHE": ("cluster", "cache_dir"),
    "BATON_FAULTS": ("faults", "spec"),
}
NOT_SETTINGS = {"BATON_ADDRESS", "BATON_API_KEY", "BATON_CONFIG_JSON"}


def load(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration from file and environment.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type; the message names it.
    """
    environ = os.environ if environ is None else environ
    try:
        values: dict[str, Any] = (yaml.safe_load(path.read_text()) or {}) if path else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold sections such as 'engine:' and 'cluster:'")
    values = {name: {} if section is None else section for name, section in values.items()}
    sections = {f.name: {g.name for g in dataclasses.fields(f.default_factory)} for f in dataclasses.fields(Config)}  # type: ignore[arg-type]
    for name, value in environ.items():
        if not name.startswith("BATON_") or name in NOT_SETTINGS:
            continue
        section, key = SHORT_NAMES.get(name) or _split(name, sections)
        if isinstance(values.setdefault(section, {}), dict):  # else `_build` refuses it by name
            values[section][key] = value
    return _build(Config, values, "")


def process_config() -> Config:
    """The configuration that a parent process handed to this one, whole, in BATON_CONFIG_JSON."""
    text = os.environ.get("BATON_CONFIG_JSON")
    return Config.from_json(text) if text else load()


def _split(name: str, sections: Mapping[str, set[str]]) -> tuple[str, str]:
    section, _, key = name.removeprefix("BATON_").lower().partition("_")
    if key not in sections.get(section, ()):
        raise ConfigError(
            f"the environment variable {name} is not a setting of Baton; see baton/config.py for the names"
        )
    return section, key


def _build(cls: type[T], values: Mapping[str, Any], prefix: str) -> T:
    hints = typing.get_type_hints(cls)
    if unknown := sorted(set(values) - set(hints), key=str):
        known = ", ".join(sorted(hints))
        raise ConfigError(f"unknown setting {prefix}{unknown[0]}; known here: {known}")
    return cls(**{key: _convert(hints[key], value, prefix + key) for key, value in values.items()})


def _convert_mapping(kind: Any, value: Any, name: str) -> Any:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{name} must be JSON in the environment: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a mapping, got {value!r}")
    _, kind_of_values = typing.get_args(kind)
    return {str(key): _convert(kind_of_values, item, f"{name}.{key}") for key, item in value.items()}


def _convert(kind: Any, value: Any, name: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ConfigError(f"{name} must be a section of settings")
        return _build(typing.cast("type[Any]", kind), value, name + ".")
    if typing.get_origin(kind) is dict:
        return _convert_mapping(kind, value, name)
    if kind == FloatOrAuto:
        try:
            return value if value == "auto" else _convert(float, value, name) or "auto"  # 0 means the same
        except ConfigError as error:
            raise ConfigError(str(error).replace("must be", "must be auto or", 1)) from None
    if isinstance(kind, types.GenericAlias):
        if isinstance(value, str):
            return tuple(item for item in (part.strip() for part in value.split(",")) if item)
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name} must be a list, got {value!r}")
        return tuple(str(item) for item in value)
    if kind is bool:
        if str(value).lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{name} must be true or false, got {value!r}")
        return str(value).lower() in ("true", "1")
    if kind is str and isinstance(value, bool):
        return "on" if value else "off"  # YAML's reading of a bare on or off
    is_fraction = kind is int and isinstance(value, float) and not value.is_integer()
    if value is None or isinstance(value, (bool, dict, list)) or is_fraction:
        raise ConfigError(f"{name} must be of type {kind.__name__}, got {value!r}")
    try:
        return kind(value)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{name} must be of type {kind.__name__}, got {value!r}") from error

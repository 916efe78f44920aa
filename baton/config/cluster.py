"""Settings of the cluster's processes: addresses, numbers of processes, and sizes of the pools."""

from __future__ import annotations

import math
from typing import Annotated, TypeAlias

from pydantic import Field

from baton.config.section import (
    NUMBER,
    AtLeastOne,
    HostPort,
    Int,
    Must,
    NotNegative,
    Port,
    Share,
    String,
    Switch,
    Wait,
    section,
)
from baton.errors import ConfigError

Duration: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False), NUMBER, Must.be("more than 0")]
EndpointName: TypeAlias = Annotated[
    str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$"), Must.be("1 to 63 letters, digits, dots, _ or -")
]
NumOrPercent: TypeAlias = Annotated[
    str, Field(pattern=r"^([0-9]{1,4}|100%|[0-9]{1,2}%)$"), Must.be("a number of workers, or a percentage up to 100%")
]
"""Number of a pool's workers, such as 2, or percentage of the pool, such as 25%."""
LEAST_STARTING = 4
"""Workers that may start at a time in small clusters, unless `cluster.starting` is set."""


@section("cluster")
class ClusterConfig:
    """Processes of a cluster."""

    prefill: Int = 1
    """Initial number of prefill workers."""
    decode: Int = 1
    """Initial number of decode workers."""
    host: String = "127.0.0.1"
    """Address on which the router listens."""
    grpc_port: Port = 50051
    """Port of the router's gRPC services."""
    http_port: Port = 8000
    """Port of the router's HTTP API, page and metrics."""
    advertise_host: String = ""
    """Address at which other processes reach the router, or the controller, if it listens on all addresses of its
    machine. Empty: `host` and `controller_host`."""
    controller_host: String = "127.0.0.1"
    """Address on which the controller listens. It accepts calls from routers and `baton leave` only. Operators call it
    through a router, which requires an operator key."""
    controller_port: Port = 0
    """Port of the controller's gRPC service; 0: any free port."""
    tls_certificate: String = ""
    """PEM file of the certificate that a member of the cluster presents to the other members, and a router to its
    clients unless `router.tls_certificate` is set. With it, all gRPC between members and all KV over tcp is
    encrypted, and each side must present a certificate that `tls_ca` signed. The files of this setting and of the next
    two are reloaded when they change. Empty: plain text."""
    tls_key: String = ""
    """PEM file of the key of `tls_certificate`, without a password."""
    tls_ca: String = ""
    """PEM file of the authorities that sign the members' certificates. They are also trusted for Redis if
    `index.redis_url` starts with rediss://, and for the receiver of traces if `telemetry.otlp_tls` is set."""
    tls_name: String = "baton"
    """DNS name in the certificate of every member. It is verified instead of the members' addresses, which change."""
    endpoint: EndpointName = "baton"
    """Name of the endpoint. Routers serve the models of all controllers that have the same endpoint in the same Redis.
    The models of an endpoint share accounts, usage and history."""
    name: String = ""
    """Name of this cluster, unique in its Ray cluster. Empty: `baton up` generates one; `baton run` requires one."""
    secret: String = ""
    """File with the cluster's secret, or with the keys that `baton keys` derived from it for this process. It is
    reloaded when it changes. Members authenticate to each other with it. The path, which workers get from the
    controller, must be the same on all machines. Empty: `baton up` generates a secret unless `ray_address` is set;
    other processes then accept unauthenticated calls, and listen on loopback addresses only."""
    cache_dir: String = ""
    """Folder for converted models, the compiled native step, and logs. Empty: `baton/` in the user's cache folder. If a
    part of the folder belongs to another user, Baton keeps that part in the user's own cache instead."""
    routers: AtLeastOne = 1
    """Number of router processes that `baton up` runs behind one address. They share no state except Redis."""
    ray_address: HostPort = ""
    """host:port of a Ray cluster to join. Each of its nodes runs as many workers as it has of the resource
    `baton_worker`. A node with the label `baton.dev/pool` runs only workers that start in that pool. This machine must
    be one of the nodes; the others must reach `index.redis_url` and have the model at the same path. Empty: `baton up`
    starts a Ray cluster on this machine only."""
    ray_node_ip: String = ""
    """Address of the Ray node through which the controller joins Ray; the controller waits until that node exists.
    Empty: any node on the controller's machine, preferably the head."""
    state_file: String = ""
    """File in which the controller stores the desired pool sizes, one file per cluster. After a restart the stored
    sizes override `prefill` and `decode`. Empty: the sizes last until `baton up` stops; if `ray_address` is set, a file
    in the cache folder records which workers to stop in case all processes are killed."""
    gpus_per_worker: Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER, Must.be("at least 0")] = 0.0
    """GPUs per worker. 0: one per rank (`engine.tensor_parallel`). If the pools start with more single-rank workers
    than there are GPUs, the workers share GPUs equally: 3 workers on 2 GPUs get half a GPU each. Workers that the nodes
    have no room for are refused at startup; set a value if more nodes will join later."""
    drain_timeout_s: Wait = 30.0
    """Time that a worker has to migrate its requests before it leaves. Requests that remain after it are recomputed on
    other workers."""
    start_timeout_s: Wait = 180.0
    """Timeout for each start of a worker, measured from when its node lets it load the model. `baton up` waits this
    long for the whole cluster, or a multiple of it if not all workers may start at a time (`starting_per_node`)."""
    stop_timeout_s: Wait = 20.0
    """Time that each process has to stop before it is killed."""
    orphan_timeout_s: Wait = 600.0
    """Maximum time for which a worker serves on without its Ray actor, after Ray's head, its GCS or a raylet has
    failed. If Ray is back in time, the controller adopts the worker. After this time the worker drains and ends."""
    starting: NotNegative = 0
    """Maximum number of workers that start at a time, in both pools together. Workers that wait for room on a node, or
    for `starting_per_node`, do not count. 0: half of the desired workers, at least 4."""
    starting_per_node: AtLeastOne = 2
    """Maximum number of workers that start at a time on one Ray node, because they share its disk, its network and its
    processors. The others wait on the node; `start_timeout_s` does not include that wait."""
    max_surge: NumOrPercent = "25%"
    """Maximum number of additional workers of a pool during a roll-out of a new version: a number, or a percentage of
    the pool, rounded up. They start only in free room on nodes of the new version."""
    max_unavailable: NumOrPercent = "25%"
    """Maximum number of a pool's desired workers that may be missing because they were replaced or drained: a number,
    or a percentage of the pool, rounded down, but at least 1. 0: a worker leaves only when its replacement serves."""

    def __post_init__(self) -> None:
        if not (self.num_surge(1) or self.num_unavailable(1)):
            raise ConfigError(
                "cluster.max_surge and cluster.max_unavailable are both 0, so that no worker could be replaced; set "
                "cluster.max_unavailable to 1"
            )

    def num_starting(self, num_workers: int) -> int:
        """Return how many workers may start at a time, if the pools have `num_workers` workers together."""
        return self.starting or max(LEAST_STARTING, math.ceil(num_workers / 2))

    @property
    def whole_start_timeout_s(self) -> float:
        """Timeout of `baton up` for the start of all workers: they start in groups, one after the other."""
        num_workers = self.prefill + self.decode
        at_once = self.num_starting(num_workers)
        if not self.ray_address:  # they are all on one node
            at_once = min(at_once, self.starting_per_node)
        return self.start_timeout_s * max(math.ceil(num_workers / at_once), 1)

    def num_surge(self, num_workers: int) -> int:
        """Return how many additional workers a pool of that size may have during a roll-out."""
        return math.ceil(_part(self.max_surge, num_workers))

    def num_unavailable(self, num_workers: int) -> int:
        """Return how many workers of a pool of that size may be missing while they are replaced."""
        least = min(int(self.max_unavailable.rstrip("%")), 1)
        return max(int(_part(self.max_unavailable, num_workers)), least)


def _part(given: str, num_workers: int) -> float:
    """Return the number of workers that a number or percentage stands for."""
    return int(given[:-1]) * num_workers / 100 if given.endswith("%") else float(given)


@section("kubernetes")
class KubernetesConfig:
    """Kubernetes resources of the pools. Kubernetes stores the pool sizes in ServingPools, which `kubectl scale`,
    autoscalers, the CLI and `Admin.ScalePool` change. The chart sets this section.
    """

    namespace: String = ""
    """Namespace of the ServingPools. Empty: Baton does not run on Kubernetes."""
    prefill_pool: String = "prefill"
    """Name of the prefill pool's ServingPool."""
    decode_pool: String = "decode"
    """Name of the decode pool's ServingPool."""
    prefill_deployment: String = ""
    """Deployment whose pods are the Ray nodes of prefill workers; the controller sets its number of replicas. Empty:
    another component, such as KubeRay's autoscaler, adds nodes for pending workers."""
    decode_deployment: String = ""
    """Deployment whose pods are the Ray nodes of decode workers; it may be the same as `prefill_deployment`. Empty: as
    for `prefill_deployment`."""
    prefill_budget: String = ""
    """PodDisruptionBudget of the pods of prefill workers, if no Deployment creates them: the controller keeps its
    `minAvailable` at one less than the number of pods that the pool needs. Empty: none."""
    decode_budget: String = ""
    """PodDisruptionBudget of the pods of decode workers; it may be the same as `prefill_budget`. Empty: none."""
    workers_per_pod: AtLeastOne = 1
    """Number of workers that fit into one pod of those Deployments."""
    in_place: Switch = False
    """During a rollout, stop a worker before its replacement is ready, for clusters without spare GPUs. The last
    prefill worker is stopped only if a decode worker serves, and the last decode worker only if a prefill worker
    serves. If false, the pod of the new version is created first, and a worker starts in it before an old one is
    stopped."""


@section("autoscale")
class AutoscaleConfig:
    """Autoscaler of the controller. `baton autoscale --dry-run` shows what these settings would do."""

    enabled: Switch = False
    """Let the controller set the pool sizes automatically."""
    dry_run: Switch = False
    """Decide and log, but change nothing."""
    min_prefill: NotNegative = 1
    """Minimum size of the prefill pool. Ignored in mode `aggregated`, which does not use that pool."""
    min_decode: NotNegative = 1
    """Minimum size of the decode pool. If this and `min_prefill` are 0, the model sleeps, without any worker, after
    `idle_s` without a request. Routers hold the requests that arrive while it sleeps, and the controller starts
    workers."""
    idle_s: Duration = 900.0
    """Time without a request after which the controller stops all workers of a model that may sleep, in seconds."""
    max_prefill: NotNegative = 0
    """Maximum size of the prefill pool; 0: limited by `max_workers` only."""
    max_decode: NotNegative = 0
    """Maximum size of the decode pool; 0: limited by `max_workers` only."""
    max_workers: NotNegative = 0
    """Maximum number of workers in both pools together. 0: the current number; workers then change roles, but their
    number stays the same."""
    window_s: Duration = 10.0
    """Time over which the load is measured before each decision, in seconds."""
    cool_down_s: Duration = 30.0
    """Time without changes after each change and after the start of the controller, in seconds. It is also the time
    constant by which measurements are smoothed."""
    scale_in_s: Duration = 300.0
    """Time for which the pools must have been too large by one worker before a worker is stopped, in seconds."""
    target_utilisation: Share = 0.7
    """Target utilisation of a pool. Prefill: share of time spent on prompts. Decode: share of the sequences and KV that
    the pool can hold within its objectives. Above the target, workers change roles or new workers start. A worker is
    stopped if the pool would stay below 0.7 of the target without it."""
    goodput_target: Share = 0.95
    """Share of requests that must meet their objectives before a worker may be stopped."""

    @property
    def may_sleep(self) -> bool:
        """True if the controller stops all workers of a model without requests."""
        return self.enabled and self.min_decode == 0

    def __post_init__(self) -> None:
        if self.min_decode == 0 and self.min_prefill > 0:
            raise ConfigError(
                f"autoscale.min_decode 0 lets the model sleep, without any worker; set autoscale.min_prefill "
                f"({self.min_prefill}) to 0 too, or autoscale.min_decode to 1"
            )
        for pool, least, most in (
            ("prefill", self.min_prefill, self.max_prefill),
            ("decode", self.min_decode, self.max_decode),
        ):
            if 0 < most < least:
                raise ConfigError(f"autoscale.max_{pool} ({most}) must be at least autoscale.min_{pool} ({least})")
        if 0 < self.max_workers < self.min_prefill + self.min_decode:
            raise ConfigError(
                f"autoscale.max_workers ({self.max_workers}) must be at least autoscale.min_prefill and "
                f"autoscale.min_decode together ({self.min_prefill + self.min_decode})"
            )

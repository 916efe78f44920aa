"""Settings of the cluster's processes: where they listen, how many there are, and how the pools are sized."""

from __future__ import annotations

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


@section("cluster")
class ClusterConfig:
    """The processes of a cluster."""

    prefill: Int = 1
    """Prefill workers to start with."""
    decode: Int = 1
    """Decode workers to start with."""
    host: String = "127.0.0.1"
    """Address on which the router listens."""
    grpc_port: Port = 50051
    """Port of the router's gRPC services."""
    http_port: Port = 8000
    """Port of the router's HTTP API, page and metrics."""
    advertise_host: String = ""
    """Address at which other processes find the router, or the controller, where it listens on all addresses of its
    machine. Empty: `host` and `controller_host`."""
    controller_host: String = "127.0.0.1"
    """Address on which the controller listens. It takes orders from routers and `baton leave` alone; the routers ask
    for an operator's key."""
    controller_port: Port = 0
    """Port of the controller's gRPC service; 0: any free one."""
    tls_certificate: String = ""
    """PEM file of the certificate with which every member of the cluster proves itself to the others, and a router to
    its clients unless it has its own. With it all gRPC between members, and KV over tcp, is encrypted, and each side
    must have a certificate of `tls_ca`. The file, and those of the next two settings, are read again when they change.
    Empty: plain text."""
    tls_key: String = ""
    """PEM file of that certificate's key, without a password."""
    tls_ca: String = ""
    """PEM file of the authorities that sign the members' certificates. They are believed for Redis, too, where
    `index.redis_url` begins with rediss://, and for the receiver of traces with `telemetry.otlp_tls`."""
    tls_name: String = "baton"
    """DNS name that the certificate of every member bears: it stands for the addresses of members, which change."""
    name: String = ""
    """Name of this cluster, unique in its Ray cluster. Empty: `baton up` draws one; `baton run` needs one."""
    secret: String = ""
    """File with the cluster's secret, or with the keys that `baton keys` derived from it for this process; it is read
    again when it changes. Members of the cluster prove by it who they are. Each machine has it at the same path, which
    workers get from the controller. Empty: `baton up` draws a secret, except with `ray_address`; other processes take
    calls without proofs, and listen on loopback addresses only."""
    cache_dir: String = ""
    """Folder of converted models, of the native step, and of logs. Empty: the user's cache folder, `baton/`. Where
    another user of the machine owns a part of it, the user's own cache has that part instead."""
    routers: AtLeastOne = 1
    """Router processes that `baton up` runs behind one address. They share nothing but Redis."""
    ray_address: HostPort = ""
    """host:port of a Ray cluster to join. Each of its nodes takes as many workers as it has of the resource
    `baton_worker`; a node whose label `baton.dev/pool` names a pool takes only workers that start in that pool. This
    machine must be one of the nodes; the others must reach `index.redis_url` and have the model at the same path.
    Empty: `baton up` starts a Ray cluster of this machine alone."""
    ray_node_ip: String = ""
    """Address of the Ray node through which the controller joins Ray; it waits until the node is there. Empty: any node
    on the controller's machine, the head first."""
    state_file: String = ""
    """File in which the controller keeps the desired pool sizes, so that they survive it and win over `prefill` and
    `decode`; one file per cluster. Empty: the sizes last as long as `baton up`, and with `ray_address` a file in the
    cache folder records which workers to end if all of it is killed."""
    gpus_per_worker: Annotated[float, Field(ge=0, allow_inf_nan=False), NUMBER, Must.be("at least 0")] = 0.0
    """GPUs per worker. 0: one per rank (`engine.tensor_parallel`). Where the pools start with more workers of one rank
    than there are GPUs, each gets an equal part of one GPU: with 3 workers on 2 GPUs a half. Workers for which the
    nodes have no room are refused at the start; set the value where nodes are still to come."""
    drain_timeout_s: Wait = 30.0
    """Longest time in which a leaving worker transfers its work. Work that is left then is computed again."""
    start_timeout_s: Wait = 180.0
    """Longest start of the whole cluster, and later of each worker, counted from when a node has room for it."""
    stop_timeout_s: Wait = 20.0
    """Longest time in which each part may end before it is killed."""


@section("kubernetes")
class KubernetesConfig:
    """Where Kubernetes keeps the sizes of the pools: in ServingPools, which `kubectl scale`, autoscalers, the CLI and
    `Admin.ScalePool` all change. The chart fills it in.
    """

    namespace: String = ""
    """Namespace of the ServingPools. Empty: this is not Kubernetes."""
    prefill_pool: String = "prefill"
    """Name of the prefill pool's ServingPool."""
    decode_pool: String = "decode"
    """Name of the decode pool's ServingPool."""
    prefill_deployment: String = ""
    """Deployment whose pods are Ray nodes for prefill workers; the controller keeps as many as it needs. Empty:
    something else adds nodes for workers that wait, such as KubeRay's autoscaler."""
    decode_deployment: String = ""
    """Deployment whose pods are Ray nodes for decode workers; it may be the same one. Empty: as for
    `prefill_deployment`."""
    workers_per_pod: AtLeastOne = 1
    """Workers for which one pod of those Deployments has room."""
    in_place: Switch = False
    """Whether a worker that is to leave goes before the one in its place serves, as there is no room for both; the last
    one of a pool waits for the other pool. Otherwise a newer version's pod comes first, and a worker begins in it
    before another one leaves."""


@section("autoscale")
class AutoscaleConfig:
    """How the controller sizes the pools by itself. `baton autoscale --dry-run` shows what these settings would do."""

    enabled: Switch = False
    """Whether the controller sizes the pools by itself."""
    dry_run: Switch = False
    """Decide and log, but change nothing."""
    min_prefill: NotNegative = 1
    """Fewest workers of the prefill pool. Ignored in mode `aggregated`, which does not use that pool."""
    min_decode: AtLeastOne = 1
    """Fewest workers of the decode pool."""
    max_prefill: NotNegative = 0
    """Most workers of the prefill pool; 0: as many as `max_workers` allows."""
    max_decode: NotNegative = 0
    """Most workers of the decode pool; 0: as many as `max_workers` allows."""
    max_workers: NotNegative = 0
    """Most workers of both pools together. 0: as many as there are; they change roles, and their number stays."""
    window_s: Duration = 10.0
    """Time over which the load is measured before each decision, in seconds."""
    cool_down_s: Duration = 30.0
    """Time after a change, and after the controller's start, in which nothing is changed, in seconds. Measurements are
    smoothed over the same time."""
    scale_in_s: Duration = 300.0
    """Time for which the pools must have had a worker too many before one is stopped, in seconds."""
    target_utilisation: Share = 0.7
    """Target utilisation of a pool. Prefill: share of time spent on prompts. Decode: share of the sequences and KV that
    it can hold within its objectives. Above the target, workers are moved or started; if the pool would stay below 0.7
    of the target with one worker less, that worker is stopped."""
    goodput_target: Share = 0.95
    """Share of requests that must meet their objectives before a worker is stopped."""

    def __post_init__(self) -> None:
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

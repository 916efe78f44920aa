"""`baton doctor`: checks a laptop, a container or a whole cluster, and says how to fix each fault.

It changes nothing, and no network access takes longer than a few seconds.

    laptop                          the installation, this machine, and the cluster if one runs
    cluster                         only the cluster, through a router; most checks are possible inside the cluster
    router | controller | worker    the requirements of that container before it starts; only Redis must be running

`model_checks` checks only a model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from baton.addresses import address_of
from baton.cluster import Role
from baton.config import Config, without_password
from baton.errors import BatonError, ConfigError
from baton.tls import member_tls
from deploy.controller.state import load as load_state
from deploy.doctor import certificates, cluster, endpoints, machine, preflight, redis, start, transports
from deploy.doctor.checks import Check, guarded, judged, show
from deploy.doctor.model import checks as model_checks
from deploy.doctor.reach import Target, reachability
from deploy.operator.client import OPEN, Access

__all__ = ["Check", "DoctorPart", "diagnose", "model_checks", "not_configured", "show", "start"]


class DoctorPart(StrEnum):
    LAPTOP = "laptop"
    CLUSTER = "cluster"
    ROUTER = "router"
    CONTROLLER = "controller"
    WORKER = "worker"


def diagnose(
    config: Config,
    address: str,
    part: DoctorPart = DoctorPart.LAPTOP,
    access: Access = OPEN,
    environ: Mapping[str, str] = os.environ,
) -> list[Check]:
    """Run every check of the part, in order.

    Args:
        access: this client's credentials for the routers.
        address: of a router; ignored for a container that does not run yet.
    """
    if part is DoctorPart.LAPTOP:
        return _laptop(config, address, access, environ)
    if part is DoctorPart.CLUSTER:
        missing = Check("router", "fail", f"none answers at {address}", "give another address with --address")
        return cluster.diagnose(config, address, access, environ) or [missing]
    checks = [Check("configuration", "ok", "valid")]
    checks += certificates.files(config)
    checks += _configured_redis(config)
    checks += endpoints.checks(config, environ)
    if part is DoctorPart.ROUTER:
        checks += guarded("tenants", lambda: machine.tenants(config))
        checks += machine.cache_secret(config)
        checks += machine.announced(config)
        if config.router.own_model:
            checks += guarded("model", lambda: machine.model(config, is_needed=True, weights=False))
        checks += guarded("ports", lambda: machine.ports(config))
        checks += guarded("open files", lambda: machine.files(config))
    elif part is DoctorPart.CONTROLLER:
        checks += _named(config)
        checks += guarded("state file", lambda: _state(config))
        checks += guarded("kubernetes", lambda: _api_server(config, environ))
        checks += guarded("packages", lambda: machine.packages({"worker"}))
        checks += machine.shared_memory()
    else:
        checks += guarded("model", lambda: machine.model(config, is_needed=True))
        checks += guarded("packages", lambda: machine.packages({"worker"}))
        num_workers = config.kubernetes.workers_per_pod
        pools = [config.for_pool(pool) for pool in Role]  # this node may be of either pool: the smaller need counts
        ranks = min(pool.engine.tensor_parallel for pool in pools)
        needed = num_workers * ranks if ranks > 1 else 0
        checks += _of_engine(config, needed, environ)
        checks += guarded(
            "shared memory", lambda: machine.shared_memory(num_workers * min(map(machine.ranks_memory_mib, pools)))
        )
        checks += machine.memory(num_workers * min(map(machine.worker_memory_gib, pools)))
    return checks


def not_configured(error: ConfigError) -> list[Check]:
    """Return the failure of a configuration that cannot be read; nothing else can be checked then."""
    return [
        Check(
            "configuration",
            "fail",
            str(error),
            "baton/config describes every setting; correct the file or the variable",
        )
    ]


def _laptop(config: Config, address: str, access: Access, environ: Mapping[str, str]) -> list[Check]:
    running = cluster.diagnose(config, address, access, environ)
    checks: list[Check] = []
    checks += machine.python()
    checks += guarded("packages", lambda: machine.packages({"worker", "local"}))
    sizes = {Role.PREFILL: config.cluster.prefill, Role.DECODE: config.cluster.decode}
    checks += _of_engine(config, machine.num_gpus_needed(config, sizes), environ)
    if not config.index.redis_url:
        checks += guarded("embedded redis", machine.embedded_redis)
    checks += guarded("model", lambda: machine.model(config, is_needed=False))
    checks += start.checks(config, bool(running))
    checks += machine.disk(config)
    checks += guarded("shared memory", lambda: machine.shared_memory(_shared_mib(config, sizes)))
    if not running:
        if url := config.index.redis_url:
            checks += redis.server(url, _seen(config))
        checks += endpoints.checks(config, environ)
        checks.append(Check("cluster", "ok", f"none runs at {address}", ""))
    return checks + running


def _of_engine(config: Config, needed: int, environ: Mapping[str, str]) -> list[Check]:
    """Check what computes the model, and what carries data between its workers and ranks.

    Args:
        needed: see `machine.num_gpus_needed`.
    """
    if config.engine.runner == "vllm":  # whose ranks and torch are its own
        return guarded("vllm", lambda: preflight.vllm_checks(config, needed))
    checks = guarded("torch", lambda: machine.torch_build(config, needed))
    return checks + guarded("transports", lambda: transports.checks(config, environ))


def _shared_mib(config: Config, sizes: Mapping[Role, int]) -> float:
    """Return the shared memory of all ranks of pools of these sizes, in MiB."""
    return sum(sizes[pool] * machine.ranks_memory_mib(config.for_pool(pool)) for pool in Role)


def _configured_redis(config: Config) -> Iterator[Check]:
    url = config.index.redis_url
    if not url:
        yield Check("redis", "fail", "index.redis_url is empty", "set it (BATON_INDEX_REDIS_URL)")
        return
    shown, seen = without_password(url), _seen(config)
    if isinstance(seen, BatonError):
        yield Check(
            "redis",
            "fail",
            f"{shown}: {seen}",
            "check that it runs and that this container may reach it (NetworkPolicy)",
        )
        return
    yield Check("redis", "ok", shown)
    yield from redis.server(url, seen)


def _seen(config: Config) -> redis.Facts | BatonError:
    try:
        return redis.look(config.index.url, member_tls(config.cluster))
    except BatonError as error:
        return error


def _named(config: Config) -> Iterator[Check]:
    name = config.cluster.name
    yield judged("cluster name", bool(name), name or "cluster.name is empty", "set it to the same name at every start")


def _state(config: Config) -> Iterator[Check]:
    path = config.cluster.state_file
    if not path:
        yield Check("state file", "fail", "cluster.state_file is empty", "set it to a file on a persistent volume")
        return
    yield machine.writable("state folder", Path(path).parent, "cluster.state_file")
    state = load_state(Path(path))
    yield Check("state file", "ok", f"{path} has {dict(state.desired)}" if state else f"{path} does not exist yet")


def _api_server(config: Config, environ: Mapping[str, str]) -> Iterator[Check]:
    """Check that the Kubernetes API answers, if it holds the pools' sizes."""
    if config.kubernetes.namespace and (host := environ.get("KUBERNETES_SERVICE_HOST")):
        address = address_of(host, int(environ.get("KUBERNETES_SERVICE_PORT", "443")))
        yield from reachability([Target("Kubernetes API", address)], is_inside=True)

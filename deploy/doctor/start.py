"""What has to be right before a cluster starts on this machine: one list, cheapest first.

`baton up` goes through it before it starts anything, and ends at the first thing that is wrong; `baton doctor` shows
all of it. Nothing here imports torch or Ray, whose imports take longer than all of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from baton.config import Config, without_password
from baton.errors import ConfigError, StoreUnavailable
from baton.tls import member_tls
from baton.tokenizer_file import read_vocabulary
from deploy.controller.state import starting_sizes
from deploy.doctor import certificates, machine, preflight, redis
from deploy.doctor.checks import Check, guarded
from deploy.models import cache_dir
from kvstore.transfer.transport.faults import parse_faults
from router.request.moderation import load_judge

Precondition = Callable[[Config], Iterable[Check]]
"""A part of the list: raises BatonError or yields a failed check where something is wrong."""


def require(config: Config) -> None:
    """Goes through the list.

    Raises:
        BatonError: the first thing that is wrong, in one sentence that says how to fix it.
    """
    _require(config, (("packages", packages), ("ports", machine.ports), *LOOKS))


def require_model(config: Config) -> Config:
    """Goes through what depends on the model, which is in `model.path` by now.

    Returns:
        The configuration with the size of the KV pools, where it is known here.

    Raises:
        BatonError: the first thing that is wrong.
    """
    _require(config, MODEL_LOOKS)
    return preflight.with_kv_size(config)


def checks(config: Config, is_running: bool) -> list[Check]:
    """The list for people, all of it but the packages, which `machine.packages` has with their versions. What depends
    on the model is left out while the model is not here.

    Args:
        is_running: a cluster runs here, and so has the ports and its memory.
    """
    looks = list(LOOKS if is_running else (("ports", machine.ports), *LOOKS))
    if folder := machine.model_folder(config):
        config = replace(config, model=replace(config.model, path=str(folder)))
        looks += MODEL_LOOKS if is_running else (*MODEL_LOOKS, ("memory", memory))
    return [check for name, look in looks for check in guarded(name, partial(look, config))]


def _require(config: Config, looks: Iterable[tuple[str, Precondition]]) -> None:
    for _, look in looks:
        for check in look(config):
            if check.state == "fail":
                raise ConfigError(f"{check.name}: {check.found}" + (f"; {check.fix}" if check.fix else ""))


def packages(config: Config) -> Iterator[Check]:
    """The packages of extras without which a cluster cannot run here."""
    preflight.require_packages(config)
    yield from ()


def settings(config: Config) -> Iterator[Check]:
    """Settings that name something which is read or loaded later, by a process that could only say so in its log."""
    parse_faults(config.faults.spec)
    if config.router.moderation:
        load_judge(config.router.moderation)
    cluster = config.cluster
    if cluster.ray_address and not cluster.secret:
        raise ConfigError(
            "workers in a Ray cluster that runs already need the cluster's secret: set cluster.secret "
            "(BATON_CLUSTER_SECRET) to a file that each of its nodes has at the same path, readable by its owner "
            "alone; python -c 'import secrets; print(secrets.token_hex(32))' draws one"
        )
    starting_sizes(config)
    yield Check("settings", "ok", "all of them can be used here")


def folders(config: Config) -> Iterator[Check]:
    """Where the cluster writes."""
    yield machine.writable("cache folder", cache_dir(config.cluster), "BATON_CACHE to one that can be written")
    if path := config.cluster.state_file:
        yield machine.writable("state folder", Path(path).parent, "cluster.state_file")


def redis_answers(config: Config) -> Iterator[Check]:
    """The Redis that the settings name: the cluster could not start without it."""
    if not config.index.redis_url:
        return
    shown = without_password(config.index.redis_url)
    try:
        redis.look(config.index.url, member_tls(config.cluster))
    except StoreUnavailable as error:
        fix = "start it, or leave index.redis_url (BATON_INDEX_REDIS_URL) out: `baton up` then brings its own"
        yield Check("redis", "fail", f"{shown}: {error}", fix)
    else:
        yield Check("redis", "ok", f"answers at {shown}")


def ray(config: Config) -> Iterator[Check]:
    """The Ray cluster that is joined."""
    if config.cluster.ray_address:
        preflight.require_ray(config.cluster.ray_address)
        yield Check("ray", "ok", f"answers at {config.cluster.ray_address}")


def gpus(config: Config) -> Iterator[Check]:
    """The GPUs that the settings ask for, found without torch; where all is well, torch itself says more."""
    preflight.require_gpus(config)
    yield from ()


def model_files(config: Config) -> Iterator[Check]:
    """What the model's folder says of the settings, and whether its tokenizer can be read."""
    preflight.require_heads(config)
    preflight.require_runner(config)
    read_vocabulary(Path(config.model.path))
    yield from ()


def memory(config: Config) -> Iterator[Check]:
    """The memory of all workers together: weights, processes and KV pools."""
    sized = preflight.with_kv_size(config).engine.kv_cache_gib
    num_workers = config.cluster.prefill + config.cluster.decode
    found = f"each of {num_workers} workers finds its own" if sized == "auto" else f"{sized:.3g} GiB for each KV pool"
    yield Check("memory", "ok", found)


LOOKS: tuple[tuple[str, Precondition], ...] = (
    ("settings", settings),
    ("tenants", machine.tenants),
    ("certificates", certificates.files),
    ("folders", folders),
    ("open files", machine.files),
    ("gpu", gpus),
    ("redis", redis_answers),
    ("ray", ray),
)
MODEL_LOOKS: tuple[tuple[str, Precondition], ...] = (("model", model_files),)

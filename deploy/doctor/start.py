"""Preconditions of a cluster on this machine: one list, cheapest checks first.

`baton up` runs the list before it starts anything, and stops at the first failure; `baton doctor` shows all results.
Nothing here imports torch or Ray, because those imports take longer than the whole list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from baton.config import Config, without_password
from baton.errors import ConfigError, StoreUnavailable
from baton.tls import member_tls
from baton.tokenizer_file import read_vocabulary
from deploy.controller.state import starting_sizes
from deploy.doctor import certificates, machine, preflight, redis, vllm
from deploy.doctor.checks import Check, guarded
from deploy.models import cache_dir
from router.request.moderation import load_judge

Precondition = Callable[[Config], Iterable[Check]]
"""Part of the list: raises BatonError or yields a failed check if a precondition is not met."""


def require(configs: Sequence[Config]) -> None:
    """Run the list.

    Args:
        configs: configuration of each model that this machine serves. The first one also says what all models share.

    Raises:
        BatonError: the first failure, in one sentence that says how to fix it.
    """
    first, *others = configs
    _require(first, (("packages", packages), ("vllm", vllm_engine), ("ports", machine.ports), *LOOKS))
    for config in others:
        _require(config, (("settings", settings), ("folders", folders), ("vllm", vllm_engine)))
        preflight.require_gpus(config, [each for each in configs if each is not config])


def require_models(configs: Sequence[Config]) -> list[Config]:
    """Run the checks that depend on the models, which must be in their `model.path`.

    Returns:
        The configurations with the size of the KV pools, if it is known here. If there are several models, the memory
        and the GPUs are divided among the workers of all of them.

    Raises:
        BatonError: the first failure.
    """
    for config in configs:
        _require(config, MODEL_LOOKS)
    configs = preflight.with_gpu_shares(configs)
    return [preflight.with_kv_size(config, [each for each in configs if each is not config]) for config in configs]


def checks(config: Config, is_running: bool) -> list[Check]:
    """Run the list for display.

    It omits the packages and vLLM, which other checks show with their versions, and the checks that depend on the model
    if the model is not here.

    Args:
        is_running: a cluster runs here, so it already uses the ports and its memory.
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
    """Check the packages of extras that a cluster needs here."""
    preflight.require_packages(config)
    yield from ()


def settings(config: Config) -> Iterator[Check]:
    """Check settings that processes use only later, when an error would appear only in their logs."""
    if config.router.moderation:
        load_judge(config.router.moderation)
    cluster = config.cluster
    if cluster.ray_address and not cluster.secret:
        raise ConfigError(
            "workers in an existing Ray cluster need the cluster's secret: set cluster.secret "
            "(BATON_CLUSTER_SECRET) to a file that each of its nodes has at the same path, readable only by its "
            "owner; python -c 'import secrets; print(secrets.token_hex(32))' generates one"
        )
    starting_sizes(config)
    yield Check("settings", "ok", "all can be used here")


def folders(config: Config) -> Iterator[Check]:
    """Check that the cluster can write to its folders."""
    yield machine.writable("cache folder", cache_dir(config.cluster), "BATON_CACHE to one that can be written")
    if path := config.cluster.state_file:
        yield machine.writable("state folder", Path(path).parent, "cluster.state_file")


def redis_answers(config: Config) -> Iterator[Check]:
    """Check the configured Redis, without which the cluster cannot start."""
    if not config.index.redis_url:
        return
    shown = without_password(config.index.redis_url)
    try:
        redis.look(config.index.url, member_tls(config.cluster))
    except StoreUnavailable as error:
        fix = "start it, or unset index.redis_url (BATON_INDEX_REDIS_URL): `baton up` then starts Redis itself"
        yield Check("redis", "fail", f"{shown}: {error}", fix)
    else:
        yield Check("redis", "ok", f"answers at {shown}")


def ray(config: Config) -> Iterator[Check]:
    """Check the Ray cluster to join."""
    if config.cluster.ray_address:
        preflight.require_ray(config.cluster.ray_address)
        yield Check("ray", "ok", f"answers at {config.cluster.ray_address}")


def vllm_engine(config: Config) -> Iterator[Check]:
    """Check the vLLM of workers that run on this machine and use it. `preflight.vllm_checks` shows more."""
    if config.engine.runner == "vllm" and not config.cluster.ray_address:
        yield from vllm.checks(config)


def gpus(config: Config) -> Iterator[Check]:
    """Check the required GPUs without torch; if they are there, `torch_build` reports more."""
    preflight.require_gpus(config)
    yield from ()


def model_files(config: Config) -> Iterator[Check]:
    """Check that the settings suit the model's folder, and that its tokenizer can be read."""
    preflight.require_heads(config)
    preflight.require_runner(config)
    read_vocabulary(Path(config.model.path))
    yield from ()


def memory(config: Config) -> Iterator[Check]:
    """Check the memory of all workers together: weights, processes and KV pools."""
    sizes = preflight.kv_sizes_in_words(preflight.with_kv_size(config))
    num_workers = config.cluster.prefill + config.cluster.decode
    yield Check("memory", "ok", sizes or f"each of {num_workers} workers computes its own KV pool")


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

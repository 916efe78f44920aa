"""`baton up`: Redis, Ray, the controllers and the routers on this machine, in the foreground.

    this process ── owns ──> Redis (valkey-server)       prefix ownership, leases
                 ── owns ──> routers (python -m router)  gRPC and HTTP
                 ── owns ──> controllers, one per model  keep the workers, through actors of Ray
                 ── owns ──> Ray head ──> worker actors  order the workers' starts and ends
                 ── owns ──> node process ──> workers    engines

The routers have the first model's configuration. They serve the other models as soon as their controllers announce
them.

Each process is restarted when it dies. Workers outlive the controllers and Ray, but not the node process. At shutdown
the routers stop first, so that requests in flight can finish; then the workers, Ray and Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import secrets
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.blocks import content_id
from baton.cluster import Role, RouterInfo
from baton.config import Config, password_of, with_password, without_password
from baton.errors import ConfigError, StoreUnavailable
from baton.own_files import make_own
from baton.own_folder import own_folder
from baton.tasks import cancel_and_wait
from baton.tls import member_tls
from baton.trust import KeyFile, Principal
from deploy.controller.state import starting_sizes
from deploy.doctor import start
from deploy.doctor.preflight import kv_sizes_in_words
from deploy.embedded_redis import EmbeddedRedis
from deploy.local.child import Child
from deploy.local.child_log import log_folder, log_of
from deploy.local.keys import member_files
from deploy.local.models import apart, beside, file_name, require_distinct
from deploy.local.parts import with_model
from deploy.local.ray_cluster import RayCluster, rays_folder
from deploy.models import cache_dir, own_part
from kvstore.index import RedisConnection
from kvstore.leases import RedisEndpoint, RedisLeases

logger = logging.getLogger(__name__)
REDIS_CHECK_S = 0.5
SHOW_S = 5.0
"""Interval of the lines that show what the start waits for."""


OnReady = Callable[[Sequence[Config]], None]
"""Callback, called in a thread with the final settings of each model when every worker answers."""


async def up(configs: Sequence[Config], console: Console, on_ready: OnReady) -> None:
    """Run a whole cluster until SIGINT or SIGTERM.

    Args:
        configs: configuration of each model; the first one also says what all models share.
        console: shows the progress.

    Raises:
        ConfigError, ModelLoadError: a part cannot run as configured; parts that had started have stopped again.
    """
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    main = asyncio.create_task(_run(configs, console, on_ready))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((main, stopping), return_when=asyncio.FIRST_COMPLETED)
    await cancel_and_wait([stopping])
    if not main.done():
        console.print("stopping", style="dim")
        main.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await main


async def _run(configs: Sequence[Config], console: Console, on_ready: OnReady) -> None:
    configs = [_with_sizes(configs[0]), *configs[1:]]
    await asyncio.to_thread(start.require, configs)
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(own_folder())
        keys = member_files(configs[0].cluster.secret, folder)
        configs = await _resolved(configs, console)
        state_paths = _state_paths(configs, folder)
        configs = await asyncio.to_thread(_sized, configs, console)
        configs = _with_redis(configs, folder, stack, console)
        config = configs[0]
        what = "the router" if config.cluster.routers == 1 else f"{config.cluster.routers} routers"
        console.print(f"==> Starting {what} on {config.cluster.host}:{config.cluster.grpc_port}", style="dim")
        logs = log_folder(config.cluster)
        rays = None if config.cluster.ray_address else stack.enter_context(rays_folder(logs))
        routers = [_router(config, number, keys.files, logs) for number in range(config.cluster.routers)]
        ray = RayCluster(configs, state_paths, keys.files, logs, rays)
        stack.push_async_callback(ray.stop)
        # Callbacks run in reverse order, so the routers stop first: they give requests in flight a moment to finish.
        stack.push_async_callback(_stop_all, routers, config.cluster.stop_timeout_s)
        for router in routers:
            await router.start()
        console.print(f"==> Starting Ray and the workers; logs in {logs}", style="dim", soft_wrap=True)
        own = KeyFile(keys.files[Principal.OPERATOR], Principal.OPERATOR)
        ends = (_unexpected_end(router) for router in routers)
        try:
            await _first_of(_started(ray, configs, own), _show_waiting(ray, console), *ends)
        except TimeoutError:
            raise _not_ready(configs) from None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ray.keep())
            tasks.create_task(keys.keep())
            for router in routers:
                tasks.create_task(router.keep())
            await asyncio.to_thread(on_ready, configs)


def _state_paths(configs: Sequence[Config], folder: Path) -> list[Path]:
    """Return the path of the state file of each model's controller."""
    first = _state_path(configs[0], folder)
    others = configs[1:]
    return [first, *(Path(each.cluster.state_file or beside(first, file_name(each.release))) for each in others)]


def _state_path(config: Config, folder: Path) -> Path:
    """Return the path of the state file of the first model's controller.

    It is `cluster.state_file` if that is set. In an existing Ray cluster, whose workers may outlive this process, it is
    a file in the cache; otherwise a file in `folder`.
    """
    cluster = config.cluster
    if cluster.state_file:
        return Path(cluster.state_file)
    if cluster.ray_address:
        name = re.sub(r"[^\w.-]+", "-", cluster.ray_address)
        states = own_part(cache_dir(cluster), "clusters")
        make_own(states)
        return states / f"{name}.json"
    return folder / "state.json"


def _with_sizes(config: Config) -> Config:
    """Return the configuration with the initial pool sizes: those in `cluster.state_file`, if it has any.

    Raises:
        ConfigError: pools of these sizes cannot serve.
    """
    cluster, (desired, is_remembered) = config.cluster, starting_sizes(config)
    if is_remembered and (desired[Role.PREFILL], desired[Role.DECODE]) != (cluster.prefill, cluster.decode):
        logger.warning(
            "%s sets %d prefill and %d decode workers, which overrides --prefill %d --decode %d",
            cluster.state_file,
            desired[Role.PREFILL],
            desired[Role.DECODE],
            cluster.prefill,
            cluster.decode,
        )
    cluster = dataclasses.replace(cluster, prefill=desired[Role.PREFILL], decode=desired[Role.DECODE])
    return dataclasses.replace(config, cluster=cluster)


def _router(config: Config, number: int, keys: Mapping[Principal, Path], logs: Path | None = None) -> Child:
    """Return the process of one router. Several routers share the ports."""
    config = dataclasses.replace(
        config, cluster=dataclasses.replace(config.cluster, secret=str(keys[Principal.ROUTER]))
    )
    if config.cluster.routers > 1:
        config = dataclasses.replace(config, router=dataclasses.replace(config.router, id=f"router-{number}"))
    environment = {"BATON_CONFIG_JSON": config.to_json()}
    return Child(f"the router {config.router.id}", "router", (), environment, log=log_of(logs, config.router.id))


async def _stop_all(routers: list[Child], timeout_s: float) -> None:
    await asyncio.gather(*(router.stop(timeout_s) for router in routers))


async def _unexpected_end(child: Child) -> None:
    """Wait until the process ends, then raise ConfigError with its status and last log line."""
    raise ConfigError(await child.last_words())


async def _first_of(*works: Coroutine[Any, Any, None]) -> None:
    """Wait until one coroutine has ended, cancel the others, and raise its error if it failed."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel_and_wait(tasks)


async def _resolved(configs: Sequence[Config], console: Console) -> list[Config]:
    """Return the configurations with each model's folder, name, revision, Ray namespace and state file.

    `router.cache_secret` and `cluster.name` are set, and with several models `router.default_model`, too.

    Raises:
        ConfigError: two models cannot be served together.
        ModelLoadError: a model cannot be obtained.
    """
    found = [await asyncio.to_thread(with_model, config, console) for config in configs]
    require_distinct(found)
    first = found[0]
    router = dataclasses.replace(first.router, cache_secret=first.router.cache_secret or secrets.token_hex(32))
    if len(found) > 1:
        router = dataclasses.replace(router, default_model=router.default_model or first.model.served_name)
    cluster = dataclasses.replace(first.cluster, name=first.cluster.name or f"baton-{secrets.token_hex(4)}")
    first, *others = apart([dataclasses.replace(first, router=router, cluster=cluster), *found[1:]])
    return [first, *map(_with_sizes, others)]


def _sized(configs: Sequence[Config], console: Console) -> list[Config]:
    """Return the configurations with the size of the KV pools, if this process can determine it."""
    found = start.require_models(configs)
    for before, sized in zip(configs, found, strict=True):
        if sized != before and (sizes := kv_sizes_in_words(sized)):
            whose = f" of {sized.model.served_name}" if len(found) > 1 else ""
            console.print(f"==> {sizes}{whose}", style="dim")
    return found


def _with_redis(
    configs: Sequence[Config], folder: Path, stack: contextlib.AsyncExitStack, console: Console
) -> list[Config]:
    """Return the configurations with the URL of a running Redis: the configured one, or an embedded one."""
    index = _running_redis(configs[0], folder, stack, console).index
    return [dataclasses.replace(config, index=index) for config in configs]


def _running_redis(config: Config, folder: Path, stack: contextlib.AsyncExitStack, console: Console) -> Config:
    """Return the configuration with the URL of a running Redis, and start an embedded one if none is configured."""
    if config.index.redis_url:
        return config if config.cluster.ray_address else with_password_file(config, folder)
    redis = EmbeddedRedis(socket_path=folder / "redis.sock", parent=folder)
    redis.start()
    stack.callback(redis.stop)
    keeping = asyncio.create_task(_keep_redis(redis))
    stack.callback(keeping.cancel)
    console.print(f"==> Redis at {redis.url}", style="dim", soft_wrap=True)
    return dataclasses.replace(config, index=dataclasses.replace(config.index, redis_url=redis.url))


def with_password_file(config: Config, folder: Path) -> Config:
    """Return the configuration with a password of the Redis URL moved to a file, which our own processes read."""
    password = password_of(config.index.redis_url)
    if password is None or config.index.redis_password_file:
        return config
    path = folder / "redis-password"
    path.touch(mode=0o600)
    path.write_text(password)
    index = dataclasses.replace(
        config.index, redis_url=with_password(config.index.redis_url, ""), redis_password_file=str(path)
    )
    return dataclasses.replace(config, index=index)


async def _keep_redis(redis: EmbeddedRedis) -> None:
    """Restart Redis whenever it dies, empty and at the same address. Members then publish their data again."""
    while True:
        await asyncio.sleep(REDIS_CHECK_S)
        if not redis.is_running:
            logger.warning("the embedded Redis has died; starting it again")
            try:
                redis.stop()
                redis.start()  # from this thread: Redis dies with the thread that started it
            except ConfigError as error:
                logger.error("%s", error)


def _not_ready(configs: Sequence[Config]) -> ConfigError:
    redis_url = configs[0].index.redis_url
    prefill, decode = (sum(getattr(each.cluster, pool) for each in configs) for pool in ("prefill", "decode"))
    return ConfigError(
        f"the cluster was not ready within {_timeout_s(configs):g} s (cluster.start_timeout_s); the "
        f"workers' lines above say why; is Redis at {without_password(redis_url)} reachable, and has Ray "
        f"room for {prefill} prefill and {decode} decode workers?"
    )


def _timeout_s(configs: Sequence[Config]) -> float:
    """Return the timeout for the start of all models, whose workers take turns on this machine."""
    return sum(config.cluster.whole_start_timeout_s for config in configs)


async def _started(ray: RayCluster, configs: Sequence[Config], keys: KeyFile) -> None:
    """Wait until every worker runs and all routers know them.

    Args:
        ray: Ray and the controllers, not started yet.
        configs: configuration of each model.
        keys: keys that verify the members' values in Redis.

    Raises:
        TimeoutError: the start took longer than `_timeout_s`.
    """
    first = configs[0]
    async with asyncio.timeout(_timeout_s(configs)), contextlib.AsyncExitStack() as stack:
        await ray.start()
        redis = RedisConnection(first.index.url, tls=member_tls(first.cluster))
        endpoint = RedisEndpoint(redis, first.cluster.endpoint, lease_s=first.index.lease_s, keys=keys)
        stack.push_async_callback(endpoint.close)
        leases = [RedisLeases(redis, content_id(config.kv_identity), keys=keys) for config in configs]
        while True:
            with contextlib.suppress(StoreUnavailable):
                routers = await endpoint.list_routers()
                if all(
                    [is_whole(routers, await each.get_desired(), of) for each, of in zip(leases, configs, strict=True)]
                ):
                    return
            await asyncio.sleep(0.1)


async def _show_waiting(ray: RayCluster, console: Console) -> None:
    """Show every few seconds how long the start has taken, and what it waits for, until cancelled."""
    began_s = time.monotonic()
    while True:
        await asyncio.sleep(SHOW_S)
        console.print(f"    {time.monotonic() - began_s:.0f} s: waiting for {ray.awaited}", style="dim")


def is_whole(routers: Collection[RouterInfo], desired: Mapping[str, int], config: Config) -> bool:
    """Return True if all routers of the cluster serve the model, and know the expected number of its ready workers.

    Args:
        routers: routers that Redis knows.
        desired: current desired sizes of the model's pools. Operators may have lowered them since the start, and a
            model that sleeps has none.
        config: settings of the model, with the initial pool sizes and the number of routers.
    """
    cluster, own = config.cluster, content_id(config.kv_identity)
    expected = min(cluster.prefill + cluster.decode, sum(desired.values()))
    if not desired or (expected == 0 and not config.autoscale.may_sleep):
        return False
    known = [model.ready_workers for router in routers for model in router.models if model.content_id == own]
    return sum(number >= expected for number in known) >= cluster.routers

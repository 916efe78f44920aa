"""`baton up`: Redis, Ray, the pools and the router on this machine, in the foreground.

    this process ── owns ──> Redis (valkey-server)      prefix ownership, leases
                 ── owns ──> router (python -m router)  gRPC and HTTP
                 ── owns ──> Ray ──> worker actors      engines

The router ends first, so that requests in flight can finish; then the workers, Ray and Redis, whatever ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from rich.console import Console

from baton.config import Config
from baton.errors import BatonError, ConfigError
from baton.rpc import channel
from baton.v1 import admin_pb2, admin_pb2_grpc
from deploy.models import ProgressDisplay, cache_dir, resolve
from deploy.processes import die_with_parent, why_taken
from deploy.redis import EmbeddedRedis
from kvstore.transfer.faults import parse_faults
from router.tenants import TenantBook

if TYPE_CHECKING:
    from deploy.pools import Pools

logger = logging.getLogger(__name__)
WORKER_HOST = "127.0.0.1"
REDIS_CHECK_S = 0.5
ROUTER_RESTART_S = 0.5
MAX_ROUTER_RESTART_S = 30.0
STABLE_S = 30.0
"""A router that ran for so long did not fail to start."""


class RouterProcess:
    """The router, as a child process."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._process = self._spawn()

    async def ended(self) -> None:
        """Raises ConfigError once the process has ended; what it said is on standard error."""
        code = await asyncio.to_thread(self._process.wait)
        raise ConfigError(f"the router ended with status {code}")

    async def keep(self) -> None:
        """Starts it again whenever it ends, ever later while it keeps failing, until cancelled."""
        num_failures = 0
        while True:
            began_s = time.monotonic()
            try:
                await self.ended()
            except ConfigError as error:
                num_failures = 0 if time.monotonic() - began_s > STABLE_S else num_failures + 1
                wait_s = min(ROUTER_RESTART_S * 2**num_failures, MAX_ROUTER_RESTART_S)
                logger.warning("%s; starting it again in %g s", error, wait_s)
                await asyncio.sleep(wait_s)
            self._process = self._spawn()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL when it takes too long."""
        self._process.terminate()
        try:
            self._process.wait(self._config.cluster.stop_timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "BATON_CONFIG_JSON": self._config.to_json()}
        return subprocess.Popen(
            [sys.executable, "-m", "router"], env=environment, preexec_fn=die_with_parent(), start_new_session=True
        )


async def up(config: Config, console: Console, on_ready: Callable[[Config], object]) -> None:
    """Runs a whole cluster until SIGINT or SIGTERM.

    Args:
        on_ready: called in a thread once every worker answers.

    Raises:
        ConfigError, ModelLoadError: something cannot run as configured; what had started has ended again.
    """
    parse_faults(config.faults.spec)  # here, not after a minute in every worker
    TenantBook.configured(config.router.tenants_file)  # here, not in the router's log
    stop = asyncio.Event()
    _set_on_signals(stop)
    main = asyncio.create_task(_run(config, console, on_ready, stop))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((main, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not main.done():
        console.print("stopping", style="dim")
        main.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await main


async def _run(config: Config, console: Console, on_ready: Callable[[Config], object], stop: asyncio.Event) -> None:
    # Ray is imported here: it takes seconds, and the other commands do not need it.
    from deploy.pools import LocalRay, Pools, check_sizes

    check_sizes(config)
    for name, port in (("BATON_GRPC_PORT", config.cluster.grpc_port), ("BATON_HTTP_PORT", config.cluster.http_port)):
        if reason := why_taken(config.cluster.host, port):
            raise ConfigError(f"cannot listen on {config.cluster.host}:{port} ({reason}); set {name} to another port")
    async with contextlib.AsyncExitStack() as stack:
        config = await _resolved(config, console)
        config = _with_redis(config, stack, console)
        console.print(f"==> Starting the router on {config.cluster.host}:{config.cluster.grpc_port}", style="dim")
        router = RouterProcess(config)
        stack.callback(router.stop)
        console.print("==> Starting Ray and the workers", style="dim")
        await _in_thread_context(stack, LocalRay())
        _set_on_signals(stop)  # again: Ray has put its own handlers in place
        pools = Pools(config, WORKER_HOST)
        stack.push_async_callback(pools.stop)
        # Once workers run, the router ends first: it gives the requests in flight a moment to finish.
        stack.push_async_callback(asyncio.to_thread, router.stop)
        router_ended = asyncio.create_task(router.ended())
        stack.callback(router_ended.cancel)
        started = asyncio.create_task(_started(pools, config))
        stack.callback(started.cancel)
        await asyncio.wait((started, router_ended), return_when=asyncio.FIRST_COMPLETED)
        try:
            await (router_ended if router_ended.done() else started)
        except TimeoutError:
            raise ConfigError(
                f"the cluster was not ready within {config.cluster.start_timeout_s:g} s (cluster.start_timeout_s); the "
                f"workers' lines above say why; is Redis at {config.index.redis_url} reachable?"
            ) from None
        router_ended.cancel()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(pools.run())
            tasks.create_task(router.keep())
            await asyncio.to_thread(on_ready, config)


def _set_on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


async def _resolved(config: Config, console: Console) -> Config:
    """The configuration with the model's folder, name and revision."""
    with ProgressDisplay(console) as progress:
        model = await asyncio.to_thread(resolve, config.model, cache_dir(config.cluster), progress.update)
    console.print(f"==> Model {model.served_name} in {model.path}", style="dim", soft_wrap=True)
    resolved = dataclasses.replace(
        config.model, path=str(model.path), served_name=model.served_name, revision=model.revision
    )
    router = config.router
    if not router.cache_secret:
        router = dataclasses.replace(router, cache_secret=secrets.token_hex(32))
    return dataclasses.replace(config, model=resolved, router=router)


def _with_redis(config: Config, stack: contextlib.AsyncExitStack, console: Console) -> Config:
    """The configuration with a Redis that runs: the one it names, or an embedded one."""
    if config.index.redis_url:
        return config
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-")))
    redis = EmbeddedRedis(socket_path=folder / "redis.sock", parent=folder)
    redis.start()
    stack.callback(redis.stop)
    keeping = asyncio.create_task(_keep_redis(redis))
    stack.callback(keeping.cancel)
    console.print(f"==> Redis at {redis.url}", style="dim", soft_wrap=True)
    return dataclasses.replace(config, index=dataclasses.replace(config.index, redis_url=redis.url))


async def _keep_redis(redis: EmbeddedRedis) -> None:
    """Brings it back, empty, at the same address; workers and routers then tell it again what they know."""
    while True:
        await asyncio.sleep(REDIS_CHECK_S)
        if not redis.is_running:
            logger.warning("the embedded Redis has died; starting it again")
            try:
                redis.stop()
                redis.start()  # from this thread: it lives as long as the thread that started it
            except ConfigError as error:
                logger.error("%s", error)


async def _in_thread_context(
    stack: contextlib.AsyncExitStack, manager: contextlib.AbstractContextManager[object]
) -> None:
    """Enters and leaves a blocking context manager off the event loop."""
    await asyncio.to_thread(manager.__enter__)
    stack.push_async_callback(asyncio.to_thread, manager.__exit__, None, None, None)


async def _started(pools: Pools, config: Config) -> None:
    """Until every worker runs and the router knows them all."""
    try:
        await pools.start()
    except* BatonError as errors:
        raise errors.exceptions[0] from None
    expected = config.cluster.prefill + config.cluster.decode
    address = f"{config.cluster.host}:{config.cluster.grpc_port}"
    async with asyncio.timeout(config.cluster.start_timeout_s), channel(address) as router:
        stub = admin_pb2_grpc.AdminStub(router)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                status = await stub.GetStatus(admin_pb2.GetStatusRequest(), wait_for_ready=True)
                if sum(worker.state == "ready" for worker in status.workers) >= expected:
                    return
            await asyncio.sleep(0.1)

"""Ray, the node process and the controller under `baton up`, which starts, restarts and stops them.

The workers are children of the node process, so that they serve on when Ray fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import signal
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path

from baton.config import Config
from baton.errors import ConfigError
from baton.own_folder import own_folder
from baton.tasks import cancel_and_wait
from baton.trust import Principal
from deploy.local.child import Child
from deploy.local.child_log import log_of
from deploy.processes import UNJOINED
from deploy.ray_pools.node import SOCKET, end_in_words

logger = logging.getLogger(__name__)
MOST_CHARACTERS = 24
"""Maximum length of the path above Ray's folder: a socket path may have 107 characters, of which Ray uses about 70."""
RAY = "ray"
LOOPBACK = "127.0.0.1"
"""Address of workers if all of them are on this machine."""


@contextlib.contextmanager
def rays_folder(logs: Path) -> Generator[Path]:
    """Context manager: yields a folder for Ray's sockets and logs.

    The folder stays until the next start, because it has the last log lines of workers.

    Args:
        logs: folder that gets a symbolic link `ray` to Ray's logs.
    """
    temporary = Path(tempfile.gettempdir())
    is_short = len(str(temporary)) <= MOST_CHARACTERS
    with own_folder(temporary if is_short else Path("/tmp"), stays=True) as folder:
        (logs / "ray").symlink_to(folder / RAY / "session_latest" / "logs")
        yield folder / RAY


class RayCluster:
    """Ray head and node process, unless an existing Ray cluster is joined, and the controller of the workers.

    Args:
        config: configuration of the cluster.
        state_path: the controller's state file.
        keys: key files of the members on this machine. Workers elsewhere have theirs at `cluster.secret`.
        logs: folder for the output of the processes; None: they write to our own output.
        rays: folder for Ray's sockets and logs; None: Ray's default. Ray makes them readable for all users, so its
            parent folder must be closed to other users.
    """

    def __init__(
        self,
        config: Config,
        state_path: Path,
        keys: Mapping[Principal, Path],
        logs: Path | None = None,
        rays: Path | None = None,
    ) -> None:
        self._config = config
        self._keys = keys
        self._joins = bool(config.cluster.ray_address)
        self._environment: dict[str, str] = {}
        node = (rays or state_path).parent / "node"
        if not self._joins:
            self._environment = {
                SOCKET: str(node / "socket"),
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps it on loopback
                "RAY_AUTH_MODE": "token",  # otherwise other users of this machine could run code in it
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_worker_niceness": "0",  # by default 15, with which any other process would get the CPU first
                "RAY_memory_monitor_refresh_ms": "0",  # otherwise it kills workers when other programs fill the memory
            }
        self._name = config.cluster.name or f"baton-{secrets.token_hex(4)}"
        self._arguments = ("--cluster", self._name, "--state-file", str(state_path))
        self.awaited = "Ray"
        """Name of what the start waits for, to be shown."""
        self._controllers_log = log_of(logs, "controller")
        workers = ("--workers", str(config.cluster.prefill + config.cluster.decode))
        place = ("--folder", str(rays)) if rays else ()
        self._head = Child(
            "Ray", "deploy.ray_pools.head", (*workers, *place), self._environment, log=log_of(logs, "ray")
        )
        log_format = ("--log-format", config.telemetry.log_format)
        self._node = Child(
            *("the node process", "deploy.ray_pools.node", ("--folder", str(node), *log_format), {}),
            log=log_of(logs, "workers"),
        )
        self._controller = self._controllers_child()
        self._was_started = False
        """True once workers were started; the controller may have ended since."""

    async def start(self) -> None:
        """Start Ray and the controller, and return when every worker is ready.

        Raises:
            ConfigError, ModelLoadError, WorkerFailed: a part cannot run as configured.
        """
        started = asyncio.create_task(self._controller.start_and_listen())  # it imports while Ray starts
        try:
            if not self._joins:
                await self._node.start_and_listen()
                self._controller.tell((await self._head.start_and_listen())["address"])
            self.awaited = "the workers, which load the model"
            await started
        finally:
            await cancel_and_wait([started])
        self.awaited = "the routers, which must discover the workers"
        self._was_started = True

    async def keep(self) -> None:
        """Restart Ray, the node process or the controller when one of them dies, until cancelled.

        If Ray or the controller dies, workers serve on, and the next controller adopts them. If the node process dies,
        its workers end with it, and the controller starts them again.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_ray(), name="ray")
            if not self._joins:
                tasks.create_task(self._node.keep(), name="node process")

    async def _keep_ray(self) -> None:
        while True:
            controller = asyncio.create_task(self._controller.ended())
            head = None if self._joins else asyncio.create_task(self._head.ended())
            try:
                await asyncio.wait([controller, head] if head else [controller], return_when=asyncio.FIRST_COMPLETED)
                if head is not None and head.done():
                    await self._restart_head(head.result())
                else:
                    await self._controller.pause(f"ended with status {controller.result()}")
                await self._controller.start()
            finally:
                await cancel_and_wait([controller] if head is None else [controller, head])

    async def stop(self) -> None:
        """Stop the workers and the controller; unless an existing cluster was joined, also Ray and the node process."""
        timeout_s = self._config.cluster.stop_timeout_s
        await self._controller.stop(timeout_s, signal.SIGINT)
        status = self._controller.status
        if self._joins and status not in (None, 0) and (self._was_started or status != UNJOINED):
            await self._end_workers(timeout_s)
        await self._head.stop(timeout_s)
        self._head.kill_rest()
        await self._node.stop(timeout_s)

    async def _end_workers(self, timeout_s: float) -> None:
        """Stop the workers after the controller has ended without stopping them."""
        await self._controller.start("--end")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._controller.ended(), timeout_s)
        await self._controller.stop(timeout_s)
        if self._controller.status:
            logger.error(
                "workers may still run in the Ray cluster at %s, in its namespace %s: they could not be stopped",
                self._config.cluster.ray_address,
                self._name,
            )

    async def _restart_head(self, status: int) -> None:
        reason = f"{end_in_words(status) or 'ended'} (its log says why); the workers serve on"
        timeout_s = self._config.cluster.start_timeout_s
        while True:
            await self._controller.stop(1, signal.SIGKILL)  # it would wait for the Ray head that has ended
            self._head.kill_rest()
            await self._head.pause(reason)
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await self._head.start_and_listen()
            except TimeoutError:
                reason = f"has not started within {timeout_s:g} s"
                await self._head.stop(1, signal.SIGKILL)
            except ConfigError as error:
                reason = f"does not start ({error})"
            else:
                self._controller.tell(answer["address"])
                return

    def _controllers_child(self) -> Child:
        cluster = self._config.cluster
        # In an existing Ray cluster, the controller shows what its actors write, and with them the workers of nodes
        # without a node process. There, workers outlive this process unless the controller stops them.
        arguments: tuple[str, ...] = ("--shows-logs",)
        if not self._joins:
            cluster = dataclasses.replace(cluster, secret=str(self._keys[Principal.CONTROLLER]))
            worker_keys = str(self._keys[Principal.WORKER])
            arguments = ("--awaits-address", "--worker-host", LOOPBACK, "--worker-keys", worker_keys)
        config = dataclasses.replace(self._config.for_controller(), cluster=cluster)
        return Child(
            "the controller",
            "deploy.controller",
            (*self._arguments, *arguments),
            {**self._environment, "BATON_CONFIG_JSON": config.to_json()},
            on_orphaned=signal.SIGINT if self._joins else signal.SIGKILL,
            awaits_line=not self._joins,
            log=self._controllers_log,
        )

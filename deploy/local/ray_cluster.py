"""Ray, the node process and the models' controllers under `baton up`, which starts, restarts and stops them.

The models share Ray and the node process. The workers are children of the node process, so that they serve on when Ray
fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from baton.config import Config
from baton.errors import ConfigError
from baton.own_folder import own_folder
from baton.tasks import cancel_and_wait
from baton.trust import Principal
from deploy.local.child import Child
from deploy.local.child_log import log_of
from deploy.local.controller_child import ControllerChild
from deploy.local.models import file_name
from deploy.ray_pools.node import SOCKET, end_in_words

MOST_CHARACTERS = 24
"""Maximum length of the path above Ray's folder: a socket path may have 107 characters, of which Ray uses about 70."""
RAY = "ray"


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
    """Ray head and node process, unless an existing Ray cluster is joined, and the controller of each model's workers.

    Args:
        configs: configuration of each model; the first one also says what all models share. Each has a Ray namespace of
            its own (`cluster.name`).
        state_paths: the state file of each model's controller.
        keys: key files of the members on this machine. Workers elsewhere have theirs at `cluster.secret`.
        logs: folder for the output of the processes; None: they write to our own output.
        rays: folder for Ray's sockets and logs; None: Ray's default. Ray makes them readable for all users, so its
            parent folder must be closed to other users.
    """

    def __init__(
        self,
        configs: Sequence[Config],
        state_paths: Sequence[Path],
        keys: Mapping[Principal, Path],
        logs: Path | None = None,
        rays: Path | None = None,
    ) -> None:
        first = configs[0]
        self._cluster = first.cluster
        self._joins = bool(first.cluster.ray_address)
        self._environment: dict[str, str] = {}
        node = (rays or state_paths[0]).parent / "node"
        if not self._joins:
            self._environment = {
                SOCKET: str(node / "socket"),
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps it on loopback
                "RAY_AUTH_MODE": "token",  # otherwise other users of this machine could run code in it
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
                "RAY_worker_niceness": "0",  # by default 15, with which any other process would get the CPU first
                "RAY_memory_monitor_refresh_ms": "0",  # otherwise it kills workers when other programs fill the memory
            }
        self.awaited = "Ray"
        """Name of what the start waits for, to be shown."""
        num_workers = sum(config.cluster.prefill + config.cluster.decode for config in configs)
        place = ("--folder", str(rays)) if rays else ()
        self._head = Child(
            *("Ray", "deploy.ray_pools.head", ("--workers", str(num_workers), *place), self._environment),
            log=log_of(logs, "ray"),
        )
        options = ["--log-format", first.telemetry.log_format, *(["--names-releases"] if len(configs) > 1 else [])]
        self._node = Child(
            *("the node process", "deploy.ray_pools.node", ("--folder", str(node), *options), {}),
            log=log_of(logs, "workers"),
        )
        self._controllers = [
            ControllerChild(
                config,
                path,
                keys,
                environment=self._environment,
                label=file_name(config.release) if len(configs) > 1 else "",
                logs=logs,
            )
            for config, path in zip(configs, state_paths, strict=True)
        ]

    async def start(self) -> None:
        """Start Ray and the controllers, and return when every worker is ready.

        Raises:
            ConfigError, ModelLoadError, WorkerFailed: a part cannot run as configured.
        """
        # The controllers import while Ray starts.
        starting = [asyncio.create_task(each.start_first()) for each in self._controllers]
        try:
            if not self._joins:
                await self._node.start_and_listen()
                self._tell((await self._head.start_and_listen())["address"])
            self.awaited = f"the workers, which load the model{'s' if len(starting) > 1 else ''}"
            await asyncio.gather(*starting)
        finally:
            await cancel_and_wait(starting)
        self.awaited = "the routers, which must discover the workers"

    async def keep(self) -> None:
        """Restart Ray, the node process or a controller when one of them dies, until cancelled.

        If Ray or a controller dies, workers serve on, and the next controller adopts them. If the node process dies,
        its workers end with it, and the controllers start them again.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_ray(), name="ray")
            if not self._joins:
                tasks.create_task(self._node.keep(), name="node process")

    async def _keep_ray(self) -> None:
        while True:
            keeping = [asyncio.create_task(each.keep()) for each in self._controllers]
            head = [] if self._joins else [asyncio.create_task(self._head.ended())]
            try:
                done, _ = await asyncio.wait([*keeping, *head], return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_and_wait([*keeping, *head])
            for task in done.intersection(keeping):
                task.result()  # it ends only with an error
            await self._restart_head(head[0].result())
            for each in self._controllers:
                await each.start()

    async def stop(self) -> None:
        """Stop the workers and the controllers; unless a Ray cluster was joined, also Ray and the node process."""
        await asyncio.gather(*(each.stop() for each in self._controllers))
        timeout_s = self._cluster.stop_timeout_s
        await self._head.stop(timeout_s)
        self._head.kill_rest()
        await self._node.stop(timeout_s)

    async def _restart_head(self, status: int) -> None:
        reason = f"{end_in_words(status) or 'ended'} (its log says why); the workers serve on"
        timeout_s = self._cluster.start_timeout_s
        while True:
            # The controllers would wait for the Ray head that has ended.
            await asyncio.gather(*(each.kill() for each in self._controllers))
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
                self._tell(answer["address"])
                return

    def _tell(self, address: str) -> None:
        for each in self._controllers:
            each.tell(address)

"""The controller of one model under `baton up`, as a child process that is restarted when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
from collections.abc import Mapping
from pathlib import Path

from baton.config import Config
from baton.trust import Principal
from deploy.local.child import Child
from deploy.local.child_log import log_of
from deploy.processes import UNJOINED

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
"""Address of workers if all of them are on this machine."""


class ControllerChild:
    """Process of the controller of one model. `stop` also ends its workers.

    Args:
        config: configuration of the model, with the Ray namespace of its workers (`cluster.name`).
        state_path: the controller's state file.
        keys: key files of the members on this machine. Workers elsewhere have theirs at `cluster.secret`.
        environment: variables for Ray if `baton up` has started it; empty: the process joins an existing Ray cluster.
        label: name of the model in messages and in the name of the log; empty: it is the only model.
        logs: folder for its output; None: it writes to our own output.
    """

    def __init__(
        self,
        config: Config,
        state_path: Path,
        keys: Mapping[Principal, Path],
        *,
        environment: Mapping[str, str],
        label: str = "",
        logs: Path | None = None,
    ) -> None:
        cluster = config.cluster
        self._cluster = cluster
        self._joins = bool(cluster.ray_address)
        # In an existing Ray cluster, the controller shows what its actors write, and with them the workers of nodes
        # without a node process. There, workers outlive this process unless the controller stops them.
        arguments: tuple[str, ...] = ("--shows-logs",)
        if not self._joins:
            cluster = dataclasses.replace(cluster, secret=str(keys[Principal.CONTROLLER]))
            worker_keys = str(keys[Principal.WORKER])
            arguments = ("--awaits-address", "--worker-host", LOOPBACK, "--worker-keys", worker_keys)
        own = dataclasses.replace(config.for_controller(), cluster=cluster)
        self._child = Child(
            f"the controller of {label}" if label else "the controller",
            "deploy.controller",
            ("--cluster", cluster.name, "--state-file", str(state_path), *arguments),
            {**environment, "BATON_CONFIG_JSON": own.to_json()},
            on_orphaned=signal.SIGINT if self._joins else signal.SIGKILL,
            awaits_line=not self._joins,
            log=log_of(logs, f"controller-{label}" if label else "controller", label),
        )
        self._was_started = False
        """True once its workers were started; the process may have ended since."""

    async def start_first(self) -> None:
        """Start the process, and return when every worker is ready.

        Raises:
            ConfigError, ModelLoadError, WorkerFailed: a part cannot run as configured.
        """
        await self._child.start_and_listen()
        self._was_started = True

    def tell(self, address: str) -> None:
        """Send the process the address of our own Ray, now and at each later start."""
        self._child.tell(address)

    async def start(self) -> None:
        """Start the process again. It adopts the workers that still run."""
        await self._child.start()

    async def keep(self) -> None:
        """Restart the process whenever it ends, until cancelled."""
        await self._child.keep()

    async def kill(self) -> None:
        """Kill the process. Its workers serve on."""
        await self._child.stop(1, signal.SIGKILL)

    async def stop(self) -> None:
        """Stop the workers and the process."""
        await self._child.stop(self._cluster.stop_timeout_s, signal.SIGINT)
        status = self._child.status
        if self._joins and status not in (None, 0) and (self._was_started or status != UNJOINED):
            await self._end_workers()

    async def _end_workers(self) -> None:
        """Stop the workers after the process has ended without stopping them."""
        timeout_s = self._cluster.stop_timeout_s
        await self._child.start("--end")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._child.ended(), timeout_s)
        await self._child.stop(timeout_s)
        if self._child.status:
            logger.error(
                "workers may still run in the Ray cluster at %s, in its namespace %s: they could not be stopped",
                self._cluster.ray_address,
                self._cluster.name,
            )

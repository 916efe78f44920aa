"""A Ray node with a fast start on one machine, which uses internals of Ray.

The import raises ImportError if Ray lacks these internals.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined] # no stub

import deploy.ray_pools.ray_import  # noqa: F401 # before any other part of Ray
from deploy.processes import why_taken

HOST = "127.0.0.1"
AGENTS_PORTS = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
PORTS = range(20_000, 32_768)
"""Range of candidate ports. Linux assigns none of these to sockets by default."""


class LeanNode(Node):  # type: ignore[misc] # mypy is not shown Ray
    """Ray's head with a fast start, for which `ray.init` has no settings.

    It omits two unused processes that each take a second of CPU time or more: the rest of the disabled dashboard, for
    which a start would wait, and the monitor of Ray's autoscaler. The ports of the raylet's agents are chosen here: if
    the agents choose, the raylet waits for both, and fails after 15 s.
    """

    def __init__(self, ray_params: RayParams, **options: Any) -> None:
        ray_params.update(**dict(zip(AGENTS_PORTS, free_ports(len(AGENTS_PORTS)), strict=True)))
        super().__init__(ray_params, **options)

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        """Start the raylet. `Node` passes on all ports except one, which the raylet reads from the agent's file."""
        port = self._ray_params.dashboard_agent_listen_port
        persist_port(self._session_dir, self._node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        super().start_raylet(*arguments, **options)

    def start_api_server(self, **_: object) -> None:
        """Start no API server."""

    def start_monitor(self) -> None:
        """Start no monitor."""


def free_ports(count: int) -> list[int]:
    """Return unused ports of this machine in random order, so that two heads rarely choose the same ones."""
    drawn = random.sample(PORTS, len(PORTS))
    return list(itertools.islice((port for port in drawn if not why_taken(HOST, port)), count))

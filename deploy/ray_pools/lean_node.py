"""A Ray node as fast as it starts on one machine, made of parts of Ray that are not its API.

Importing it raises ImportError where Ray has no such parts.
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
"""Where the ports are looked for. Linux gives none of these to a socket that asks for any."""


class LeanNode(Node):  # type: ignore[misc] # mypy is not shown Ray
    """Ray's head as fast as it starts here, for which `ray.init` has no settings.

    It leaves out two processes that nobody asks anything, each of a second of CPU time or more: what is left of the
    dashboard where there is to be none, for which a start would wait, and the monitor of Ray's autoscaler. The ports of
    the raylet's agents are chosen here: a raylet whose agents choose waits for both, and fails after 15 s.
    """

    def __init__(self, ray_params: RayParams, **options: Any) -> None:
        ray_params.update(**dict(zip(AGENTS_PORTS, free_ports(len(AGENTS_PORTS)), strict=True)))
        super().__init__(ray_params, **options)

    def start_raylet(self, *arguments: Any, **options: Any) -> None:
        """See `Node`, which passes on all ports but one: for that the raylet looks where the agent would write it."""
        port = self._ray_params.dashboard_agent_listen_port
        persist_port(self._session_dir, self._node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, port)
        super().start_raylet(*arguments, **options)

    def start_api_server(self, **_: object) -> None:
        """Starts none."""

    def start_monitor(self) -> None:
        """Starts none."""


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that nothing has now, in no order: two heads hardly ever find the same."""
    drawn = random.sample(PORTS, len(PORTS))
    return list(itertools.islice((port for port in drawn if not why_taken(HOST, port)), count))

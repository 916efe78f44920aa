"""A Ray cluster of this machine alone, for the life of this process.

    python -m deploy.ray_pools.head --ready-fd N [--workers N]

It reports on the descriptor, in one line of JSON, `{"address": "HOST:PORT"}`, or an error of Baton's tree. SIGTERM ends
it. It also prints the workers' output, because it lives longer than the controller that starts them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import logging
import os
import random
import signal
import sys
import threading
from typing import Any

import psutil

from baton.cluster import MAX_WORKERS
from baton.errors import ConfigError
from baton.rpc.errors import to_failed
from deploy.processes import tell_parent, why_taken
from deploy.ray_pools.actor import RESOURCE
from deploy.ray_pools.ray_import import DASHBOARD_AGENT_LISTEN_PORT_NAME, Node, RayParams, persist_port, ray

HOST = "127.0.0.1"
CHECK_S = 0.5
END_S = 3.0
"""Time in which Ray's own processes may end by themselves, once Ray is shut down."""
AGENTS_PORTS = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port", "runtime_env_agent_port")
PORTS = range(20_000, 32_768)
"""Where the ports are looked for. Linux gives none of these to a socket that asks for any."""


class Head(Node):  # type: ignore[misc] # mypy is not shown Ray
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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.ray_pools.head", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--ready-fd", type=int, required=True, help="inherited descriptor to which the head writes its address"
    )
    parser.add_argument("--workers", type=int, default=1, help="how many begin at once: Ray has their processes ready")
    arguments = parser.parse_args()
    ready_fd: int = arguments.ready_fd
    ray._private.node.Node = Head  # there is no setting for either process
    try:
        ray.init(
            address="local",
            # Workers ask for none. So many processes Ray begins before they are asked for, and no more at a time.
            num_cpus=max(1, min(arguments.workers, os.cpu_count() or 1)),
            resources={RESOURCE: MAX_WORKERS},
            include_dashboard=False,
            object_store_memory=80 * 2**20,  # workers exchange nothing through it
            log_to_driver=True,
            logging_level=logging.ERROR,
            _node_ip_address=HOST,
        )
    except Exception as error:  # Ray has no class of its own for this
        failed = to_failed(ConfigError(f"Ray does not start: {error}"))
        tell_parent(ready_fd, **dataclasses.asdict(failed))
        sys.exit(failed.message)
    ray._private.worker.global_worker._filter_logs_by_job = False  # the workers are of the controllers' jobs
    own = psutil.Process().children(recursive=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())  # again: Ray has put its own handler in place
    tell_parent(ready_fd, address=ray.get_runtime_context().gcs_address)
    node = ray._private.worker._global_node
    try:
        while not stop.wait(CHECK_S):
            if dead := node.dead_processes():
                sys.exit(f"Ray: {dead[0][0]} has ended")
    finally:
        ray.shutdown()
        _end(own)


def _end(processes: list[psutil.Process]) -> None:
    """Kills those that do not end: an agent of Ray reports its raylet's death to the GCS, which is gone as well."""
    _, left = psutil.wait_procs(processes, timeout=END_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()

"""A Ray cluster on this machine only, for the life of this process.

    python -m deploy.ray_pools.head --ready-fd N [--workers N] [--folder FOLDER]

It writes one line of JSON to the descriptor: `{"address": "HOST:PORT"}`, or an error of Baton's tree. SIGTERM ends it.
It also prints the output of Ray's actors, because it outlives the controller that creates them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import signal
import sys
import threading

import psutil

from baton.cluster import MAX_WORKERS
from baton.errors import ConfigError
from baton.rpc.errors import to_failed
from baton.visible import in_line
from deploy.processes import tell_parent
from deploy.ray_pools.actor import RESOURCE
from deploy.ray_pools.ray_import import ray

CHECK_S = 0.5
END_S = 3.0
"""Time for Ray's own processes to exit after Ray's shutdown."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.ray_pools.head", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--ready-fd", type=int, required=True, help="inherited descriptor to which the head writes its address"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="workers that start at once: Ray prepares their processes"
    )
    parser.add_argument("--folder", default="", help="folder of Ray's sockets and logs; empty: Ray's default")
    arguments = parser.parse_args()
    ready_fd: int = arguments.ready_fd
    with contextlib.suppress(ImportError):  # a Ray release with other internals starts normally
        from deploy.ray_pools.lean_node import LeanNode

        ray._private.node.Node = LeanNode
    try:
        ray.init(
            address="local",
            # Workers request no CPU. Ray prestarts this many processes, and starts at most this many at a time.
            num_cpus=max(1, min(arguments.workers, os.cpu_count() or 1)),
            resources={RESOURCE: MAX_WORKERS},
            include_dashboard=False,
            object_store_memory=80 * 2**20,  # workers exchange nothing through it
            log_to_driver=True,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
            _temp_dir=arguments.folder or None,
        )
    except Exception as error:  # Ray has no narrower class for this
        failed = to_failed(ConfigError(f"Ray does not start: {error}"))
        tell_parent(ready_fd, **dataclasses.asdict(failed))
        sys.exit(in_line(failed.message))
    ray._private.worker.global_worker._filter_logs_by_job = False  # the workers belong to the controllers' jobs
    own = psutil.Process().children(recursive=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())  # replaces Ray's own handler
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
    """Kill processes that do not exit: an agent of Ray tries to report its raylet's death to a GCS that is gone."""
    _, left = psutil.wait_procs(processes, timeout=END_S)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    main()

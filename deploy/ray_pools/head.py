"""A Ray cluster of this machine alone, for the life of this process.

    python -m deploy.ray_pools.head --ready-fd N [--workers N] [--folder FOLDER]

It reports on the descriptor, in one line of JSON, `{"address": "HOST:PORT"}`, or an error of Baton's tree. SIGTERM ends
it. It also prints the workers' output, because it lives longer than the controller that starts them.
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
"""Time in which Ray's own processes may end by themselves, once Ray is shut down."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.ray_pools.head", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--ready-fd", type=int, required=True, help="inherited descriptor to which the head writes its address"
    )
    parser.add_argument("--workers", type=int, default=1, help="how many begin at once: Ray has their processes ready")
    parser.add_argument("--folder", default="", help="where Ray has its sockets and logs; without, its own place")
    arguments = parser.parse_args()
    ready_fd: int = arguments.ready_fd
    with contextlib.suppress(ImportError):  # a Ray with other parts starts as it does by itself
        from deploy.ray_pools.lean_node import LeanNode

        ray._private.node.Node = LeanNode
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
            _node_ip_address="127.0.0.1",
            _temp_dir=arguments.folder or None,
        )
    except Exception as error:  # Ray has no class of its own for this
        failed = to_failed(ConfigError(f"Ray does not start: {error}"))
        tell_parent(ready_fd, **dataclasses.asdict(failed))
        sys.exit(in_line(failed.message))
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

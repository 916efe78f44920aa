"""Stops a Ray node from accepting new work, which Ray's public API cannot do. Ray's autoscaler does it this way."""

from __future__ import annotations

import time
from collections.abc import Collection

from baton.errors import WorkerFailed
from deploy.ray_pools.ray_import import ray

TIMEOUT_S = 5.0


def place_nothing_on(hosts: Collection[str], gcs_address: str, timeout_s: float) -> int:
    """Announce to Ray that the nodes at those addresses will be gone soon, and return their number.

    Their actors continue. Blocks for up to a few seconds.

    Args:
        timeout_s: time after which the nodes are gone.

    Raises:
        WorkerFailed: Ray does not answer, or refuses, or has changed.
    """
    try:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        gcs = GcsClient(address=gcs_address)
        nodes = [
            i.hex() for i, n in gcs.get_all_node_info(timeout=TIMEOUT_S).items() if n.node_manager_address in hosts
        ]
        deadline_ms = int((time.time() + timeout_s) * 1e3)
        for node_id in nodes:
            is_accepted, why_not = gcs.drain_node(node_id, reason, "the machine will be removed", deadline_ms)
            if not is_accepted:
                raise WorkerFailed(f"Ray does not drain the node: {why_not}")
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise WorkerFailed(f"cannot announce to Ray that this node leaves: {error}") from error
    return len(nodes)

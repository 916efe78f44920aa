"""Ray's head on this machine, as far as it can be seen without a Ray that runs."""

from __future__ import annotations

import socket

import pytest
from ray._private.node import Node
from ray._private.parameter import RayParams

from deploy.ray_pools import lean_node
from deploy.ray_pools.lean_node import AGENTS_PORTS, LeanNode, free_ports


def test_what_it_does_otherwise_is_called_so_in_ray() -> None:
    """Under other names Ray would start its own all the same, or take no notice of the ports."""
    changed = {name for name in vars(LeanNode) if name.startswith("start_")}
    assert changed == {"start_api_server", "start_monitor", "start_raylet"}
    assert changed <= vars(Node).keys()
    assert vars(RayParams()).keys() >= set(AGENTS_PORTS)


def test_agents_get_ports_that_nothing_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((lean_node.HOST, 0)) as taken:
        port: int = taken.getsockname()[1]
        monkeypatch.setattr(lean_node, "PORTS", range(port, port + 2))
        assert free_ports(2) == [port + 1]

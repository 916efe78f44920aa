"""Ray's head on this machine, as far as it can be seen without a Ray that runs."""

from __future__ import annotations

from deploy.ray_pools.head import Head
from deploy.ray_pools.ray_import import Node


def test_what_it_leaves_out_is_called_so_in_ray() -> None:
    """Under another name Ray would start it all the same."""
    left_out = {name for name in vars(Head) if name.startswith("start_")}
    assert left_out == {"start_api_server", "start_monitor"}
    assert left_out <= vars(Node).keys()

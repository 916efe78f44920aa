"""The autoscaler on a real cluster: it grows under load, says why, and shrinks when the load has gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.cluster import running_cluster
from tests.integration.test_scaling import SETTINGS, Load, baton, has, pids

pytestmark = pytest.mark.chaos

# All that takes minutes in earnest, in seconds. A prompt of the load takes 0.2 s of a worker.
AUTOSCALE = SETTINGS | {
    "engine_max_num_seqs": "16", "testing_token_ms": "1",
    "autoscale_enabled": "true", "autoscale_max_workers": "3", "autoscale_window_s": "1", "autoscale_cool_down_s": "2",
    "autoscale_scale_in_s": "4", "index_renew_s": "0.3", "index_poll_s": "0.3",
}  # fmt: skip


def test_pools_follow_the_load(model_dir: Path) -> None:
    with running_cluster(**AUTOSCALE) as cluster:
        begun = pids(cluster.client.status())
        with Load(cluster) as load:
            grown = cluster.wait_for(lambda status: sum(p["ready"] for p in status["pools"].values()) == 3, 90)
            new = pids(grown).keys() - begun.keys()
            (role,) = (worker["role"] for worker in grown["workers"] if worker["id"] in new)
            load.until_served_by_another(role, begun)
            told = json.loads(baton(cluster, "autoscale", "--dry-run", "--seconds", "2", "--json"))
            assert told["reasons"], told
        cluster.wait_for(has(1, 1), 90)
        assert load.num_served
        assert "autoscaler: 1:1 -> " in cluster.log

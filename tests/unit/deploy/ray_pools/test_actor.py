"""What keeps a worker's process reports why it does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import ClusterConfig, Config, EngineConfig
from baton.errors import ConfigError
from baton.trust import KeyFile, Principal, draw_secret, write_private
from deploy.ray_pools.actor import WorkerActor


class Alone(WorkerActor):
    """It has the whole node."""

    def _share(self, config: Config) -> float:
        return 1.0


async def test_a_node_with_another_secret_says_so_and_where(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        write_private(tmp_path / name, draw_secret())
    fingerprint = KeyFile(tmp_path / "ours", Principal.CONTROLLER).keys.fingerprint
    config = Config(engine=EngineConfig(runner="arithmetic"), cluster=ClusterConfig(secret=str(tmp_path / "theirs")))
    with pytest.raises(ConfigError, match=r"theirs on .* are not those of this cluster's controller: cluster\.secret"):
        await Alone("decode", "decode-0", "127.0.0.1", config.to_json(), fingerprint).start()

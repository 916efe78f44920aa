"""What lies about where `baton up` is started: neither a user's files nor other programs' memory end what it runs."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from baton.config import Config
from tests.integration.cluster import running_cluster


def test_a_folder_of_modules_and_a_full_machine_harm_no_cluster(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To Ray's memory monitor every machine is full here: where it runs, it kills worker after worker."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0")
    monkeypatch.chdir(tmp_path)
    for name in ("baton", "deploy", "json", "kvstore", "ray", "router", "socket"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('this is my own {name}.py')")
    with running_cluster(engine_runner="arithmetic") as cluster:
        answer = cluster.generate(token_ids=[1, 2, 3], sampling={"max_tokens": 4})
        assert len(answer.token_ids) == 4
        assert "my own" not in cluster.log
        for worker in cluster.client.status()["workers"]:
            told = Config.from_json(psutil.Process(worker["pid"]).environ()["BATON_CONFIG_JSON"])
            assert told.engine.memory_share == 0.5, "two workers on one machine"

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import deploy.local.leave
from baton.config import ClusterConfig, Config, IndexConfig, ModelConfig
from deploy.local.leave import leave, workers_on
from tests.support.waiting import wait_until

HOST = "127.99.1.2"
NOBODY = "127.99.1.3:9"
WORKER = "import pathlib, sys, time; pathlib.Path('runs').touch(); time.sleep(600)"


@pytest.mark.parametrize("flags", [["-P"], []], ids=["ours", "of the release before"])
def test_a_worker_whose_whole_cluster_is_gone_ends(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `helm uninstall`: neither Ray's head nor Redis nor a controller answers any more."""
    monkeypatch.setattr(deploy.local.leave, "RAY_S", 0.2)
    monkeypatch.setattr(deploy.local.leave, "NO_CONTROLLER_S", 1.0)
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "worker.py").write_text(WORKER)
    config = Config(
        model=ModelConfig(revision="1"),
        index=IndexConfig(redis_url=f"redis://{NOBODY}/0"),
        cluster=ClusterConfig(ray_address=NOBODY),
    )
    without_packages = str(Path(sys.executable).resolve())
    command = [without_packages, *flags, "-m", "deploy.worker", "decode", "decode-0", HOST]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}) as worker:
        try:
            wait_until(lambda: (tmp_path / "runs").exists() or worker.poll() is not None)
            assert worker.poll() is None
            assert workers_on({HOST}).keys() == {"decode-0"}
            began_s = time.monotonic()
            assert asyncio.run(leave(config, {HOST}, timeout_s=60.0)) == []
            assert time.monotonic() - began_s < 20.0, "Ray's own client looks for its head for 40 s"
            assert worker.wait() == -15
        finally:
            worker.kill()

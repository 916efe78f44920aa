"""A Ray cluster that others run, of several nodes: a lost node's workers come back on another; nothing stays behind.

Takes minutes on a small machine, so `make chaos` runs it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.cluster import Role
from baton.config import Config
from deploy.embedded_redis import EmbeddedRedis
from deploy.processes import module_command, tied
from deploy.ray_pools.actor import POOL_LABEL
from deploy.ray_pools.actors import ANSWER_S
from tests.integration.cluster import Cluster, free_port, running_cluster
from tests.integration.test_scaling import SETTINGS, controller_pid, has, pids, serves
from tests.kube.release import load_on
from tests.support.members import secret_file
from tests.support.processes import command_line
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos


class RayNodes:
    """A Ray cluster of processes of this test, each of which is a node with room for some workers.

    Args:
        store: host:port of a Redis with which the head may come back.
    """

    def __init__(self, store: str = "") -> None:
        self._store = {"RAY_REDIS_ADDRESS": store} if store else {}
        self._address = f"127.0.0.1:{free_port()}"
        self._environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # else it takes no second node on this machine
            "RAY_gcs_rpc_server_reconnect_timeout_s": "600" if store else "60",
        }
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.mkdtemp(prefix="ray-")

    @property
    def address(self) -> str:
        return self._address

    @property
    def access(self) -> dict[str, str]:
        """What an operator sets for a process that is to join."""
        return {name: value for name, value in self._environment.items() if name.startswith("RAY_")}

    def add(
        self,
        num_workers: int,
        ip: str = "127.0.0.1",
        is_head: bool = False,
        pool: Role | None = None,
        *,
        has_node_process: bool = False,
    ) -> psutil.Process:
        """Args:
        pool: whose workers alone the node takes.
        has_node_process: which starts Ray, and has the workers.
        """
        folder = Path(self._folder) / f"node-{len(self.nodes)}"
        before = module_command("deploy.ray_pools.node", "--folder", str(folder), "--") if has_node_process else []
        head = ["--head", f"--port={self._address.rpartition(':')[2]}", "--include-dashboard=false", "--no-monitor"]
        node = subprocess.Popen(
            tied(
                [
                    *before,
                    *(str(Path(sys.executable).with_name("ray")), "start", "--block", f"--node-ip-address={ip}"),
                    *(head if is_head else [f"--address={self._address}"]),
                    *(
                        "--num-cpus=1",
                        f'--resources={{"baton_worker": {num_workers}}}',
                        "--object-store-memory=83886080",
                    ),
                    *("--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={self._folder}/{len(self.nodes)}"),
                    *([f"--labels={POOL_LABEL}={pool}"] if pool else []),
                ],
                signal.SIGTERM if has_node_process else signal.SIGKILL,
            ),
            env=self._environment | (self._store if is_head else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.nodes.append(node)

        def has_raylet() -> bool:
            assert node.poll() is None, "ray start has ended"
            return any("raylet" in p.name() for p in psutil.Process(node.pid).children(recursive=has_node_process))

        wait_until(has_raylet, 60.0, every_s=0.1)
        return psutil.Process(node.pid)

    def workers(self) -> list[psutil.Process]:
        found = [p for node in self.nodes if node.poll() is None for p in psutil.Process(node.pid).children(True)]
        return [process for process in found if _is_worker(process)]

    def close(self) -> None:
        for node in self.nodes:
            children = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
            node.kill()
            node.wait()
            for child in children:  # Ray's agents take a minute to see that they are alone
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, timeout=20)
        shutil.rmtree(self._folder)


def joining() -> dict[str, str]:
    """Settings of a cluster whose workers run on nodes that were there before it, and have its secret."""
    return SETTINGS | {"cluster_secret": secret_file()}


@pytest.mark.usefixtures("model_dir")
def test_a_controller_goes_with_the_node_by_which_it_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray tells a driver by its node that the head is a new one. The next controller joins by the next node there."""
    nodes = RayNodes()
    try:
        nodes.add(num_workers=4, is_head=True)
        node = nodes.add(num_workers=0, ip="127.0.0.2")
        for name, value in nodes.access.items():
            monkeypatch.setenv(name, value)
        arguments = ("--ray-address", nodes.address, "--prefill", "1", "--decode", "1")
        with running_cluster(*arguments, **joining(), cluster_ray_node_ip="127.0.0.2") as cluster:
            before = cluster.wait_for(has(1, 1))
            node.kill()
            nodes.add(num_workers=0, ip="127.0.0.2")
            after = cluster.wait_for(
                lambda s: has(1, 1)(s) and controller_pid(s) not in (0, before["controller"]["pid"]), 120
            )
            assert "the Ray node of this process is gone" in cluster.log
            assert pids(after) == pids(before), "a worker was started again"
            cluster.client.scale("decode", 2)
            cluster.wait_for(has(1, 2))
            serves(cluster)
    finally:
        nodes.close()


@pytest.mark.usefixtures("model_dir")
def test_a_controller_waits_for_a_head_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes orders meanwhile, which are carried out by the next head; no worker is started again."""
    with EmbeddedRedis(port=free_port()) as store:
        nodes = RayNodes(store.url.removeprefix("redis://").removesuffix("/0"))
        try:
            head = nodes.add(num_workers=0, is_head=True)
            nodes.add(num_workers=4, ip="127.0.0.2")
            for name, value in nodes.access.items():
                monkeypatch.setenv(name, value)
            arguments = ("--ray-address", nodes.address, "--prefill", "1", "--decode", "1")
            with running_cluster(*arguments, **joining(), cluster_ray_node_ip="127.0.0.2") as cluster:
                before = cluster.wait_for(has(1, 1))
                for process in (head, *head.children(recursive=True)):
                    process.kill()
                cluster.wait_for(lambda _: "Ray's head has not answered" in cluster.log, 2 * ANSWER_S)
                serves(cluster)
                cluster.client.scale("decode", 2)
                nodes.add(num_workers=0, is_head=True)
                after = cluster.wait_for(has(1, 2), 120)
                assert after["controller"]["pid"] == before["controller"]["pid"]
                assert pids(after).items() >= pids(before).items(), "a worker was started again"
                serves(cluster)
        finally:
            nodes.close()


@pytest.mark.usefixtures("model_dir")
def test_workers_of_a_node_process_serve_on_when_their_raylet_or_head_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The node process starts Ray again; a head without a store is a new cluster, which the nodes join."""
    nodes = RayNodes()
    try:
        head = nodes.add(num_workers=0, is_head=True)
        node = nodes.add(num_workers=4, ip="127.0.0.2", has_node_process=True)
        joins = nodes.add(num_workers=0, ip="127.0.0.3")
        for name, value in nodes.access.items():
            monkeypatch.setenv(name, value)
        arguments = ("--ray-address", nodes.address, "--prefill", "1", "--decode", "2")
        with running_cluster(*arguments, **joining(), cluster_ray_node_ip="127.0.0.3") as cluster:
            before = cluster.wait_for(has(1, 2))
            with load_on(cluster.grpc) as load:
                (raylet,) = (each for each in node.children(recursive=True) if "raylet" in each.name())
                raylet.kill()
                num_adopted = wait_until_adopted(cluster, 3)
                for process in (head, *head.children(recursive=True), joins, *joins.children(recursive=True)):
                    process.kill()
                nodes.add(num_workers=0, is_head=True)
                nodes.add(num_workers=0, ip="127.0.0.3")
                wait_until_adopted(cluster, num_adopted + 3)
                cluster.client.scale("decode", 3)
                after = cluster.wait_for(has(1, 3), 120)
            assert load.failures == []
            assert pids(after).items() >= pids(before).items(), "a worker was started again"
            print(f"{load.num_served} requests, none failed")
    finally:
        nodes.close()


def wait_until_adopted(cluster: Cluster, num: int) -> int:
    """Waits until workers have been adopted so often."""
    wait_until(lambda: cluster.log.count("is adopted by a new Ray actor, pid") >= num, 150, seen=lambda: cluster.log)
    return num


@pytest.mark.usefixtures("model_dir")
def test_pools_keep_to_their_own_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has changed its role comes back where it was; one that begins waits for a node of its pool."""
    nodes = RayNodes()
    try:
        own = {
            Role.PREFILL: nodes.add(num_workers=1, is_head=True, pool=Role.PREFILL),
            Role.DECODE: nodes.add(num_workers=2, pool=Role.DECODE),
        }
        for name, value in nodes.access.items():
            monkeypatch.setenv(name, value)
        arguments = ("--ray-address", nodes.address, "--prefill", "1", "--decode", "1")
        with running_cluster(*arguments, **joining()) as cluster:

            def places(status: dict[str, Any]) -> dict[str, Role]:
                children = {pool: {p.pid for p in node.children(recursive=True)} for pool, node in own.items()}
                return {w["id"]: pool for w in status["workers"] for pool in Role if w["pid"] in children[pool]}

            before = cluster.wait_for(has(1, 1))
            own_places = {"worker-0": Role.PREFILL, "worker-1": Role.DECODE}
            assert places(before) == own_places
            assert {w["id"]: memory_share(w["pid"]) for w in before["workers"]} == {"worker-0": 1.0, "worker-1": 0.5}
            cluster.client.scale("prefill", 2)
            cluster.wait_for(lambda _: "worker-2 (prefill) waits" in cluster.log)  # with room on the other pool's node
            cluster.client.scale("prefill", 1)
            cluster.wait_for(has(1, 1))
            cluster.client.set_role("worker-0", "decode")
            flipped = cluster.wait_for(has(0, 2))
            psutil.Process(pids(flipped)["worker-0"]).kill()
            after = cluster.wait_for(lambda s: has(0, 2)(s) and pids(s)["worker-0"] != pids(flipped)["worker-0"])
            assert places(after) == own_places
            assert pids(after)["worker-1"] == pids(before)["worker-1"], "a worker was started again"
            serves(cluster)
    finally:
        nodes.close()


def memory_share(pid: int) -> float:
    return Config.from_json(psutil.Process(pid).environ()["BATON_CONFIG_JSON"]).engine.memory_share


def _is_worker(process: psutil.Process) -> bool:
    return "worker" in command_line(process)


def test_workers_of_a_lost_node_come_back_on_another(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a Ray that others run. The sizes are remembered; `baton up` leaves nothing there, however it ends, and what
    stays when its controller is killed with it goes when it comes back.
    """
    nodes = RayNodes()
    try:
        nodes.add(num_workers=4, is_head=True)
        second = nodes.add(num_workers=4)
        for name, value in nodes.access.items():
            monkeypatch.setenv(name, value)
        settings = joining() | {"cluster_state_file": str(tmp_path / "sizes.json")}
        arguments = ("--ray-address", nodes.address, "--prefill", "1", "--decode", "2")
        with running_cluster(*arguments, **settings) as cluster:
            cluster.client.scale("decode", 3)
            before = cluster.wait_for(has(1, 3))
            lost = {process.pid for process in second.children(recursive=True) if _is_worker(process)}
            assert 0 < len(lost) < 4, "workers are spread over the nodes"
            second.kill()
            after = cluster.wait_for(lambda s: has(1, 3)(s) and not lost & set(pids(s).values()), 90)
            assert pids(after).keys() == pids(before).keys()
            kept = {name: pid for name, pid in pids(before).items() if pid not in lost}
            assert pids(after).items() >= kept.items(), "a worker of the other node was started again"
            serves(cluster)
        assert not nodes.workers(), "baton up left workers in a Ray that goes on"
        again = Cluster(*arguments, **settings)
        try:
            again.wait_for(has(1, 3))
            left = nodes.workers()
            assert len(left) == 4
            psutil.Process(again.client.status()["controller"]["pid"]).kill()
        finally:
            again.stop(signal.SIGKILL)
        assert all(worker.is_running() for worker in left)
        again = Cluster(*arguments, **settings)
        try:
            again.wait_for(has(1, 3))
            assert not any(worker.is_running() for worker in left)
            assert "left in Ray by a previous cluster" in again.log
        finally:
            started = again.processes()
            again.stop(signal.SIGKILL)
        _, alive = psutil.wait_procs([*started, *nodes.workers()], timeout=30)
        assert not alive, f"left behind: {[command_line(process) for process in alive]}"
    finally:
        nodes.close()

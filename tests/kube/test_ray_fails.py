"""Ray fails on the test cluster: its head, the head's GCS or a node's raylet. Workers serve on, and are adopted."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helm.chart import MATRIX, pod_of, render
from tests.helm.test_workers import container_of
from tests.kube.release import NAMESPACE, NEEDS_COMPILER, POOLS, TIMEOUT_S, Release, kube_cluster, load_on
from tests.kube.test_cluster import SETTINGS, is_ready, pids
from tests.kube.test_workers import log
from tests.support.processes import command_line

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    NEEDS_COMPILER,
]


THREE_WORKERS = (*SETTINGS, "--set=pools.decode.initialReplicas=2")


def test_workers_outlive_ray_without_a_store(tmp_path: Path, model_dir: Path) -> None:
    """A new head does not know the workers."""
    settings = (*THREE_WORKERS, "--set=ray.store.enabled=false")
    with kube_cluster(4, tmp_path, model_dir.parents[1], *settings) as release:
        release.install()
        live_through(release, loses_its_head)


def test_workers_outlive_a_raylet_and_the_gcs(tmp_path: Path, model_dir: Path) -> None:
    """Ray's head has a store, as by default."""
    with kube_cluster(4, tmp_path, model_dir.parents[1], *THREE_WORKERS) as release:
        release.install()
        live_through(release, loses_a_raylet, loses_its_gcs, loses_its_store)


def test_workers_outlive_a_raylet_that_kuberay_would_have_started(tmp_path: Path, model_dir: Path) -> None:
    """KubeRay's command runs in a shell, here without its operator. The raylet ends once, and hangs once."""
    with kube_cluster(4, tmp_path, model_dir.parents[1], *THREE_WORKERS) as release:
        release.install()
        starts_ray_as_kuberay_does(release)
        live_through(release, loses_a_raylet, stops_a_raylet)


def test_workers_that_ray_leaves_alone_for_too_long_come_back_with_it(tmp_path: Path, model_dir: Path) -> None:
    """Orphans end by themselves, so that none stays forever. Then their containers restart until Ray is back."""
    settings = (*THREE_WORKERS, "--set=ray.store.enabled=false", "--set=config.cluster.orphan_timeout_s=10")
    with kube_cluster(4, tmp_path, model_dir.parents[1], *settings) as release:
        release.install()
        scale = ("scale", "deployment/baton-head", "-n", NAMESPACE)
        release.kubectl(*scale, "--replicas=0")
        release.wait_for(lambda: not release.baton_status()["workers"])
        for pod in release.node_pods():
            text = release.machine.logs(pod["metadata"]["name"], "worker")
            assert "has had no Ray actor for 10 s: it drains and ends" in text
        release.kubectl(*scale, "--replicas=1")
        for role, size in (("prefill", 1), ("decode", 2)):
            release.wait_for_pool(role, size)
        assert json.loads(release.baton("generate", "Hello", "--max-tokens", "3", "--json"))["usage"]


def starts_ray_as_kuberay_does(release: Release) -> None:
    """Decode pods get the command of the chart's RayCluster, and Ray's command in the variable that KubeRay sets."""
    command = container_of(pod_of(render(MATRIX["kuberay"]), "decode"))["command"]
    deployment = json.loads(release.kubectl("get", "deployment/baton-decode", "-n", NAMESPACE, "-o", "json"))
    before = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    rays = shlex.join(before[before.index("--") + 1 :])
    path = "/spec/template/spec/containers/0"
    changes = [
        {"op": "replace", "path": f"{path}/command", "value": command},
        {"op": "add", "path": f"{path}/env/-", "value": {"name": "KUBERAY_GEN_RAY_START_CMD", "value": rays}},
    ]
    release.kubectl(
        "patch", "deployment/baton-decode", "-n", NAMESPACE, "--type=json", f"--patch={json.dumps(changes)}"
    )
    release.kubectl("rollout", "status", "deployment/baton-decode", "-n", NAMESPACE, f"--timeout={TIMEOUT_S}s")


def live_through(release: Release, *failures: Callable[[Release], None]) -> None:
    """Cause each failure under load. The workers and their pods stay, and the controller scales afterwards."""
    with load_on(release.grpc) as load:
        for fails in failures:
            for role, size in (("prefill", 1), ("decode", 2)):
                release.wait_for_pool(role, size)
            before, num_served = pids(release), load.num_served
            fails(release)
            release.wait_for(lambda: is_whole(release))
            assert pids(release) == before, "a worker was started again"
            assert [num_restarts(pod) for pod in release.node_pods()] == [0] * 3
            release.wait_for(lambda: load.num_served > num_served + 10)  # noqa: B023 - called at once
            assert load.failures == [], f"{load.failures}\n{release.picture()}"
            for size in (3, 2):
                release.baton("scale", "decode", str(size))
                release.wait_for_pool("decode", size)
        assert load.failures == [], f"{load.failures}\n{release.picture()}"
    print(f"{load.num_served} requests, none failed")


def loses_its_head(release: Release) -> None:
    """The next head is another Ray cluster: the nodes join it, and all workers get new actors."""
    before = adoptions(release)
    (head,) = release.pods("head")
    release.kubectl("delete", "pod", head["metadata"]["name"], "-n", NAMESPACE, "--wait=false")
    release.wait_for(lambda: [is_ready(pod) for pod in release.pods("head")] == [True])
    release.wait_for(lambda: adoptions(release) == {worker_id: 1 + number for worker_id, number in before.items()})


def loses_a_raylet(release: Release) -> None:
    """The node process of its container starts Ray again."""
    fails_once(release, psutil.Process.kill, "starting Ray again")


def stops_a_raylet(release: Release) -> None:
    """Kubernetes does not check the raylet. The node process kills Ray after 90 s or more."""
    fails_once(release, psutil.Process.suspend, "the raylet does not answer health checks: Ray is killed")


def fails_once(release: Release, harm: Callable[[psutil.Process], None], message: str) -> None:
    """Harm a decode pod's raylet, and wait until the pod's log has the message and its worker is adopted."""
    pod, *_ = release.pods("decode")

    def num_seen() -> tuple[int, int]:
        text = log(release, pod["metadata"]["name"])
        return text.count(message), text.count("is adopted by a new Ray actor")

    before = num_seen()
    harm(ray_process(pod, "raylet/raylet"))
    release.wait_for(lambda: num_seen() == (before[0] + 1, before[1] + 1))


def loses_its_gcs(release: Release) -> None:
    """The next GCS reads the state of the former one from the store: no worker loses its actor."""
    before = adoptions(release)
    (head,) = release.pods("head")
    ray_process(head, "gcs/gcs_server").kill()
    release.wait_for(lambda: [num_restarts(pod) for pod in release.pods("head")] == [1])
    release.wait_for(lambda: [is_ready(pod) for pod in release.pods("head")] == [True])
    assert adoptions(release) == before


def loses_its_store(release: Release) -> None:
    """The store has no volume. So the head restarts, and is another Ray cluster then."""
    before = adoptions(release)
    (store,) = release.pods("ray-store")
    release.kubectl("delete", "pod", store["metadata"]["name"], "-n", NAMESPACE, "--wait=false")
    release.wait_for(lambda: adoptions(release) == {worker_id: 1 + number for worker_id, number in before.items()})


def adoptions(release: Release) -> dict[str, int]:
    """Return how often each worker was adopted, by worker id."""
    logs = "".join(log(release, pod["metadata"]["name"]) for pod in release.node_pods())
    return {worker_id: logs.count(f"{worker_id} is adopted by a new Ray actor") for worker_id in pids(release)}


def is_whole(release: Release) -> bool:
    pools = release.baton_status()["pools"]
    return all(pools[role]["ready"] == pools[role]["desired"] for role in POOLS)


def num_restarts(pod: dict[str, Any]) -> int:
    """Return how often the pod's containers have restarted."""
    return sum(status["restartCount"] for status in pod["status"]["containerStatuses"])


def ray_process(pod: dict[str, Any], program: str) -> psutil.Process:
    """Return the process of the pod's Ray node whose program's path ends like this."""
    address = pod["status"]["podIP"]
    (found,) = (
        process
        for process in psutil.Process().children(recursive=True)
        if (words := command_line(process)) and words[0].endswith(program) and any(address in word for word in words)
    )
    return found

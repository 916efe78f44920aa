"""The chart on the test cluster, with everything running: what an operator does, of which clients notice nothing.

One story a helm: every day leaves the cluster as the next one finds it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kube.release import NAME, NAMESPACE, NEEDS_COMPILER, TIMEOUT_S, Release, kube_cluster, load_on
from tests.support.processes import command_line

pytestmark = [
    pytest.mark.first,
    pytest.mark.integration,
    pytest.mark.timeout(900),
    NEEDS_COMPILER,
]

SETTINGS = (
    "--set=config.testing.arithmetic=true",
    "--set=config.engine.num_blocks=1024",
    "--set=config.testing.step_ms=5",
    "--set=worker.resources.requests.memory=1Gi",
    "--set=router.preStopSeconds=5",  # no load balancer has to forget them
)
STALL_S = 8.0


@pytest.mark.chaos
def test_a_release_from_its_first_to_its_last_day(tmp_path: Path, model_dir: Path) -> None:
    """Install, scale, stand still, upgrade, uninstall: under load from the first answer on."""
    with kube_cluster(4, tmp_path, model_dir.parents[1], *SETTINGS) as release:
        live_through(release, scale_with_kubectl, outlives_a_stall, keeps_its_size_in_an_upgrade, scale_with_baton)


@pytest.mark.chaos
def test_a_release_that_lives_through_more(tmp_path: Path, model_dir: Path) -> None:
    """With helm 3. Ray's head is lost, every worker replaced, and the upgrade rolled back."""
    with kube_cluster(3, tmp_path, model_dir.parents[1], *SETTINGS) as release:
        live_through(
            release,
            outlives_ray_s_head,
            keeps_its_size_in_an_upgrade,
            scale_with_baton,
            rolls_its_workers_out,
            rolls_back,
        )


def live_through(release: Release, *days: Callable[[Release], None]) -> None:
    release.install()
    assert (
        json.loads(release.baton("generate", "Hello", "--max-tokens", "3", "--json"))["usage"]["completion_tokens"] == 3
    )
    assert {psutil.Process(pid).nice() for pid in pids(release).values()} == {psutil.Process().nice()}
    release.helm("test", NAME, f"--timeout={TIMEOUT_S}s")
    with load_on(release.grpc) as load:
        for day in days:
            day(release)
        num_served = load.num_served
        release.wait_for(lambda: load.num_served > num_served + 10)
        assert load.failures == [], f"{load.failures}\n{release.picture()}"
    print(f"{load.num_served} requests, none failed")
    uninstall_leaves_the_secrets_alone(release)


def outlives_ray_s_head(release: Release) -> None:
    """Workers go on without a head, and the next one knows them and makes more."""
    before = pids(release)
    (head,) = release.pods("head")
    release.kubectl("delete", "pod", head["metadata"]["name"], "-n", NAMESPACE, "--wait=false")
    release.wait_for(lambda: [is_ready(pod) for pod in release.pods("head")] == [True])
    scale_with_kubectl(release)
    assert before.items() <= pids(release).items(), "a worker was started again"


def scale_with_kubectl(release: Release) -> None:
    release.kubectl("scale", "servingpool/baton-decode", "--replicas=3", "-n", NAMESPACE)
    release.kubectl(
        "wait",
        "servingpool/baton-decode",
        "-n",
        NAMESPACE,
        "--for=jsonpath={.status.readyReplicas}=3",
        f"--timeout={TIMEOUT_S}s",
    )
    release.wait_for_pool("decode", 3)
    release.wait_for(lambda: {"desired": 3, "ready": 3}.items() <= release.baton_status()["pools"]["decode"].items())


def outlives_a_stall(release: Release) -> None:
    """All routers stand still for some seconds, as on a machine that is lent out: even so nobody is turned away."""
    routers = [psutil.Process(router["pid"]) for router in release.baton_status()["routers"]]
    assert len(routers) == 2
    for router in routers:
        router.suspend()
    try:
        time.sleep(STALL_S)
        host, port = release.grpc.split(":")
        socket.create_connection((host, int(port)), timeout=1).close()
    finally:
        for router in routers:
            router.resume()


def keeps_its_size_in_an_upgrade(release: Release) -> None:
    before = {pod["metadata"]["uid"] for pod in release.pods("router")}
    release.upgrade("--set", "config.router.max_in_flight=300")
    assert not before & {pod["metadata"]["uid"] for pod in release.pods("router")}, "no router has the new setting"
    assert release.pool("decode")["spec"]["replicas"] == 3
    release.wait_for_pool("decode", 3)


def scale_with_baton(release: Release) -> None:
    """The other endpoint to the same truth. The pod that goes is one whose worker has left."""
    release.baton("scale", "decode", "2")
    assert release.pool("decode")["spec"]["replicas"] == 2
    release.wait_for_pool("decode", 2)


def rolls_its_workers_out(release: Release) -> None:
    """A new image for them, the controller and Ray's head. Each worker hands its work over first."""
    before = {pod["metadata"]["uid"] for pod in release.node_pods()}
    release.upgrade("--set", "config.router.max_in_flight=300", "--set", "image.worker.tag=another")
    for role, size in (("prefill", 1), ("decode", 2)):
        release.wait_for_pool(role, size)
    assert not before & {pod["metadata"]["uid"] for pod in release.node_pods()}


def rolls_back(release: Release) -> None:
    release.helm("rollback", NAME, "2", "--wait", f"--timeout={TIMEOUT_S}s")
    for role, size in (("prefill", 1), ("decode", 2)):
        release.wait_for_pool(role, size)
    assert release.pool("decode")["spec"]["replicas"] == 2


def uninstall_leaves_the_secrets_alone(release: Release) -> None:
    release.helm("uninstall", NAME)
    release.wait_for(lambda: not release.machine.pods())
    kinds = (
        "all,configmaps,secrets,servingpools,persistentvolumeclaims,networkpolicies,serviceaccounts,roles,rolebindings"
    )
    left = json.loads(release.kubectl("get", f"{kinds},poddisruptionbudgets", "-n", NAMESPACE, "-o", "json"))["items"]
    found = {(item["kind"], item["metadata"]["name"]) for item in left if item["metadata"]["name"] != "default"}
    secrets = ("cluster", "ray", "ray-store", "redis", "router")
    assert found == {("Secret", f"{NAME}-{name}") for name in secrets}, "what a hook has created is for the next one"
    release.wait_for(lambda: not [c for c in psutil.Process().children(recursive=True) if "worker" in command_line(c)])


def pids(release: Release) -> dict[str, int]:
    """Of the workers' processes, by worker id."""
    return {worker["id"]: worker["pid"] for worker in release.baton_status()["workers"]}


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)

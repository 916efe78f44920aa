"""Two releases in one namespace: what is done to one of them, the other one does not notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kube.release import NAMESPACE, NEEDS_COMPILER, POOLS, Release, kube_cluster, load_on
from tests.kube.test_cluster import SETTINGS, pids

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    NEEDS_COMPILER,
]
SMALL = (*SETTINGS, "--set=router.replicas=1")


def test_a_release_is_scaled_and_removed_and_the_one_beside_it_stays_as_it_is(tmp_path: Path, model_dir: Path) -> None:
    """Both by its controller and by Kubernetes: the pools' sizes, pods, workers and definition are not touched."""
    with kube_cluster(4, tmp_path, model_dir.parents[1], *SMALL) as release:
        other = release.named("other-baton")
        release.install()
        refuses_the_same_pools(release)
        other.install()
        for each in (release, other):
            wait_for_sizes(each, 1, 1)
        before = picture_of(other)
        with load_on(other.grpc) as load:
            release.kubectl("scale", "servingpool/baton-decode", "--replicas=2", "-n", NAMESPACE)
            wait_for_sizes(release, 1, 2)
            release.baton("scale", "decode", "1")
            wait_for_sizes(release, 1, 1)
            assert picture_of(other) == before
            of_release = picture_of(release)
            other.kubectl("scale", "servingpool/other-baton-decode", "--replicas=2", "-n", NAMESPACE)
            wait_for_sizes(other, 1, 2)
            assert picture_of(release) == of_release
            before = picture_of(other)
            release.helm("uninstall", release.name)
            release.wait_for(lambda: not any(release.pods(role) for role in (*POOLS, "router", "controller", "head")))
            num_served = load.num_served
            other.wait_for(lambda: load.num_served > num_served + 10)
            assert picture_of(other) == before
            assert load.failures == [], f"{load.failures}\n{other.picture()}"
        print(f"{load.num_served} requests, none failed")


def refuses_the_same_pools(release: Release) -> None:
    """Helm does, before it has changed anything."""
    pools = [f"--set=pools.{role}.name={release.pool_name(role)}" for role in POOLS]
    again = ("install", "other-baton", str(release.chart), *release.values, *pools)
    with pytest.raises(AssertionError, match=r"ServingPool .* cannot be imported into the current release"):
        release.helm(*again)
    assert release.helm("list", "--short", "-n", NAMESPACE).split() == [release.name]


def wait_for_sizes(release: Release, *sizes: int) -> None:
    """Waits until prefill and decode have so many workers, in Kubernetes and as the routers see them."""
    for role, size in zip(POOLS, sizes, strict=True):
        release.wait_for_pool(role, size)
    release.wait_for(lambda: [release.baton_status()["pools"][role]["ready"] for role in POOLS] == [*sizes])


def picture_of(release: Release) -> tuple[object, ...]:
    """Its workers with their processes, pods and sizes."""
    nodes = {pod["metadata"]["uid"] for pod in release.node_pods()}
    return pids(release), nodes, [release.pool(role)["spec"] for role in POOLS]

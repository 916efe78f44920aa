"""Workers' pods on the test cluster: their logs, versions that do not start, and roll-outs where there is no room."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kube.release import NAMESPACE, NEEDS_COMPILER, TIMEOUT_S, Release, kube_cluster, load_on
from tests.kube.test_cluster import SETTINGS, is_ready, pids
from tests.support.load import Clients

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.integration,
    pytest.mark.timeout(1800),
    NEEDS_COMPILER,
]
NUM_SLOTS = 4
"""Pods of workers for which the machine has room."""
NUM_STREAMS = 500


def test_workers_say_what_they_do_and_versions_replace_each_other(tmp_path: Path, model_dir: Path) -> None:
    """One worker crashes, two versions do not start, and one is rolled out with as many slots as workers."""
    settings = (*SETTINGS, r"--set=worker.resources.limits.nvidia\.com/gpu=1", "--set=pools.decode.initialReplicas=2")
    with kube_cluster(4, tmp_path, model_dir.parents[1], *settings, num_gpus=NUM_SLOTS) as release:
        release.install()
        with load_on(release.grpc) as load:
            a_crash_is_in_the_log(release)
            a_version_that_does_not_start_stops_at_one_pod(release, load)
            rolls_in_place(release)
            num_served = load.num_served
            release.wait_for(lambda: load.num_served > num_served + 10)
            assert load.failures == [], f"{load.failures}\n{release.picture()}"
        print(f"{load.num_served} requests, none failed")


def a_crash_is_in_the_log(release: Release) -> None:
    """From its start to its end and its next start, in JSON, by the plain `kubectl logs` of its pod."""
    release.wait_for_pool("decode", 2)
    *_, crashing = sorted(worker["id"] for worker in release.baton_status()["workers"] if worker["role"] == "decode")
    pid = pids(release)[crashing]
    (pod,) = (name for name in names(release, "decode") if f"{crashing} takes traffic" in log(release, name))
    psutil.Process(pid).send_signal(signal.SIGSEGV)
    release.wait_for(lambda: messages(log(release, pod))[f"{crashing} takes traffic"] == 2)
    seen = messages(log(release, pod))
    assert seen[f"{crashing} starts: it is a decode worker"] == 2
    assert seen[f"{crashing} crashed with SIGSEGV"] == 1
    release.wait_for_pool("decode", 2)


def a_version_that_does_not_start_stops_at_one_pod(release: Release, load: Clients) -> None:
    """Neither one whose image is not there, nor one whose worker has no keys: then the log says that."""
    before = {name for role in ("prefill", "decode") for name in names(release, role)}
    deployment = ("deployment/baton-decode", "-n", NAMESPACE)
    for change, symptom in (
        (("set", "image", *deployment, "worker=baton-none:1"), "ErrImagePull"),
        (("set", "env", *deployment, "-c", "worker", "BATON_CLUSTER_SECRET=/nowhere/keys"), "/nowhere/keys"),
    ):
        num_served = load.num_served
        release.kubectl(*change)
        release.wait_for(lambda: symptom in state_of_new(release, before))  # noqa: B023 - called at once
        release.wait_for(lambda: load.num_served >= num_served + NUM_STREAMS // 2)  # noqa: B023
        there = names(release, "decode")
        assert len(there) == 3, "one more than there were"
        assert before - set(names(release, "prefill")) < set(there), "none of them was touched"
        assert release.baton_status()["pools"]["decode"]["ready"] == 2
        release.kubectl("rollout", "undo", *deployment)
        release.kubectl("rollout", "status", *deployment, f"--timeout={TIMEOUT_S}s")
        release.wait_for_pool("decode", 2)
    assert load.failures == []


def rolls_in_place(release: Release) -> None:
    """There is a slot for each worker, and none more."""
    release.upgrade("--set=worker.updateStrategy=inPlace")
    release.kubectl("scale", "servingpool/baton-decode", "--replicas=3", "-n", NAMESPACE)
    release.wait_for_pool("decode", NUM_SLOTS - 1)
    before = {name for role in ("prefill", "decode") for name in names(release, role)}
    release.upgrade("--set=worker.updateStrategy=inPlace", "--set=worker.podAnnotations.version=next")
    for role, size in (("prefill", 1), ("decode", NUM_SLOTS - 1)):
        release.wait_for_pool(role, size)
        assert not before & set(names(release, role))
        assert all(map(is_ready, release.pods(role)))


def names(release: Release, component: str) -> list[str]:
    """The names of a component's pods."""
    return [pod["metadata"]["name"] for pod in release.pods(component)]


def log(release: Release, pod: str) -> str:
    """What `kubectl logs` prints of a pod's worker."""
    return release.kubectl("logs", pod, "-n", NAMESPACE, "-c", "worker")


def messages(text: str) -> Counter[str]:
    """The messages of a log, each of whose lines is JSON."""
    return Counter(str(json.loads(line)["message"]) for line in text.splitlines())


def state_of_new(release: Release, before: set[str]) -> str:
    """What Kubernetes and the log say of the decode pods that were not there before."""
    found: list[Any] = []
    for pod in release.pods("decode"):
        if pod["metadata"]["name"] not in before:
            found += [json.dumps(pod.get("status", {})), release.machine.logs(pod["metadata"]["name"], "worker")]
    return "\n".join(found)

"""Workers' pods: where their output goes, what probes ask, and how a new version replaces them."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from deploy.ray_pools.node import main as node_main
from tests.helm.chart import MAJORS, MATRIX, Object, Pod, Values, of_kind, pod_of, pods, render, the
from tests.helm.test_config import loaded

IN_PLACE = Values(sets=("worker.updateStrategy=inPlace", "config.cluster.start_timeout_s=901"))
KINDS = {"deployments": MATRIX["defaults"], "kuberay": MATRIX["kuberay"], "shared": MATRIX["gpu-node-deployments"]}
every_major = pytest.mark.parametrize("major", MAJORS)
every_kind = pytest.mark.parametrize("values", KINDS.values(), ids=KINDS)


def worker_pods(values: Values, major: int = 4) -> list[Pod]:
    """The kinds of pods of workers."""
    return [pod for pod in pods(render(values, major)) if pod.component in ("prefill", "decode", "worker")]


def container_of(pod: Pod) -> Object:
    """The container that is the Ray node."""
    found: list[Object] = [each for each in pod.spec["containers"] if each["name"] == "worker"]
    assert len(found) == 1
    return found[0]


def raycluster(values: Values, major: int) -> Object:
    """The specification of KubeRay's object."""
    (found,) = of_kind(render(values, major), "RayCluster")
    spec: Object = found["spec"]
    return spec


def script(probe: Object) -> str:
    """What a shell runs for a probe."""
    shell, flag, text = probe["exec"]["command"]
    assert (shell, flag) == ("sh", "-c")
    return str(text)


@every_kind
def test_what_workers_write_goes_through_their_container_s_first_process(values: Values) -> None:
    """In the form of all other logs. Under KubeRay the command is KubeRay's own, which it leaves in a variable then."""
    for pod in worker_pods(values):
        command = container_of(pod)["command"]
        at = command.index("--")
        assert command[:4] == ["python", "-P", "-m", node_main.__module__]
        assert command[4:at] == ["--folder=/var/tmp/node", "--raylet=$(POD_IP):6380", "--log-format=json"]
        if values == MATRIX["kuberay"]:
            assert pod.template["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
            assert command[at + 1 : -1] == ["sh", "-c"]
            assert command[-1].endswith('eval "exec $KUBERAY_GEN_RAY_START_CMD"')
        else:
            assert command[at + 1 : at + 4] == ["ray", "start", "--block"]
        assert {"name": "tmp", "mountPath": "/var/tmp"} in container_of(pod)["volumeMounts"]


def test_for_people_they_write_as_for_people() -> None:
    """The setting is that of all processes; without one it is Baton's own default."""
    for sets in (("config.telemetry.log_format=text",), ("config.telemetry=null",)):
        command = container_of(pod_of(render(Values(sets=sets)), "decode"))["command"]
        assert "--log-format=text" in command


@every_kind
def test_a_pod_is_ready_while_its_worker_takes_traffic(values: Values) -> None:
    """A failure's event has the words. The start covers the longest that Baton allows a worker's start, and more."""
    for pod in worker_pods(values):
        container = container_of(pod)
        assert script(container["readinessProbe"]) == "cat /var/tmp/node/workers; test -e /var/tmp/node/ready"
        assert script(container["startupProbe"]) == "cat /var/tmp/node/workers; test -e /var/tmp/node/started"
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 180 + 60


def test_the_start_of_a_pod_lasts_as_long_as_that_of_its_worker(tmp_path: Path) -> None:
    """A large model takes long, and the setting that says so counts here, too."""
    objects = render(IN_PLACE)
    container = container_of(pod_of(objects, "decode"))
    start_s = loaded(objects, container, tmp_path).cluster.start_timeout_s
    assert start_s == 901
    startup = container["startupProbe"]
    assert start_s + 60 <= startup["periodSeconds"] * startup["failureThreshold"] <= start_s + 130


@every_major
@every_kind
def test_a_worker_s_pod_lives_while_its_first_process_does(values: Values, major: int) -> None:
    """Workers serve on without the raylet. So the node process checks it, at its port, and the kubelet does not."""
    for pod in worker_pods(values, major):
        container = container_of(pod)
        command = container["command"]
        assert script(container["livenessProbe"]) == "find /var/tmp/node -name alive -mmin -1 | grep -q ."
        assert "--folder=/var/tmp/node" in command
        (asked,) = (word.partition("=")[2] for word in command[: command.index("--")] if word.startswith("--raylet="))
        assert asked == "$(POD_IP):6380"
        assert any(variable["name"] == "POD_IP" for variable in container["env"])
        assert {"name": "raylet", "containerPort": 6380} in container["ports"]
        if values == MATRIX["kuberay"]:
            (group,) = (g for g in raycluster(values, major)["workerGroupSpecs"] if g["groupName"] == pod.component)
            assert group["rayStartParams"]["node-manager-port"] == "6380"
        else:
            assert "--node-manager-port=6380" in command


def test_the_probe_of_a_pod_s_life_notices_a_first_process_that_stands_still(tmp_path: Path) -> None:
    """The node process touches a file every second."""
    alive = tmp_path / "alive"
    command = script(container_of(pod_of(render(), "decode"))["livenessProbe"]).replace("/var/tmp/node", str(tmp_path))

    def lives() -> bool:
        return subprocess.run(["sh", "-c", command], check=False).returncode == 0

    assert not lives()
    alive.touch()
    assert lives()
    os.utime(alive, (time.time() - 50,) * 2)
    assert lives()
    os.utime(alive, (time.time() - 70,) * 2)
    assert not lives()


@every_major
@every_kind
def test_the_raylet_of_a_node_without_workers_is_asked_by_the_kubelet(values: Values, major: int) -> None:
    """The probe uses the raylet's port, which answers health checks of gRPC. The kubelet cannot use TLS there."""

    def probed(objects: tuple[Object, ...]) -> Object:
        found: list[Object] = [
            each for each in pod_of(objects, "controller").spec["containers"] if each["name"] == "ray"
        ]
        assert {"name": "raylet", "containerPort": 6380} in found[0]["ports"]
        return found[0]

    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert probed(render(values, major))[name]["grpc"] == {"port": 6380}
        sealed = ("controller.extraEnv[0].name=RAY_USE_TLS", "controller.extraEnv[0].value=1")
        probe = probed(render(values._replace(sets=(*values.sets, *sealed)), major))[name]
        assert (probe.get("tcpSocket"), probe.get("grpc")) == ({"port": 6380}, None)


@pytest.mark.parametrize(
    ("values", "in_place"),
    [(Values(), False), (IN_PLACE, True), (KINDS["shared"], True), (KINDS["kuberay"], False)],
    ids=["surge", "inPlace", "shared", "kuberay"],
)
def test_the_controller_knows_how_workers_are_replaced(values: Values, in_place: bool, tmp_path: Path) -> None:
    """As the Deployments replace their pods; a change of it restarts the controller."""
    objects = render(values)
    (container,) = (each for each in pod_of(objects, "controller").spec["containers"] if each["name"] == "controller")
    assert loaded(objects, container, tmp_path).kubernetes.in_place is in_place
    for deployment in of_kind(objects, "Deployment"):
        if deployment["metadata"]["labels"]["app.kubernetes.io/component"] in ("prefill", "decode", "worker"):
            rolling = deployment["spec"]["strategy"]["rollingUpdate"]
            assert rolling == (
                {"maxSurge": 0, "maxUnavailable": 1} if in_place else {"maxSurge": "25%", "maxUnavailable": 0}
            )


def test_a_change_of_the_strategy_restarts_the_controller_alone() -> None:
    """Workers that serve are what they were."""
    sets = ("config.cluster.start_timeout_s=901",)
    before, after = render(Values(sets=sets)), render(IN_PLACE)
    for name, is_same in (("baton-controller", False), ("baton-decode", True), ("baton-prefill", True)):
        one, other = (json.dumps(the(found, "Deployment", name)["spec"]["template"]) for found in (before, after))
        assert (one == other) is is_same


@pytest.mark.parametrize(
    ("sets", "rolling", "limits"),
    [
        ((), {"maxSurge": "25%", "maxUnavailable": 0}, ("25%", "0")),
        (("worker.maxSurge=3", "worker.maxUnavailable=10%"), {"maxSurge": 3, "maxUnavailable": "10%"}, ("3", "10%")),
        (
            ("worker.updateStrategy=inPlace", "worker.maxUnavailable=25%"),
            {"maxSurge": 0, "maxUnavailable": "25%"},
            ("0", "25%"),
        ),
        (("worker.updateStrategy=inPlace",), {"maxSurge": 0, "maxUnavailable": 1}, ("0", "1")),
        (("worker.perPod=4", "worker.maxUnavailable=2"), {"maxSurge": 0, "maxUnavailable": 2}, ("0", "8")),
    ],
)
def test_kubernetes_and_the_controller_replace_as_many_workers_at_a_time(
    sets: tuple[str, ...], rolling: Object, limits: tuple[str, str], tmp_path: Path
) -> None:
    """Numbers or percentages. Of pods with several workers Kubernetes counts the pods."""
    objects = render(Values(sets=sets))
    (container,) = (each for each in pod_of(objects, "controller").spec["containers"] if each["name"] == "controller")
    cluster = loaded(objects, container, tmp_path).cluster
    assert (cluster.max_surge, cluster.max_unavailable) == limits
    found = [
        each["spec"]["strategy"]["rollingUpdate"]
        for each in of_kind(objects, "Deployment")
        if each["metadata"]["labels"]["app.kubernetes.io/component"] in ("prefill", "decode", "worker")
    ]
    assert found
    assert all(each == rolling for each in found)

"""Models that sleep without workers, and the autoscalers that wake them; a Gateway that asks the routers' picker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm import schemas
from tests.helm.chart import MATRIX, NAMESPACE, SLEEP, Values, of_kind, pod_of, render, selects, the
from tests.helm.reach import Place, labels_of, place_of, reaches
from tests.helm.test_config import loaded
from tests.helm.test_reach import STRANGER

KEDA = MATRIX["sleep-with-keda"]


def triggers(values: Values, role: str) -> list[dict[str, str]]:
    name = f"{values.name}-{role}" if "baton" in values.name else f"{values.name}-baton-{role}"
    scaled = the(render(values), "ScaledObject", name)["spec"]
    return [each["metadata"] for each in scaled["triggers"]]


def test_a_model_may_sleep(tmp_path: Path) -> None:
    objects = render(MATRIX["sleep"])
    pod = pod_of(objects, "controller")
    config = loaded(objects, pod.containers[-1], tmp_path)
    assert config.autoscale.may_sleep
    assert {pool["spec"]["minReplicas"] for pool in of_kind(objects, "ServingPool")} == {0}
    assert {pool["spec"]["initialReplicas"] for pool in of_kind(objects, "ServingPool")} == {1}


@pytest.mark.parametrize("name", ["sleep", "sleep-with-keda"])
def test_no_budget_asks_for_pods_of_an_empty_pool(name: str) -> None:
    """A Deployment's pods may all be gone. Of a RayCluster's pool one must stay, if there is one."""
    for budget in of_kind(render(MATRIX[name]), "PodDisruptionBudget"):
        assert budget["spec"].get("minAvailable", 1) == budget["spec"].get("maxUnavailable", 1) == 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    for cluster in of_kind(render(MATRIX[name]), "RayCluster"):
        assert {group["minReplicas"] for group in cluster["spec"]["workerGroupSpecs"]} == {0}


def test_the_controller_keeps_what_routers_need_of_a_model_that_sleeps(tmp_path: Path) -> None:
    objects = render(MATRIX["sleep"])
    claim = the(objects, "PersistentVolumeClaim", "baton-controller")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert the(objects, "Deployment", "baton-controller")["spec"]["strategy"] == {"type": "Recreate"}, (
        "one pod at a time"
    )
    pod = pod_of(objects, "controller")
    (volume,) = (each for each in pod.spec["volumes"] if each["name"] == "state")
    assert volume == {"name": "state", "persistentVolumeClaim": {"claimName": "baton-controller"}}
    folder = loaded(objects, pod.containers[-1], tmp_path).cluster.state_file.rpartition("/")[0]
    (mount,) = (each for each in pod.containers[-1]["volumeMounts"] if each["name"] == "state")
    assert mount["mountPath"] == folder
    own = render(Values(sets=(*SLEEP, "controller.persistence.existingClaim=mine")))
    assert not of_kind(own, "PersistentVolumeClaim")
    (volume,) = (each for each in pod_of(own, "controller").spec["volumes"] if each["name"] == "state")
    assert volume["persistentVolumeClaim"] == {"claimName": "mine"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_keda_starts_the_first_worker_by_the_requests_that_wait(role: str) -> None:
    workers, held = triggers(KEDA, role)
    assert workers["query"].startswith(f'max(baton_autoscale_wanted_workers{{pool="{role}", release="baton", ')
    labels = f'release="baton", namespace="{NAMESPACE}", app_kubernetes_io_instance="baton"'
    assert held["query"] == f"max(baton_held_requests{{{labels}}})", "each router reports those at all routers"
    assert float(held["threshold"]) >= 1e6, "many requests that wait do not ask for as many workers"
    assert the(render(KEDA), "ScaledObject", f"baton-{role}")["spec"]["minReplicaCount"] == 0
    (alone,) = triggers(MATRIX["keda"], role)
    assert alone["query"] == workers["query"], "without sleep there is one trigger"


def test_autoscalers_ask_the_routers_of_another_release_about_their_model() -> None:
    joined = ("parts.door=false", "door.release=baton", "config.model.release=v2")
    keda = Values(name="qwen", sets=(*KEDA.sets, *joined))
    labels = f'release="v2", namespace="{NAMESPACE}", app_kubernetes_io_instance="baton"'
    assert all(labels in trigger["query"] for trigger in triggers(keda, "decode"))
    hpa = render(Values(name="qwen", sets=(*MATRIX["pool-hpa"].sets, *joined)))
    (metric,) = the(hpa, "HorizontalPodAutoscaler", "qwen-baton-decode")["spec"]["metrics"]
    assert metric["external"]["metric"]["selector"]["matchLabels"] == {
        "pool": "decode",
        "release": "v2",
        "namespace": NAMESPACE,
        "app_kubernetes_io_instance": "baton",
    }


# -- a Gateway ---------------------------------------------------------------------------------------------------------


def test_a_gateway_asks_the_routers_picker(tmp_path: Path) -> None:
    objects = render(MATRIX["inference-pool"])
    pod = pod_of(objects, "router")
    config = loaded(objects, pod.containers[-1], tmp_path)
    pool = the(objects, "InferencePool", "baton")["spec"]
    assert selects(pool["selector"], pod.labels)
    assert pool["targetPorts"] == [{"number": config.cluster.http_port}]
    service = the(objects, "Service", pool["endpointPickerRef"]["name"])["spec"]
    assert selects({"matchLabels": service["selector"]}, pod.labels)
    (port,) = service["ports"]
    assert port["port"] == pool["endpointPickerRef"]["port"]["number"] == config.router.picker_port
    assert {"name": port["targetPort"], "containerPort": config.router.picker_port} in pod.serving[-1]["ports"]
    assert pool["endpointPickerRef"]["failureMode"] == "FailOpen"
    (http,), (grpc,) = (of_kind(objects, f"{kind}Route") for kind in ("HTTP", "GRPC"))
    backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "baton"}
    assert http["spec"]["rules"][0]["backendRefs"] == [backend]
    assert grpc["spec"]["rules"][0]["backendRefs"] == [{"name": "baton", "port": config.cluster.grpc_port}]
    assert not [error for each in objects for error in schemas.errors(each, "1.33")]


def test_the_picker_is_for_those_who_may_send_requests() -> None:
    gateway = Place(labels={"app": "gateway"}, namespace=labels_of("gateways"))
    client = "networkPolicy.clients[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=gateways"
    objects = render(Values(sets=(*MATRIX["inference-pool"].sets, client)))
    router = place_of(pod_of(objects, "router"))
    for port in (8000, 9002):
        assert reaches(objects, gateway, router, port)
        assert not reaches(objects, STRANGER, router, port)


def test_without_an_inference_pool_no_picker_runs(tmp_path: Path) -> None:
    objects = render(MATRIX["gateway"])
    pod = pod_of(objects, "router")
    assert loaded(objects, pod.containers[-1], tmp_path).router.picker_port == 0
    assert "picker" not in {port["name"] for port in pod.containers[-1]["ports"]}
    assert not of_kind(objects, "InferencePool")


def test_the_gateway_speaks_tls_to_the_routers_of_an_inference_pool() -> None:
    sets = ("tls.existingSecret=certificates", "gateway.backendTLS.caConfigMap=authority")
    (policy,) = of_kind(render(Values(sets=(*MATRIX["inference-pool"].sets, *sets))), "BackendTLSPolicy")
    assert not schemas.errors(policy, "1.33")
    assert [target["kind"] for target in policy["spec"]["targetRefs"]] == ["Service", "InferencePool"]

"""Eighteen clusters as platform teams have them: the chart renders for each, or says in a sentence what cannot be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helm import schemas
from tests.helm.chart import CHART, MAJORS, NAMESPACE, Object, documents, helm, of_kind, pods

KUBERNETES = "1.33"
DRY_RUN = {"enabled": True, "dry_run": True, "max_workers": 8}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    values: dict[str, Any]
    refused: str = ""
    """What helm says; empty: it renders."""
    kube: str = f"{KUBERNETES}.0"
    file: str = ""
    """One of the chart's own, beneath the values."""


CLUSTERS = {
    "EKS: a network load balancer, gp3 and a rack of GPUs": Cluster(
        file="gpu-cluster",
        values={
            "router": {
                "service": {
                    "type": "LoadBalancer",
                    "loadBalancerClass": "service.k8s.aws/nlb",
                    "annotations": {"service.beta.kubernetes.io/aws-load-balancer-scheme": "internal"},
                    "externalTrafficPolicy": "Local",
                },
            },
            "modelCache": {"storageClassName": "efs"},
            "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/baton"}},
            "redis": {"persistence": {"enabled": True, "storageClassName": "gp3"}},
        },
    ),
    "GKE: spot nodes that end after 25 s": Cluster(
        values={
            "worker": {
                "terminationGracePeriodSeconds": 25,
                "nodeSelector": {"cloud.google.com/gke-spot": "true"},
                "tolerations": [{"key": "cloud.google.com/gke-spot", "operator": "Exists"}],
            },
        },
        refused="worker.terminationGracePeriodSeconds (25) is too short",
    ),
    "AKS: a claim of the default class, which is for one node": Cluster(
        values={"modelCache": {"type": "persistentVolumeClaim", "accessModes": ["ReadWriteOnce"]}},
        refused="modelCache.accessModes is ReadWriteOnce",
    ),
    "OpenShift: its DNS, and users that it assigns": Cluster(
        values={
            "networkPolicy": {"dnsPorts": [53, 5353]},
            "podSecurityContext": {"runAsNonRoot": True, "runAsUser": None, "runAsGroup": None, "fsGroup": None},
        },
    ),
    "IPv6 alone": Cluster(
        values={
            "ipFamily": "IPv6",
            "networkPolicy": {"apiServer": {"cidrs": ["::/0"]}},
            "router": {"service": {"ipFamilyPolicy": "SingleStack", "ipFamilies": ["IPv6"]}},
        },
    ),
    "both families": Cluster(
        values={"ipFamily": "DualStack", "router": {"service": {"ipFamilyPolicy": "RequireDualStack"}}}
    ),
    "Istio, whose proxies are in every pod": Cluster(
        values={
            "commonLabels": {"sidecar.istio.io/inject": "true", "team": "ml"},
            "networkPolicy": {"mesh": {"enabled": True, "proxyPorts": [15008]}},
        },
    ),
    "names by wildcards": Cluster(
        values={
            "ingress": {"enabled": True, "host": "*.example.com", "grpcHost": "*.grpc.example.com", "tlsSecret": "tls"},
            "tls": {"issuer": {"name": "ca"}, "dnsNames": ["*.example.com"]},
        },
    ),
    "labels of a house that are the chart's own": Cluster(
        values={"commonLabels": {"app.kubernetes.io/component": "llm"}},
        refused="commonLabels has app.kubernetes.io/component, which the chart sets itself",
    ),
    "names that are words of YAML": Cluster(
        values={
            "pools": {"prefill": {"name": "on"}, "decode": {"name": "12e3"}},
            "clusterSecret": {"existingSecret": "0123"},
            "ray": {"token": {"existingSecret": "yes"}},
        },
    ),
    "KubeRay: machines of eight GPUs": Cluster(
        file="gpu-node",
        values={
            "orchestrator": "kuberay",
            "pools": {
                "prefill": {"initialReplicas": 16, "minReplicas": 4, "maxReplicas": 16},
                "decode": {"initialReplicas": 16, "minReplicas": 4, "maxReplicas": 16},
            },
        },
    ),
    "decode workers of more GPUs than prefill workers": Cluster(
        file="gpu-cluster",
        values={
            "pools": {
                "prefill": {"gpu": {"count": 4}, "engine": {"max_num_batched_tokens": 8192}},
                "decode": {"gpu": {"count": 8}, "engine": {"max_num_seqs": 512}},
            },
        },
    ),
    "KEDA, of an empty pool": Cluster(
        values={
            "config": {"autoscale": DRY_RUN},
            "pools": {"prefill": {"minReplicas": 0, "keda": {"enabled": True, "serverAddress": "http://prometheus"}}},
        },
        refused="routers hold requests for an empty pool only if the model may sleep",
    ),
    "KEDA, of a Thanos that wants a token": Cluster(
        values={
            "config": {"autoscale": DRY_RUN},
            "pools": {
                "decode": {
                    "keda": {
                        "enabled": True,
                        "serverAddress": "https://thanos:9091",
                        "authModes": "bearer",
                        "authenticationRef": {"name": "thanos", "kind": "ClusterTriggerAuthentication"},
                        "fallback": {"failureThreshold": 3, "replicas": 4},
                    },
                },
            },
        },
    ),
    "an old Kubernetes": Cluster(values={}, kube="1.26.0", refused="1.26"),
    "GPUs by dynamic resource allocation": Cluster(
        values={
            "worker": {
                "gpu": {"count": 1, "resource": ""},
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
            },
        },
    ),
    "Argo CD, with Secrets of a vault": Cluster(
        values={
            "clusterSecret": {"existingSecret": "cluster"},
            "ray": {"token": {"existingSecret": "ray"}, "store": {"password": {"existingSecret": "store"}}},
            "router": {"cacheSecret": {"existingSecret": "cache"}},
            "redis": {"passwords": {"existingSecret": "redis"}},
            "crds": {"upgrade": False},
        },
    ),
    "a Gateway that speaks TLS to the routers, and routers by requests": Cluster(
        values={
            "tls": {"existingSecret": "certificates"},
            "gateway": {
                "enabled": True,
                "parentRefs": [{"name": "gateway"}],
                "hostnames": ["*.llm.example"],
                "grpcHostnames": ["grpc.example"],
                "backendTLS": {"caConfigMap": "authority"},
            },
            "router": {
                "autoscaling": {
                    "enabled": True,
                    "targetCPUUtilizationPercentage": 0,
                    "metrics": [
                        {
                            "type": "Pods",
                            "pods": {
                                "metric": {"name": "baton_requests_in_flight"},
                                "target": {"type": "AverageValue", "averageValue": "100"},
                            },
                        }
                    ],
                    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
                },
            },
        },
    ),
}


def rendered(cluster: Cluster, major: int, folder: Path) -> Any:
    """What helm answers."""
    file = folder / "values.yaml"
    file.write_text(json.dumps(cluster.values))  # PyYAML would write 12e3 without quotes
    own = ["--values", str(CHART / f"values-{cluster.file}.yaml")] if cluster.file else []
    arguments = ("--namespace", NAMESPACE, "--kube-version", cluster.kube, *own, "--values", str(file))
    return helm(major, "template", "baton", str(CHART), *arguments)


def objects_of(name: str, folder: Path) -> tuple[Object, ...]:
    done = rendered(CLUSTERS[name], 4, folder)
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def test_there_are_eighteen() -> None:
    assert len(CLUSTERS) == 18


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_the_chart_renders_or_says_why_not(cluster: Cluster, major: int, tmp_path: Path) -> None:
    done, again = (rendered(cluster, major, tmp_path) for _ in range(2))
    if cluster.refused:
        assert done.returncode
        assert cluster.refused in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stdout == again.stdout, "two renderings differ"
    objects = documents(done.stdout)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    wrong = [(each["kind"], error) for each in objects for error in schemas.errors(each, KUBERNETES)]
    for pod in pods(objects):
        if pod.in_raycluster:
            wrong += [(pod.owner, error) for error in schemas.template_errors(pod.template, KUBERNETES)]
    assert not wrong


def test_hooks_and_tests_have_no_proxy_of_a_mesh(tmp_path: Path) -> None:
    """It would never end, and a policy of hooks would cut it off."""
    objects = objects_of("Istio, whose proxies are in every pod", tmp_path)
    for each in of_kind(objects, "Job", "Pod"):
        template = each["spec"]["template"] if each["kind"] == "Job" else each
        labels = template["metadata"]["labels"]
        assert (labels["sidecar.istio.io/inject"], labels["linkerd.io/inject"]) == ("false", "disabled")
    (router,) = (pod for pod in pods(objects) if pod.component == "router")
    assert router.labels["sidecar.istio.io/inject"] == "true"


def test_proxies_of_a_mesh_reach_its_control_plane_and_each_other(tmp_path: Path) -> None:
    objects = objects_of("Istio, whose proxies are in every pod", tmp_path)
    (policy,) = (each for each in of_kind(objects, "NetworkPolicy") if each["metadata"]["name"] == "baton-mesh")
    to_control, to_proxies = policy["spec"]["egress"]
    assert to_control["ports"] == [{"port": 15012, "protocol": "TCP"}]
    namespace = {"kubernetes.io/metadata.name": "istio-system"}
    assert to_control["to"] == [{"namespaceSelector": {"matchLabels": namespace}}]
    assert (
        policy["spec"]["ingress"]
        == [{"ports": to_proxies["ports"]}]
        == [{"ports": [{"port": 15008, "protocol": "TCP"}]}]
    )
    plain = objects_of("both families", tmp_path)
    assert not [each for each in of_kind(plain, "NetworkPolicy") if "mesh" in each["metadata"]["name"]]


def test_claims_bring_gpus_that_no_device_plugin_has(tmp_path: Path) -> None:
    objects = objects_of("GPUs by dynamic resource allocation", tmp_path)
    for pod in (pod for pod in pods(objects) if pod.component in ("prefill", "decode")):
        assert pod.spec["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
        resources = pod.spec["containers"][0]["resources"]
        assert resources["claims"] == [{"name": "gpu"}]
        assert not [name for name in resources["limits"] if "/" in name or not name]
        assert "--num-gpus=1" in pod.spec["containers"][0]["command"]


def test_a_service_has_the_families_that_are_asked_for(tmp_path: Path) -> None:
    (service,) = (
        each for each in of_kind(objects_of("IPv6 alone", tmp_path), "Service") if each["metadata"]["name"] == "baton"
    )
    assert (service["spec"]["ipFamilyPolicy"], service["spec"]["ipFamilies"]) == ("SingleStack", ["IPv6"])


def test_keda_asks_with_a_token_and_knows_what_to_do_without_an_answer(tmp_path: Path) -> None:
    (scaled,) = of_kind(objects_of("KEDA, of a Thanos that wants a token", tmp_path), "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["authenticationRef"] == {"name": "thanos", "kind": "ClusterTriggerAuthentication"}
    assert trigger["metadata"]["authModes"] == "bearer"
    assert scaled["spec"]["fallback"] == {"failureThreshold": 3, "replicas": 4}


def test_a_gateway_finds_the_routers_certificate_good(tmp_path: Path) -> None:
    name = "a Gateway that speaks TLS to the routers, and routers by requests"
    objects = objects_of(name, tmp_path)
    (policy,) = of_kind(objects, "BackendTLSPolicy")
    assert policy["spec"]["targetRefs"] == [{"group": "", "kind": "Service", "name": "baton"}]
    assert policy["spec"]["validation"]["hostname"] == "baton"
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
    assert [metric["type"] for metric in scaler["spec"]["metrics"]] == ["Pods"]
    assert scaler["spec"]["behavior"] == CLUSTERS[name].values["router"]["autoscaling"]["behavior"]


def test_a_vault_s_secrets_leave_nothing_for_the_hooks(tmp_path: Path) -> None:
    objects = objects_of("Argo CD, with Secrets of a vault", tmp_path)
    assert not of_kind(objects, "Job", "Secret")

"""Renders the chart, and finds one's way in what comes out."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from deploy.kubernetes.release_secrets import WantedSecret
from tests.kube.binaries import binaries

Object = dict[str, Any]

CHART = Path(__file__).parents[2] / "helm" / "baton"
NAMESPACE = "serving"
MAJORS = (pytest.param(3, marks=pytest.mark.full), 4)
"""Helm's. Both make the same of the chart (`make chaos`)."""


class Values(NamedTuple):
    file: str = ""
    """One of the chart's own: `values-NAME.yaml`."""
    sets: tuple[str, ...] = ()
    """As for `--set`."""
    name: str = "baton"
    kube: str = ""
    """Kubernetes' version; empty: the one that helm knows."""
    namespace: str = NAMESPACE


SLEEP = (
    *("config.autoscale.enabled=true", "config.autoscale.min_prefill=0", "config.autoscale.min_decode=0"),
    *("pools.prefill.minReplicas=0", "pools.decode.minReplicas=0", "controller.persistence.enabled=true"),
)
"""The sets of a model that may sleep."""
AUTOSCALE = ("config.autoscale.enabled=true", "config.autoscale.dry_run=true", "config.autoscale.max_workers=8")
MONITORING = tuple(f"monitoring.{what}.enabled=true" for what in ("serviceMonitor", "prometheusRule", "dashboards"))
PARTS = ("worker", "router", "controller", "head", "redis", "ray.store")
"""The parts whose pods take values of their own."""
WITH_ENVIRONMENT = ("worker", "router", "controller", "head")
"""Those that run Baton or Ray."""
ONES = ("head", "redis", "ray.store")
"""Those of which there is one pod that clients feel when it goes."""


def scrape(monitor: str) -> tuple[str, ...]:
    """The sets of a monitor with every value that it takes."""
    values = (
        *("enabled=true", "interval=30s", "scrapeTimeout=10s", "honorLabels=true"),
        *("relabelings[0].targetLabel=cluster", "relabelings[0].replacement=a"),
        *("metricRelabelings[0].action=drop", "metricRelabelings[0].regex=go_.*"),
        "metricRelabelings[0].sourceLabels={__name__}",
    )
    return tuple(f"monitoring.{monitor}.{value}" for value in values)


def containers(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The sets by which a part gets an init container, a sidecar and, where it takes one, a whole environment."""
    extra = tuple(
        f"{part}.{kind}[0].{value}"
        for part in parts
        for kind, name in (("initContainers", "extra-first"), ("sidecars", "extra-beside"))
        for value in (f"name={name}", "image=tool:1", "volumeMounts[0].name=tmp", "volumeMounts[0].mountPath=/tmp")
        if "volumeMounts" not in value or part in WITH_ENVIRONMENT
    )
    return (*extra, *(f"{part}.envFrom[0].secretRef.name=own" for part in parts if part in WITH_ENVIRONMENT))


HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
TOGGLES: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "kuberay": ("orchestrator=kuberay",),
    "external-redis": (
        "redis.enabled=false",
        "redis.external.url=redis://redis.example:6380/2",
        "redis.external.port=6380",
    ),
    "redis-with-a-password": ("redis.enabled=false", "redis.external.existingSecret=redis"),
    "own-secrets": (
        *("router.cacheSecret.existingSecret=cache", "ray.token.existingSecret=ray", "huggingFace.existingSecret=hub"),
        "clusterSecret.existingSecret=cluster",
        *("redis.passwords.existingSecret=index", "ray.store.password.existingSecret=store"),
        *("router.tenants.existingSecret=tenants", "test.apiKey.existingSecret=key", "imagePullSecrets[0].name=pull"),
    ),
    "tenants": (f"router.tenants.inline.acme.key_sha256[0]={HASH}", "router.tenants.inline.acme.operator=true"),
    "a-claim": ("modelCache.type=persistentVolumeClaim", "modelCache.storageClassName=fast"),
    "an-existing-claim": (
        *("modelCache.type=persistentVolumeClaim", "modelCache.existingClaim=models"),
        *("modelCache.prefetch.enabled=true", "modelCache.prefetch.nodeSelector.disk=fast"),
        *("config.engine.draft_model=org/small", "huggingFace.existingSecret=hub"),
    ),
    "a-model-image": (
        *("modelCache.type=image", "modelCache.image.reference=models.example/qwen:1", "modelCache.image.path=/qwen/"),
        *("modelCache.image.tokenizerReference=models.example/qwen-tokenizer:1", "config.model.revision=r1"),
    ),
    "a-host-path": ("modelCache.type=hostPath", "modelCache.hostPath=/srv/models", "checks.enabled=false"),
    "ray-store-that-lasts": ("ray.store.existingClaim=ray",),
    "no-ray-store": ("ray.store.enabled=false",),
    "no-ray-store-kuberay": ("ray.store.enabled=false", "orchestrator=kuberay"),
    "router-hpa": ("router.autoscaling.enabled=true",),
    "pool-hpa": (*AUTOSCALE, "pools.decode.hpa.enabled=true", "pools.prefill.hpa.enabled=true"),
    "keda": (
        *(*AUTOSCALE, "pools.decode.keda.enabled=true", "pools.decode.keda.serverAddress=http://prometheus:9090"),
        *("pools.prefill.keda.enabled=true", "pools.prefill.keda.serverAddress=http://prometheus:9090"),
    ),
    "monitoring": MONITORING,
    "pod-monitor": (*scrape("podMonitor"), "monitoring.podMonitor.labels.release=prometheus", "crds.upgrade=false"),
    "ingress": (
        *("ingress.enabled=true", "ingress.host=baton.example", "ingress.grpcHost=grpc.example"),
        *("ingress.tlsSecret=tls", "ingress.className=nginx"),
    ),
    "tls": (
        *("tls.issuer.name=ca", "tls.issuer.kind=ClusterIssuer", "tls.dnsNames[0]=baton.example", *MONITORING),
        "tls.clientCertificates=required",
        "monitoring.prometheusRule.runbookUrl=https://wiki.example/baton/NAME?from=$1",
    ),
    "tls-kuberay": ("tls.existingSecret=certificates", "orchestrator=kuberay", "monitoring.podMonitor.enabled=true"),
    "gateway": (
        *("gateway.enabled=true", "gateway.parentRefs[0].name=endpoint", "gateway.hostnames[0]=baton.example"),
        *("gateway.grpcHostnames[0]=grpc.example", "gateway.timeouts.backendRequest=30m"),
    ),
    "policies": (
        *("networkPolicy.clients[0].namespaceSelector.matchLabels.team=a", "config.telemetry.otlp_endpoint=otlp:4317"),
        "networkPolicy.monitoring[0].namespaceSelector.matchLabels.name=monitoring",
    ),
    "no-policies": ("networkPolicy.enabled=false", "router.podDisruptionBudget.enabled=false"),
    "gpus": (
        *("worker.gpu.count=1", "worker.rdma.enabled=true", "worker.runtimeClassName=nvidia", "pools.decode.name=big"),
        "worker.rdma.asRoot=true",
        *("worker.nodeSelector.gpu=h100", "pools.decode.sharedMemory=8Gi", "pools.decode.paused=true"),
    ),
    "extras": tuple(
        f"{part}.{value}"
        for part in ("router", "head", "worker")
        for value in (
            *("extraEnv[0].name=A", "extraEnv[0].value=b", "extraVolumes[0].name=more", "podLabels.tier=x"),
            *("extraVolumes[0].emptyDir.sizeLimit=1Gi", "extraVolumeMounts[0].name=more"),
            *("extraVolumeMounts[0].mountPath=/more", "podAnnotations.note=y", "priorityClassName=high"),
        )
    ),
}
TOGGLES |= {
    "places": (
        *("image.registry=mirror.example/baton", "image.router.repository=own.example/baton-router"),
        *(
            f"{part}.{value}"
            for part in PARTS
            for value in ("schedulerName=volcano", "dnsConfig.nameservers[0]=10.0.0.1", "doNotEvict=true")
        ),
        *(f"{part}.podDisruptionBudget.enabled=true" for part in ONES),
        *("serviceAccount.existing=own-pods", "serviceAccount.existingController=own-controller"),
        *("serviceAccount.existingHead=own-head", "serviceAccount.controllerRole=false"),
        *("router.service.type=LoadBalancer", "router.service.loadBalancerClass=internal.example/lb"),
        *("router.service.loadBalancerSourceRanges[0]=10.0.0.0/8", "router.service.externalTrafficPolicy=Local"),
        *("router.service.nodePorts.grpc=30051", "router.service.nodePorts.http=30080"),
    ),
    "containers": (
        *containers(PARTS),
        *scrape("serviceMonitor"),
        *("extraObjects[0].apiVersion=v1", "extraObjects[0].kind=ConfigMap", "extraObjects[0].data.a=b"),
        "extraObjects[0].metadata.name=more-{{ .Release.Name }}",
        *("networkPolicy.dnsPorts={53,5353}", "config.telemetry.otlp_endpoint=http://otlp.example:4318/v1/traces"),
    ),
    "containers-kuberay": (
        *("orchestrator=kuberay", "head.doNotEvict=true"),
        *containers(("head", "worker")),
        *(f"{part}.podDisruptionBudget.enabled=true" for part in ONES),
    ),
    "host-network": (
        *(f"{part}.hostNetwork=true" for part in WITH_ENVIRONMENT),
        "networkPolicy.enabled=false",
    ),
}
ORCHESTRATORS = ("deployments", "kuberay")
MATRIX: dict[str, Values] = {
    **{name: Values(sets=sets) for name, sets in TOGGLES.items()},
    **{
        f"{file}-{orchestrator}": Values(file, (f"orchestrator={orchestrator}",))
        for file in ("cpu", "gpu-node", "vllm-node", "gpu-cluster")
        for orchestrator in ORCHESTRATORS
    },
    "everything-kuberay": Values(
        "gpu-cluster", ("orchestrator=kuberay", *TOGGLES["ingress"], *TOGGLES["tenants"], *TOGGLES["policies"])
    ),
    "one-gpu": Values(
        "gpu-node",
        (
            *("config.router.mode=aggregated", "pools.prefill.initialReplicas=0", "pools.prefill.minReplicas=0"),
            *("worker.perPod=1", "pools.decode.initialReplicas=1"),
        ),
    ),
    "inference-pool": Values(sets=(*TOGGLES["gateway"], "gateway.inferencePool.enabled=true")),
    "sleep": Values(sets=SLEEP),
    "sleep-with-keda": Values(sets=(*TOGGLES["keda"], *SLEEP, "orchestrator=kuberay")),
    "another-name": Values(sets=("commonLabels.team=ml",), name="a-release-with-a-name-that-is-as-long-as-can-be-here"),
}
"""What every test of the rendered objects goes through."""
OFTEN = {name for number, (name, values) in enumerate(MATRIX.items()) if values.file or number % 3 == 0}
"""Those that `make test` takes: the chart's files and a third of the others."""


def cases(names: Iterable[str]) -> list[Any]:
    """The values of these names, as a test's parameters."""
    return [pytest.param(MATRIX[name], id=name, marks=[] if name in OFTEN else pytest.mark.full) for name in names]


every_values = pytest.mark.parametrize("values", cases(MATRIX))


def is_shared(values: Values) -> bool:
    """Whether the workers of both pools are in the same pods."""
    return values.file in ("gpu-node", "vllm-node") and "worker.perPod=1" not in values.sets


def helm(major: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([binaries(major).helm, *arguments], capture_output=True, text=True, check=False)


def template(major: int, values: Values) -> subprocess.CompletedProcess[str]:
    arguments = ["template", values.name, str(CHART), "--namespace", values.namespace]
    if values.file:
        arguments += ["--values", str(CHART / f"values-{values.file}.yaml")]
    if values.kube:
        arguments += ["--kube-version", values.kube]
    for item in values.sets:
        arguments += ["--set", item]
    return helm(major, *arguments)


@cache
def render(values: Values = Values(), major: int = 4) -> tuple[Object, ...]:  # noqa: B008
    """The objects, with the Secrets that the chart's hook creates. They are shared: do not change them."""
    done = template(major, values)
    assert done.returncode == 0, done.stderr
    objects = documents(done.stdout)
    return (*objects, *created_secrets(objects))


def created_secrets(objects: tuple[Object, ...]) -> list[Object]:
    """What the hook creates where there is nothing."""
    (command,) = [job.containers[0]["command"] for job in jobs(objects) if job.component == "secrets"] or ([],)
    found = [WantedSecret(**json.loads(text)) for text in command[5:]]
    return [each.fresh(command[4]) for each in found]


def documents(text: str) -> tuple[Object, ...]:
    """Reads objects as they are rendered: thousands of lines, for which PyYAML's own parser takes half a second."""
    return tuple(document for document in yaml.load_all(text, yaml.CSafeLoader) if document)


def of_kind(objects: tuple[Object, ...], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def the(objects: tuple[Object, ...], kind: str, name: str) -> Object:
    (found,) = (each for each in of_kind(objects, kind) if each["metadata"]["name"] == name)
    return found


class Pod(NamedTuple):
    owner: str
    """kind/name, with the group for a RayCluster's."""
    template: Object
    in_raycluster: bool = False

    @property
    def spec(self) -> Object:
        spec: Object = self.template["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def serving(self) -> list[Object]:
        """Those that run on: the others come before and end."""
        sidecars = [each for each in self.spec.get("initContainers", []) if each.get("restartPolicy") == "Always"]
        return [*sidecars, *self.spec["containers"]]


def pods(objects: tuple[Object, ...]) -> list[Pod]:
    """Of every object that makes pods."""
    return list(_pods(objects))


def _pods(objects: tuple[Object, ...]) -> Iterator[Pod]:
    for each in objects:
        owner = f"{each['kind']}/{each['metadata']['name']}"
        if each["kind"] == "Deployment":
            yield Pod(owner, each["spec"]["template"])
        elif each["kind"] == "Pod":
            yield Pod(owner, each)
        elif each["kind"] == "RayCluster":
            yield Pod(f"{owner}/head", each["spec"]["headGroupSpec"]["template"], True)
            for group in each["spec"]["workerGroupSpecs"]:
                yield Pod(f"{owner}/{group['groupName']}", group["template"], True)


def jobs(objects: tuple[Object, ...]) -> list[Pod]:
    """The pods of hooks, which are none of the release's."""
    return [Pod(f"Job/{each['metadata']['name']}", each["spec"]["template"]) for each in of_kind(objects, "Job")]


def pod_of(objects: tuple[Object, ...], component: str) -> Pod:
    (found,) = (pod for pod in pods(objects) if pod.component == component)
    return found


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """Whether a label selector (matchLabels, matchExpressions of In) selects an object with those labels."""
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )

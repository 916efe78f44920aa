"""What the values may say: typos and contradictions are refused with a sentence that names the value."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.helm.chart import (
    AUTOSCALE,
    CHART,
    HASH,
    MAJORS,
    MATRIX,
    SLEEP,
    TOGGLES,
    Values,
    pod_of,
    render,
    template,
)
from tools import chart_docs

SCHEMA = json.loads((CHART / "values.schema.json").read_text())

TYPOS = {
    "a name that is not there": ("router.replica=2", ("router", "replica")),
    "a section that is not there": ("routers.replicas=2", ("routers",)),
    "a setting that is not there": ("config.engine.blok_size=16", ("config", "engine", "blok_size")),
    "a setting of the chart's": ("config.index.redis_url=redis://a:1", ("config", "index", "redis_url")),
    "a word for a number": ("router.replicas=two", ("router", "replicas", "integer")),
    "a number for a switch": ("networkPolicy.enabled=3", ("networkPolicy", "enabled", "boolean")),
    "a word that is none of those known": ("orchestrator=nomad", ("orchestrator", "deployments", "kuberay")),
    "a setting that is none of those known": ("config.router.mode=fast", ("config", "router", "mode", "aggregated")),
    "too few": ("router.replicas=0", ("router", "replicas", "1")),
    "too few of a setting": ("config.engine.max_num_seqs=0", ("config", "engine", "max_num_seqs", "1")),
    "more GPUs than a machine can have": ("worker.gpu.count=17", ("worker", "gpu", "count", "16")),
    "a fraction of a worker": ("pools.decode.maxReplicas=1.5", ("pools", "decode", "maxReplicas", "integer")),
    "an amount that is none": ("worker.sharedMemory=lots", ("worker", "sharedMemory")),
    "a digest that is none": ("image.router.digest=abc", ("image", "router", "digest")),
    "a key instead of its hash": ("router.tenants.inline.acme.key_sha256[0]=secret", ("key_sha256",)),
    "a range that is none": ("router.service.loadBalancerSourceRanges[0]=home", ("loadBalancerSourceRanges",)),
    "a time-out that is none": ("gateway.timeouts.request=long", ("gateway", "timeouts", "request")),
    "a setting that pools have in common": (
        "pools.decode.engine.block_size=32",
        ("pools", "decode", "engine", "block_size"),
    ),
    "a pool's setting that is none": (
        "pools.decode.engine.max_num_seqs=0",
        ("pools", "decode", "engine", "max_num_seqs"),
    ),
    "a surge that is none": ("worker.maxSurge=101%", ("worker", "maxSurge")),
    "resources at the wrong place": ("router.resources.memory=1Gi", ("router", "resources", "memory")),
}
CONTRADICTIONS = {
    "grace below drain": (
        "worker.terminationGracePeriodSeconds=60",
        "worker.terminationGracePeriodSeconds (60) is too",
    ),
    "one pool's grace below drain": ("pools.decode.terminationGracePeriodSeconds=60", "too short for pool decode"),
    "grace below the router's": (
        "router.terminationGracePeriodSeconds=20",
        "router.terminationGracePeriodSeconds (20)",
    ),
    "no Redis": ("redis.enabled=false", "set redis.external.url"),
    "two Redises": ("redis.external.url=redis://a:1", "set redis.enabled=false"),
    "a password in the open": (
        "redis.enabled=false,redis.external.url=redis://:word@a:1",
        "put the URL into a Secret",
    ),
    "two kinds of tenants": (
        f"router.tenants.existingSecret=a,router.tenants.inline.acme.key_sha256[0]={HASH}",
        "router.tenants.existingSecret or router.tenants.inline",
    ),
    "more than most": ("pools.decode.minReplicas=9", "pools.decode.minReplicas (9) exceeds"),
    "a beginning outside": ("pools.prefill.initialReplicas=0", "pools.prefill.initialReplicas (0) is outside"),
    "pools of one name": ("pools.prefill.name=baton-decode", 'both "baton-decode"'),
    "a rank without a GPU": (
        "worker.gpu.count=2,config.engine.tensor_parallel=4",
        "config.engine.tensor_parallel (4) is not worker.gpu.count (2)",
    ),
    "a GPU's model on a CPU": ("config.model.device=cuda", "the prefill pool has no GPUs: set worker.gpu.count"),
    "a CPU's engine on a GPU": (
        "worker.gpu.count=1,config.engine.runner=native",
        "config.engine.runner is native, which computes on CPUs, and the prefill pool has GPUs",
    ),
    "ranks without GPUs": (
        "config.engine.tensor_parallel=4",
        "engine.tensor_parallel of the prefill pool is 4, and it has no GPUs",
    ),
    "RDMA without GPUs": ("worker.rdma.enabled=true", "the prefill pool has RDMA devices and no GPUs"),
    "passwords of a Redis that is another's": (
        "redis.enabled=false,redis.external.url=redis://a:1,redis.passwords.existingSecret=b",
        "redis.passwords.existingSecret is set, but redis.enabled is false",
    ),
    "half of what the autoscaler wants": (
        "config.autoscale.enabled=true,config.autoscale.dry_run=true,config.autoscale.max_workers=8,"
        "pools.decode.keda.enabled=true,pools.decode.keda.serverAddress=http://a,pools.decode.keda.threshold=2.0",
        "pools.decode.keda.threshold is 2.0, and the default query counts workers",
    ),
    "a pool on GPUs beside one on CPUs": (
        "pools.decode.gpu.count=1",
        "pools.prefill.gpu.count is 0 and pools.decode.gpu.count 1: the model of both pools is on GPUs, or on CPUs",
    ),
    "a rank of one pool without a GPU": (
        "worker.gpu.count=1,pools.decode.gpu.count=2,pools.decode.engine.tensor_parallel=4",
        "pools.decode.engine.tensor_parallel (4) is not pools.decode.gpu.count (2)",
    ),
    "ranks of both pools that fit one of them": (
        "worker.gpu.count=1,pools.decode.gpu.count=2,config.engine.tensor_parallel=1",
        "config.engine.tensor_parallel (1) is not pools.decode.gpu.count (2)",
    ),
    "an image for pods that are shared": (
        "worker.perPod=2,pools.decode.image.tag=a",
        "worker.perPod is 2, so both pools have the same pods: pools.decode.image has no effect",
    ),
    "TLS to routers that speak plain text": (
        "gateway.backendTLS.caConfigMap=ca",
        "gateway.backendTLS.caConfigMap is set, and the routers speak plain text",
    ),
    "an autoscaler of routers without a metric": (
        "router.autoscaling.enabled=true,router.autoscaling.targetCPUUtilizationPercentage=0",
        "router.autoscaling has no metric",
    ),
    "a surge of nobody": ("worker.maxSurge=0", "set worker.updateStrategy=inPlace, or a worker.maxSurge of at least 1"),
    "a volume of a Redis that is another's": (
        "redis.enabled=false,redis.external.url=redis://a:1,redis.persistence.enabled=true",
        "redis.persistence.enabled is set, but redis.enabled is false",
    ),
    "a pool's own pods where they are shared": (
        "worker.perPod=2,pools.decode.nodeSelector.gpu=h100",
        "worker.perPod is 2, so both pools have the same pods: pools.decode.nodeSelector has no effect",
    ),
    "an HPA that wakes a model": (
        f"{','.join(SLEEP)},config.autoscale.dry_run=true,config.autoscale.max_workers=4,pools.decode.hpa.enabled=true",
        "an HPA does not start the first worker of an empty pool",
    ),
    "KEDA and a model that does not sleep": (
        f"{','.join(AUTOSCALE)},pools.decode.keda.enabled=true,pools.decode.keda.serverAddress=http://a,"
        "pools.decode.minReplicas=0",
        "routers hold requests for an empty pool only if the model may sleep",
    ),
    "a model that sleeps beside workers": (
        f"{','.join(SLEEP)},pools.prefill.minReplicas=1",
        "pools.prefill.minReplicas is 1: set pools.prefill.minReplicas=0 and pools.decode.minReplicas=0",
    ),
    "a model that sleeps beside workers of one pool": (
        f"{','.join(SLEEP)},config.autoscale.min_prefill=1",
        "set config.autoscale.min_prefill=0 too",
    ),
    "a model that sleeps from the start": (
        f"{','.join(SLEEP)},pools.decode.initialReplicas=0",
        "routers learn of a model from its first worker",
    ),
    "a model that sleeps and is forgotten": (
        f"{','.join(SLEEP)},controller.persistence.enabled=false",
        "set controller.persistence.enabled=true",
    ),
    "a pool of no gateway": (
        "gateway.inferencePool.enabled=true",
        "gateway.inferencePool.enabled needs gateway.enabled",
    ),
    "a pool of routers that speak TLS": (
        f"{','.join(TOGGLES['gateway'])},gateway.inferencePool.enabled=true,tls.existingSecret=a",
        "set gateway.backendTLS.caConfigMap",
    ),
    "two autoscalers": (
        "config.autoscale.enabled=true,pools.decode.hpa.enabled=true",
        "set config.autoscale.dry_run=true",
    ),
    "an autoscaler without a metric": ("pools.decode.hpa.enabled=true", "or give a metric"),
    "an autoscaler of an empty pool": (
        "pools.decode.hpa.enabled=true,pools.decode.hpa.metrics[0].type=External,pools.decode.minReplicas=0",
        "pools.decode.minReplicas must be at least 1",
    ),
    "KEDA without Prometheus": (
        "pools.decode.keda.enabled=true,pools.decode.keda.query=a",
        "pools.decode.keda.serverAddress",
    ),
    "two monitors": (
        "monitoring.serviceMonitor.enabled=true,monitoring.podMonitor.enabled=true",
        "counted twice",
    ),
    "a host path without a path": ("modelCache.type=hostPath", "set modelCache.hostPath"),
    "an ingress without a host": ("ingress.enabled=true", "ingress.host"),
    "routes without a gateway": ("gateway.enabled=true", "gateway.parentRefs"),
    "routes without names": (
        "gateway.enabled=true,gateway.parentRefs[0].name=a,gateway.hostnames[0]=a.example",
        "gateway.grpcHostnames for gRPC",
    ),
    "routes that share a name": (
        "gateway.enabled=true,gateway.parentRefs[0].name=a,gateway.hostnames[0]=a.b.c,gateway.grpcHostnames[0]=*.b.c",
        "gateway.hostnames has a.b.c and gateway.grpcHostnames *.b.c",
    ),
    "a model without a name": ("config.model.id=", "config.model.id is empty"),
    "an image without a name": ("modelCache.type=image", "set modelCache.image.reference"),
    "weights that nobody names": (
        "modelCache.type=image,modelCache.image.reference=a,modelCache.image.tokenizerReference=b",
        "needs config.model.revision",
    ),
    "a Job for folders of its own": ("modelCache.prefetch.enabled=true", "needs modelCache.type persistentVolumeClaim"),
    "policies for pods that they do not know": ("worker.hostNetwork=true", "set networkPolicy.enabled=false"),
    "a pool's, too": ("pools.decode.hostNetwork=true", "pools.decode.hostNetwork: NetworkPolicies"),
    "a class of no balancer": ("router.service.loadBalancerClass=a", "router.service.type is ClusterIP"),
    "ports of no node": ("router.service.nodePorts.http=30000", "are for types NodePort and LoadBalancer"),
    "values of an older chart": ("crds=null", "upgrade with --reset-then-reuse-values"),
    "fewer than least routers": (
        "router.autoscaling.enabled=true,router.autoscaling.minReplicas=9",
        "router.autoscaling.minReplicas (9) exceeds",
    ),
}


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(("wrong", "named"), TYPOS.values(), ids=TYPOS)
def test_the_schema_refuses(major: int, wrong: str, named: tuple[str, ...]) -> None:
    done = template(major, Values(sets=(wrong,)))
    assert done.returncode
    assert "don't meet the specifications of the schema" in done.stderr
    for word in named:
        assert word in done.stderr


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(("wrong", "sentence"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_contradiction_is_refused(major: int, wrong: str, sentence: str) -> None:
    done = template(major, Values(sets=(wrong,)))
    assert done.returncode
    assert sentence in done.stderr


def test_every_value_is_described() -> None:
    nameless = [path for path, node in _values("", SCHEMA) if path and not node.get("description")]
    assert not nameless


def test_every_section_refuses_names_that_it_does_not_know() -> None:
    open_ones = [path for path, node in _values("", SCHEMA) if "properties" in node and _is_open(node)]
    assert not open_ones


def _is_open(node: dict[str, Any]) -> bool:
    return node.get("additionalProperties", True) is True


def _values(path: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Everything that the schema describes, references followed."""
    if "$ref" in node:
        node = {**SCHEMA["definitions"][node["$ref"].removeprefix("#/definitions/")], **node}
    yield path, node
    for name, inner in node.get("properties", {}).items():
        yield from _values(f"{path}.{name}", inner)
    if isinstance(inner := node.get("additionalProperties"), dict) and "properties" in inner:
        yield from ((f"{path}.*.{name}", part) for name, part in inner["properties"].items())


def test_every_value_has_a_default() -> None:
    """But what a pool takes from `worker`, and settings, whose defaults are Baton's own."""
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    leaves = {path for path, node in _values("", SCHEMA) if path and "properties" not in node}
    ours = {path for path in leaves if not path.startswith((".config.", ".global", ".pools."))}
    ours = {path for path in ours if "esources." not in path and ".*." not in path}
    pool = {f".{name}" for name in defaults["pools"]["decode"]}
    ours |= {path for path in leaves if path.startswith(".pools.") and path.endswith(tuple(pool))}
    assert len(ours) > 100
    assert not [path for path in ours if not _has(defaults, path)]


def _has(values: Any, path: str) -> bool:
    for name in path.strip(".").split("."):
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True


def test_what_is_generated_is_today_s() -> None:
    for path, text in chart_docs.written(CHART).items():
        assert path.read_text() == text, f"run `python -m tools.chart_docs`: {path.name} is not today's"


def test_the_readme_names_every_value() -> None:
    readme = (CHART / "README.md").read_text()
    for path, node in _values("", SCHEMA):
        section, _, rest = path.strip(".").partition(".")
        if (
            "properties" in node
            or section in ("", "global", "pools")
            or rest == "testing"
            or "esources." in path
            or ".*." in rest
        ):
            continue
        assert (f"`{path.strip('.')}`" in readme) == (path != ".config.testing")


def test_versions_are_the_package_s() -> None:
    package = tomllib.loads((CHART.parents[1] / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == package["version"]
    (ray,) = (pin for pin in (CHART.parents[1] / "constraints.txt").read_text().splitlines() if pin.startswith("ray=="))
    assert f"ray=={yaml.safe_load((CHART / 'values.yaml').read_text())['ray']['version']}" == ray
    for file, variant in (("gpu-node", "cuda"), ("gpu-cluster", "cuda"), ("vllm-node", "vllm")):
        values = yaml.safe_load((CHART / f"values-{file}.yaml").read_text())
        # The digest is that of the image for CPUs in the chart of a release, and would be taken instead of the tag.
        assert values["image"]["worker"] == {"tag": f"{package['version']}-{variant}", "digest": ""}


def test_a_pool_may_differ_from_the_other() -> None:
    objects = render(MATRIX["gpus"])
    sizes = {
        role: next(v for v in pod_of(objects, role).spec["volumes"] if v["name"] == "shared-memory")
        for role in ("prefill", "decode")
    }
    assert sizes["prefill"]["emptyDir"]["sizeLimit"] == "1Gi"
    assert sizes["decode"]["emptyDir"]["sizeLimit"] == "8Gi"
    assert pod_of(objects, "decode").spec["nodeSelector"] == {"gpu": "h100"}


@pytest.mark.parametrize("major", MAJORS)
def test_large_numbers_stay_numbers(major: int) -> None:
    objects = render(Values(sets=("config.transfer.slot_bytes=10000000",)), major)
    (config,) = (each for each in objects if each["metadata"]["name"] == "baton-config")
    assert "slot_bytes: 10000000\n" in config["data"]["baton.yaml"]

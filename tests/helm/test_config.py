"""Every process gets settings that it takes: the rendered file and environment go through Baton's own reader."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from baton import config as baton_config
from baton.cluster import Role
from baton.config import Config
from baton.errors import ConfigError
from tests.helm.chart import (
    CHART,
    MATRIX,
    NAMESPACE,
    Object,
    Pod,
    Values,
    documents,
    every_values,
    helm,
    jobs,
    of_kind,
    pod_of,
    pods,
    render,
    selects,
    the,
)
from tools.chart_docs import config_schema

POD_IP = "10.1.2.3"
FIELDS = {"metadata.name": "a-pod", "status.podIP": POD_IP}
FOREIGN_URL, FOREIGN_SECRET = "redis://:word@redis.example:6379/0", "what-somebody-else-has-drawn-before"
"""What Secrets hold that are not the chart's."""


def environment(objects: tuple[Object, ...], container: Object) -> dict[str, str]:
    """As the kubelet makes it: in order, with what came before put in."""
    found: dict[str, str] = {}
    for variable in container.get("env", []):
        if "value" in variable:
            value = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], variable["value"])
        elif "fieldRef" in variable["valueFrom"]:
            value = FIELDS[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            value = _secret(objects, variable["valueFrom"]["secretKeyRef"])
        found[variable["name"]] = value
    return found


def _secret(objects: tuple[Object, ...], reference: Object) -> str:
    for each in of_kind(objects, "Secret"):
        if each["metadata"]["name"] == reference["name"]:
            return base64.b64decode(each["data"][reference["key"]]).decode()
    return FOREIGN_URL if reference["key"] == "url" else FOREIGN_SECRET


def loaded(objects: tuple[Object, ...], container: Object, folder: Path) -> Config:
    file = folder / "baton.yaml"
    (config,) = (each for each in of_kind(objects, "ConfigMap") if each["metadata"]["name"].endswith("-config"))
    file.write_text(config["data"]["baton.yaml"])
    return baton_config.load(file, environment(objects, container))


def baton_containers(pod: Pod) -> list[Object]:
    """Those with the configuration."""
    return [
        each
        for each in pod.containers
        if any(mount["mountPath"] == "/etc/baton" for mount in each.get("volumeMounts", []))
        and each["name"] != "settings"  # it copies them
    ]


@every_values
def test_every_container_takes_its_settings(values: Values, tmp_path: Path) -> None:
    objects = render(values)
    count = 0
    for pod in pods(objects):
        for container in baton_containers(pod):
            config = loaded(objects, container, tmp_path)
            is_model = container["name"] == "model"
            assert bool(urlsplit(config.index.redis_url).password) == (
                not is_model and values != MATRIX["external-redis"]
            ), "who needs no password has none"
            assert config.cluster.cache_dir == "/var/cache/baton"
            assert config.kubernetes.namespace == NAMESPACE
            count += 1
    assert count >= 8


def test_the_router_listens_to_all_and_says_where_it_is(tmp_path: Path) -> None:
    objects = render(MATRIX["tenants"])
    pod = pod_of(objects, "router")
    config = loaded(objects, pod.spec["containers"][0], tmp_path)
    assert config.cluster.host == "0.0.0.0"
    assert config.cluster.advertise_host == POD_IP
    assert config.router.id == "a-pod"
    assert len(config.router.cache_secret) >= 32
    ports = {port["name"]: port["containerPort"] for port in pod.spec["containers"][0]["ports"]}
    assert ports == {
        "grpc": config.cluster.grpc_port,
        "http": config.cluster.http_port,
        "metrics": config.telemetry.port,
    }
    assert config.telemetry.host == "0.0.0.0"
    folder, file = config.router.tenants_file.rsplit("/", 1)
    (mount,) = (each for each in pod.spec["containers"][0]["volumeMounts"] if each["mountPath"] == folder)
    (volume,) = (each for each in pod.spec["volumes"] if each["name"] == mount["name"])
    assert [item["path"] for item in volume["secret"]["items"]] == [file]


def test_the_tenants_of_the_values_are_ones_that_the_router_takes(tmp_path: Path) -> None:
    from router.admission.tenants import TenantBook

    objects = render(MATRIX["tenants"])
    file = tmp_path / "tenants.yaml"
    file.write_bytes(base64.b64decode(the(objects, "Secret", "baton-tenants")["data"]["tenants.yaml"]))
    assert TenantBook.load(file).slo_classes == {""}


@pytest.mark.parametrize("orchestrator", ["defaults", "kuberay"])
def test_the_controller_knows_its_cluster(orchestrator: str, tmp_path: Path) -> None:
    objects = render(MATRIX[orchestrator])
    pod = pod_of(objects, "controller")
    (container,) = (each for each in pod.containers if each["name"] == "controller")
    config = loaded(objects, container, tmp_path)
    assert config.cluster.name == "baton"
    assert config.cluster.ray_address == "baton-head.serving.svc:6379"
    assert config.cluster.controller_host == "0.0.0.0"
    assert config.cluster.advertise_host == POD_IP
    assert container["ports"] == [{"name": "controller", "containerPort": config.cluster.controller_port}]
    assert container["readinessProbe"]["grpc"]["port"] == config.cluster.controller_port
    assert container["livenessProbe"]["grpc"]["port"] == config.cluster.controller_port
    folder = config.cluster.state_file.rsplit("/", 1)[0]
    assert folder in [mount["mountPath"] for mount in container["volumeMounts"]]
    pools = {pool["spec"]["role"]: pool["metadata"]["name"] for pool in of_kind(objects, "ServingPool")}
    assert pools == {"prefill": config.kubernetes.prefill_pool, "decode": config.kubernetes.decode_pool}
    deployments = (config.kubernetes.prefill_deployment, config.kubernetes.decode_deployment)
    if orchestrator == "kuberay":
        assert deployments == ("", "")
    else:
        assert [the(objects, "Deployment", name)["metadata"]["name"] for name in deployments]


def test_a_worker_is_told_where_ray_is(tmp_path: Path) -> None:
    """`baton leave` asks it; the pod's own node has no address of the head."""
    for values in ("defaults", "kuberay"):
        objects = render(MATRIX[values])
        container = pod_of(objects, "decode").spec["containers"][0]
        assert loaded(objects, container, tmp_path).cluster.ray_address == "baton-head.serving.svc:6379"


def test_gpus_of_a_worker_are_those_of_its_pod(tmp_path: Path) -> None:
    objects = render(MATRIX["gpus"])
    container = pod_of(objects, "decode").spec["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert loaded(objects, container, tmp_path).cluster.gpus_per_worker == 1
    assert "--num-gpus=1" in container["command"]


@pytest.mark.parametrize("orchestrator", ["deployments", "kuberay"])
def test_a_machine_with_gpus_is_one_pod_for_the_workers_of_both_pools(orchestrator: str, tmp_path: Path) -> None:
    """NCCL takes pods for machines: only within a pod does KV go over NVLink."""
    objects = render(MATRIX[f"gpu-node-{orchestrator}"])
    pod = pod_of(objects, "worker")
    assert {each.component for each in pods(objects)}.isdisjoint({"prefill", "decode"})
    container = pod.spec["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    config = loaded(objects, container, tmp_path)
    assert (config.engine.tensor_parallel, config.cluster.gpus_per_worker) == (1, 1)
    assert config.kubernetes.workers_per_pod == 8
    names = {config.kubernetes.prefill_deployment, config.kubernetes.decode_deployment}
    if orchestrator == "deployments":
        assert names == {"baton-worker"}
        assert '--resources={"baton_worker": 8}' in container["command"]
        assert "--num-gpus=8" in container["command"]
        assert not [word for word in container["command"] if word.startswith("--labels")], "for workers of both pools"
        strategy = the(objects, "Deployment", "baton-worker")["spec"]["strategy"]["rollingUpdate"]
        assert strategy == {"maxSurge": 0, "maxUnavailable": 1}, "a machine has no room for a second pod"
        (rule,) = (each for each in the(objects, "Role", "baton-controller")["rules"] if each["verbs"] == ["get"])
        assert rule["resourceNames"] == ["baton-worker"]
    else:
        (cluster,) = of_kind(objects, "RayCluster")
        (group,) = cluster["spec"]["workerGroupSpecs"]
        start = group["rayStartParams"]
        assert json.loads(json.loads(start["resources"].strip("'"))) == {"baton_worker": 8}
        assert start["num-gpus"] == "8"
        assert "labels" not in group, "for workers of both pools"
        assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 3)
    (budget,) = (
        each for each in of_kind(objects, "PodDisruptionBudget") if selects(each["spec"]["selector"], pod.labels)
    )
    assert budget["metadata"]["name"] == "baton-worker"


@pytest.mark.parametrize(
    ("sets", "warns"),
    [
        (("worker.gpu.count=1",), True),
        (("worker.gpu.count=1", "worker.rdma.enabled=true"), False),
        (("worker.gpu.count=1", "worker.perPod=2"), False),
        ((), False),
    ],
)
def test_the_notes_say_where_kv_is_slow(sets: tuple[str, ...], warns: bool) -> None:
    options = [word for item in sets for word in ("--set", item)]
    done = helm(4, "install", "baton", str(CHART), "--dry-run=client", *options)
    assert done.returncode == 0, done.stderr
    assert ("NCCL treats pods as separate machines" in done.stdout) == warns


def test_workers_are_root_only_where_that_is_asked_for() -> None:
    """For another user an added capability has no effect."""
    for name, context in (("gpu-cluster-deployments", {}), ("gpus", {"runAsUser": 0, "runAsNonRoot": False})):
        for container in pod_of(render(MATRIX[name]), "decode").containers:
            found = container["securityContext"]
            assert {key: found[key] for key in ("runAsUser", "runAsNonRoot") if key in found} == context
            assert found["capabilities"].get("add", []) == (["IPC_LOCK"] if context else [])


def test_a_worker_has_a_rank_for_each_of_its_gpus(tmp_path: Path) -> None:
    objects = render(Values("gpu-node", ("worker.gpu.count=4", "worker.perPod=1")))
    container = pod_of(objects, "decode").spec["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    config = loaded(objects, container, tmp_path)
    assert (config.engine.tensor_parallel, config.cluster.gpus_per_worker) == (4, 4)
    two = pod_of(render(Values("gpu-node", ("worker.gpu.count=4", "worker.perPod=2"))), "worker").spec["containers"][0]
    assert two["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert '--resources={"baton_worker": 2}' in two["command"]


@pytest.mark.parametrize(
    ("sets", "num_workers", "gpus"),
    [
        ((), 2, 4),
        (
            ("worker.gpu.count=1", "worker.perPod=8", "pools.decode.initialReplicas=8", "pools.decode.maxReplicas=8"),
            8,
            1,
        ),
    ],
)
def test_a_machine_whose_workers_compute_with_vllm(
    sets: tuple[str, ...], num_workers: int, gpus: int, tmp_path: Path
) -> None:
    objects = render(Values("vllm-node", sets))
    container = pod_of(objects, "worker").spec["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert f'--resources={{"baton_worker": {num_workers}}}' in container["command"]
    config = loaded(objects, container, tmp_path)
    assert (config.engine.runner, config.engine.vllm_python) == ("vllm", "/usr/bin/python3")
    assert (config.engine.tensor_parallel, config.cluster.gpus_per_worker) == (gpus, gpus)
    assert config.router.mode == "aggregated"
    sizes = {each["metadata"]["name"]: each["spec"]["initialReplicas"] for each in of_kind(objects, "ServingPool")}
    assert sizes == {"baton-prefill": 0, "baton-decode": num_workers}
    images = {
        pod_of(objects, component).spec["containers"][0]["image"] for component in ("worker", "head", "controller")
    }
    assert images == {"baton-worker:0.1.0-vllm"}, "Ray wants one Python"
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
    assert the(objects, "Deployment", "baton-worker")["spec"]["progressDeadlineSeconds"] > 1800
    (memory,) = (v for v in pod_of(objects, "worker").spec["volumes"] if v["name"] == "shared-memory")
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}


def test_settings_that_the_schema_offers_are_taken(tmp_path: Path) -> None:
    """All of them at once, at their defaults: Baton then has its own defaults."""
    settings = {
        section: {
            name: field["default"] for name, field in schema["properties"].items() if field["default"] is not None
        }
        for section, schema in config_schema()["properties"].items()
        if section != "testing"
    }
    for values in settings["router"]["slo_classes"].values():
        values.pop("e2e_ms", None)  # JSON knows no infinity
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps({"config": settings}))
    done = helm(4, "template", "baton", str(CHART), "--namespace", NAMESPACE, "--values", str(file))
    assert done.returncode == 0, done.stderr
    objects = documents(done.stdout)
    config = loaded(objects, pod_of(objects, "router").spec["containers"][0], tmp_path)
    default = Config()
    config = dataclasses.replace(
        config,
        telemetry=dataclasses.replace(config.telemetry, host=default.telemetry.host, port=default.telemetry.port),
        model=dataclasses.replace(config.model, release=default.model.release),
    )  # the chart's own
    for section in ("engine", "transfer", "autoscale", "telemetry", "model"):
        assert getattr(config, section) == getattr(default, section)


def test_times_are_baton_s_own_unless_set() -> None:
    cluster = yaml.safe_load((CHART / "values.yaml").read_text())["config"]["cluster"]
    default = Config().cluster
    assert cluster == {
        name: getattr(default, name) for name in ("drain_timeout_s", "start_timeout_s", "stop_timeout_s")
    }


def test_a_router_s_grace_is_longer_than_its_drain(tmp_path: Path) -> None:
    objects = render()
    pod = pod_of(objects, "router")
    config = loaded(objects, pod.spec["containers"][0], tmp_path)
    sleep = int(pod.spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod.spec["terminationGracePeriodSeconds"] > sleep + config.router.drain_timeout_s


@pytest.mark.parametrize("sleep_s", [0, 1, 5, 30])
def test_clients_leave_a_router_before_it_stops(sleep_s: int, tmp_path: Path) -> None:
    objects = render(Values(sets=(f"router.preStopSeconds={sleep_s}",)))
    pod = pod_of(objects, "router")
    config = loaded(objects, pod.spec["containers"][0], tmp_path)
    if sleep_s:
        assert 1.1 * config.router.max_connection_age_s < sleep_s, "a call on an old connection may be lost"
    else:
        assert config.router.max_connection_age_s == math.inf


def test_service_links_are_off() -> None:
    """A Service called `baton` would put BATON_PORT into the environment, and Baton takes no unknown settings."""
    for name in ("defaults", "kuberay"):
        assert all(pod.spec["enableServiceLinks"] is False for pod in pods(render(MATRIX[name])))
    with pytest.raises(ConfigError, match="BATON_PORT"):
        baton_config.load(None, {"BATON_PORT": "tcp://10.0.0.1:50051"})


@pytest.mark.parametrize("orchestrator", ["deployments", "kuberay"])
def test_pools_have_engines_images_and_gpus_of_their_own(orchestrator: str, tmp_path: Path) -> None:
    """Two ranks on two GPUs for decode workers, one for prefill workers."""
    sets = (
        *(
            "worker.gpu.count=1",
            "pools.decode.gpu.count=2",
            "pools.decode.image.tag=v2",
            f"orchestrator={orchestrator}",
        ),
        *(
            "pools.decode.engine.max_num_seqs=64",
            "pools.prefill.engine.kv_dtype=bfloat16",
            "config.engine.max_num_seqs=8",
        ),
        "pools.decode.engine.kv_dtype=float32",
    )
    objects = render(Values(sets=sets))
    for component in ("router", "controller", "prefill", "decode"):
        container = baton_containers(pod_of(objects, component))[-1]
        config = loaded(objects, container, tmp_path)
        engines = {pool: config.engine_of(pool) for pool in Role}
        assert [engines[pool].tensor_parallel for pool in Role] == [1, 2]
        assert [config.gpus_per_worker(pool) for pool in Role] == [1, 2]
        assert [engines[pool].max_num_seqs for pool in Role] == [8, 64]
        assert [engines[pool].kv_dtype for pool in Role] == ["bfloat16", "float32"]
    for component, gpus, tag in (("prefill", 1, "0.1.0"), ("decode", 2, "v2")):
        pod = pod_of(objects, component)
        assert pod.spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert {each["image"] for each in pod.containers} == {f"baton-worker:{tag}"}
        if orchestrator == "deployments":
            assert f"--num-gpus={gpus}" in pod.spec["containers"][0]["command"]
    if orchestrator == "kuberay":
        (cluster,) = of_kind(objects, "RayCluster")
        assert [group["rayStartParams"]["num-gpus"] for group in cluster["spec"]["workerGroupSpecs"]] == ["1", "2"]
    assert pod_of(objects, "head").containers[0]["image"] == "baton-worker:0.1.0"


def test_ranks_on_cpus_differ_without_gpus(tmp_path: Path) -> None:
    sets = ("config.model.device=cpu", "pools.decode.engine.tensor_parallel=2")
    objects = render(Values(sets=sets))
    config = loaded(objects, baton_containers(pod_of(objects, "decode"))[-1], tmp_path)
    assert [config.engine_of(pool).tensor_parallel for pool in Role] == [1, 2]
    assert config.cluster.gpus_per_worker == 0


def test_a_pool_s_image_by_its_tag_is_not_that_of_the_other_one_s_digest() -> None:
    digest = f"sha256:{'a' * 64}"
    objects = render(Values(sets=(f"image.worker.digest={digest}", "pools.decode.image.tag=v2")))
    images = {role: pod_of(objects, role).spec["containers"][0]["image"] for role in ("prefill", "decode")}
    assert images == {"prefill": f"baton-worker@{digest}", "decode": "baton-worker:v2"}


def test_the_job_that_fetches_models_knows_those_of_each_pool() -> None:
    sets = (*MATRIX["an-existing-claim"].sets, "pools.decode.engine.draft_model=org/other")
    (job,) = (each for each in jobs(render(Values(sets=sets))) if each.component == "prefetch")
    values = {variable["name"]: variable.get("value") for variable in job.containers[0]["env"]}
    assert json.loads(values["BATON_POOLS_DECODE"] or "") == {"engine": {"draft_model": "org/other"}}
    assert "BATON_POOLS_PREFILL" not in values


@pytest.mark.parametrize(
    ("values", "budgets"),
    [
        (MATRIX["kuberay"], {"prefill": "baton-prefill", "decode": "baton-decode"}),
        (MATRIX["gpu-node-kuberay"], {"prefill": "baton-worker", "decode": "baton-worker"}),
        (MATRIX["defaults"], {"prefill": "", "decode": ""}),
        (
            Values(sets=("orchestrator=kuberay", "pools.decode.podDisruptionBudget.enabled=false")),
            {"prefill": "baton-prefill", "decode": ""},
        ),
    ],
)
def test_the_controller_keeps_the_budgets_that_kubernetes_cannot_count(
    values: Values, budgets: dict[str, str], tmp_path: Path
) -> None:
    """Of a RayCluster's pods. It may write those and no others."""
    objects = render(values)
    (container,) = (each for each in pod_of(objects, "controller").containers if each["name"] == "controller")
    kubernetes = loaded(objects, container, tmp_path).kubernetes
    assert {"prefill": kubernetes.prefill_budget, "decode": kubernetes.decode_budget} == budgets
    rules = the(objects, "Role", "baton-controller")["rules"]
    allowed = [rule["resourceNames"] for rule in rules if rule["resources"] == ["poddisruptionbudgets"]]
    assert allowed == ([sorted(names, reverse=True)] if (names := {*budgets.values()} - {""}) else [])
    assert names <= {each["metadata"]["name"] for each in of_kind(objects, "PodDisruptionBudget")}

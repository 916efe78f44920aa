"""Values of a house's own: each of them stands in the object that it is for, and in no other."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from tests.helm.chart import (
    CHART,
    HASH,
    MATRIX,
    ONES,
    WITH_ENVIRONMENT,
    Object,
    Pod,
    Values,
    documents,
    helm,
    jobs,
    of_kind,
    pod_of,
    pods,
    render,
    the,
)

OLD_CLUSTER = "1.27.0"
DO_NOT_EVICT = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
COMPONENTS = {
    "worker": ("prefill", "decode"),
    "router": ("router",),
    "controller": ("controller",),
    "head": ("head",),
    "redis": ("redis",),
    "ray.store": ("ray-store",),
}
"""A part of the values -> its pods' components."""


def parts(objects: tuple[Object, ...], *names: str) -> Iterator[Pod]:
    yield from (pod_of(objects, component) for name in names for component in COMPONENTS[name])


def lasting(objects: tuple[Object, ...]) -> list[Pod]:
    """All pods but those of `helm test`."""
    return [pod for pod in pods(objects) if pod.component != "test"]


def volume_of(pod: Pod, name: str) -> Object:
    found: Object
    (found,) = (volume for volume in pod.spec["volumes"] if volume["name"] == name)
    return found


def test_a_registry_stands_before_all_images_but_those_of_another_host() -> None:
    objects = render(MATRIX["places"])
    images = {each["image"] for pod in [*pods(objects), *jobs(objects)] for each in pod.containers}
    assert images == {
        "own.example/baton-router:0.1.0",
        "mirror.example/baton/baton-worker:0.1.0",
        "mirror.example/baton/library/redis:7.2.11-alpine",
    }
    by_digest = Values(sets=("image.registry=m.example:5000/", f"image.redis.digest=sha256:{HASH}"))
    redis = pod_of(render(by_digest), "redis").spec["containers"][0]["image"]
    assert redis == f"m.example:5000/library/redis@sha256:{HASH}"


def test_every_pod_has_its_scheduler_its_names_and_its_marks() -> None:
    objects, plain = render(MATRIX["places"]), render()
    for pod in lasting(objects):
        assert pod.spec["schedulerName"] == "volcano"
        assert pod.spec["dnsConfig"] == {"nameservers": ["10.0.0.1"]}
        assert DO_NOT_EVICT.items() <= pod.template["metadata"]["annotations"].items()
    for pod in lasting(plain):
        assert not {"schedulerName", "dnsConfig", "hostNetwork"} & pod.spec.keys()
        assert not DO_NOT_EVICT.keys() & pod.template["metadata"].get("annotations", {}).keys()
    big = render(MATRIX["gpu-cluster-deployments"])
    marked = {
        pod.component for pod in pods(big) if DO_NOT_EVICT.keys() & pod.template["metadata"]["annotations"].keys()
    }
    assert marked == {"head", "ray-store", "redis"}


@pytest.mark.parametrize("name", ["places", "containers-kuberay"])
def test_the_only_pod_of_a_kind_has_a_budget_where_that_is_asked_for(name: str) -> None:
    objects = render(MATRIX[name])
    for part in ONES:
        (component,) = COMPONENTS[part]
        spec = the(objects, "PodDisruptionBudget", f"baton-{component}")["spec"]
        assert (spec["minAvailable"], spec["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
        assert spec["selector"]["matchLabels"].items() <= pod_of(objects, component).labels.items()
    assert {each["metadata"]["name"] for each in of_kind(render(), "PodDisruptionBudget")} == {
        *("baton-router", "baton-prefill", "baton-decode")
    }


def test_accounts_that_are_there_are_taken_and_none_is_made() -> None:
    objects = render(MATRIX["places"])
    own = {"controller": "own-controller", "head": "own-head"}
    for pod in pods(objects):
        assert pod.spec["serviceAccountName"] == own.get(pod.component, "own-pods")
    assert {each["metadata"]["annotations"].get("helm.sh/hook") for each in of_kind(objects, "ServiceAccount")} == {
        "pre-install,pre-upgrade"
    }
    roles = of_kind(objects, "Role", "RoleBinding")
    assert all("helm.sh/hook" in each["metadata"].get("annotations", {}) for each in roles)
    bound = render(Values(sets=("serviceAccount.existingController=own-controller",)))
    (subject,) = the(bound, "RoleBinding", "baton-controller")["subjects"]
    assert subject["name"] == pod_of(bound, "controller").spec["serviceAccountName"] == "own-controller"


def test_the_service_is_of_the_class_and_has_the_ports_that_are_named() -> None:
    spec = the(render(MATRIX["places"]), "Service", "baton")["spec"]
    assert spec["type"] == "LoadBalancer"
    assert spec["loadBalancerClass"] == "internal.example/lb"
    assert spec["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    assert spec["externalTrafficPolicy"] == "Local"
    assert {port["name"]: port["nodePort"] for port in spec["ports"]} == {"grpc": 30051, "http": 30080}
    plain = the(render(), "Service", "baton")["spec"]
    assert set(plain) == {"type", "selector", "ports"}
    assert not any("nodePort" in port for port in plain["ports"])


def test_a_part_s_containers_are_in_its_pods_and_its_environment_in_its_own_containers() -> None:
    objects = render(MATRIX["containers"])
    for pod in lasting(objects):
        first = [each["name"] for each in pod.spec["initContainers"]]
        assert "extra-first" in first
        if "model" in first:
            assert first.index("extra-first") < first.index("model"), "it may bring the model"
            assert first.index("keys") < first.index("extra-first")
        names = [each["name"] for each in pod.spec["containers"]]
        assert names[-1] == "extra-beside"
        assert names[0] != "extra-beside", "KubeRay takes the first one for Ray's"
    for pod in parts(objects, *WITH_ENVIRONMENT):
        for container in pod.containers:
            ours = not container["name"].startswith("extra-") and not container["name"].endswith(("keys", "settings"))
            assert container.get("envFrom") == ([{"secretRef": {"name": "own"}}] if ours else None), container["name"]
    assert "envFrom" not in json.dumps(pod_of(objects, "redis").template)
    head = pod_of(render(MATRIX["containers-kuberay"]), "head")
    assert [each["name"] for each in head.spec["containers"]] == ["ray", "extra-beside"]


def test_further_objects_are_the_release_s_and_their_templates_are_filled_in() -> None:
    assert the(render(MATRIX["containers"]), "ConfigMap", "more-baton")["data"] == {"a": "b"}


def test_a_pod_on_its_node_s_network_has_the_cluster_s_names_and_the_node_s_ray_ports() -> None:
    objects = render(MATRIX["host-network"])
    for pod in parts(objects, *WITH_ENVIRONMENT):
        assert pod.spec["hostNetwork"] is True
        assert pod.spec["dnsPolicy"] == "ClusterFirstWithHostNet"
        declared = {port["name"] for container in pod.containers for port in container.get("ports", [])}
        # The scheduler puts no two pods with one port on one node.
        assert ("raylet" in declared) == (pod.component != "router")
    for pod in parts(objects, "redis", "ray.store"):
        assert "hostNetwork" not in pod.spec


def test_the_monitor_has_all_that_its_values_say() -> None:
    service = the(render(MATRIX["containers"]), "ServiceMonitor", "baton")["spec"]
    pod = the(render(MATRIX["pod-monitor"]), "PodMonitor", "baton")["spec"]
    assert service["targetLabels"] == pod["podTargetLabels"] == ["app.kubernetes.io/instance"]
    for (endpoint,) in (service["endpoints"], pod["podMetricsEndpoints"]):
        assert endpoint == {
            "port": "metrics",
            "path": "/metrics",
            "interval": "30s",
            "scrapeTimeout": "10s",
            "honorLabels": True,
            "relabelings": [{"targetLabel": "cluster", "replacement": "a"}],
            "metricRelabelings": [{"action": "drop", "regex": "go_.*", "sourceLabels": ["__name__"]}],
        }


def test_two_releases_of_a_namespace_do_not_size_each_other_s_pools() -> None:
    """Autoscalers ask for the label that the monitors take from the objects of a release."""
    for name in ("baton", "other"):
        keda, hpa = (render(MATRIX[values]._replace(name=name)) for values in ("keda", "pool-hpa"))
        for each in of_kind(keda, "ScaledObject"):
            (trigger,) = each["spec"]["triggers"]
            assert f'namespace="serving", app_kubernetes_io_instance="{name}"' in trigger["metadata"]["query"]
        for each in of_kind(hpa, "HorizontalPodAutoscaler"):
            metric = each["spec"]["metrics"][0]["external"]["metric"]
            assert metric["selector"]["matchLabels"]["app_kubernetes_io_instance"] == name
        assert pod_of(keda, "router").labels["app.kubernetes.io/instance"] == name


def test_policies_let_names_and_traces_out_by_their_ports() -> None:
    objects = render(MATRIX["containers"])
    ports = {
        name: {
            (port["port"], port["protocol"])
            for port in the(objects, "NetworkPolicy", name)["spec"]["egress"][0]["ports"]
        }
        for name in ("baton-names", "baton-outside")
    }
    assert ports["baton-names"] == {(port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")}
    assert ports["baton-outside"] == {(443, "TCP"), (4318, "TCP")}, "a URL may have a path"


def test_routes_have_names_of_their_own_and_http_a_time_out() -> None:
    objects = render(MATRIX["gateway"])
    http, grpc = (the(objects, kind, "baton")["spec"] for kind in ("HTTPRoute", "GRPCRoute"))
    assert (http["hostnames"], grpc["hostnames"]) == (["baton.example"], ["grpc.example"])
    assert http["rules"][0]["timeouts"] == {"request": "1h", "backendRequest": "30m"}


def test_only_workers_fetch_weights() -> None:
    for values in (MATRIX["defaults"], MATRIX["kuberay"], MATRIX["gpu-node-deployments"]):
        for pod in pods(render(values)):
            for container in pod.containers:
                if container["name"] == "model":
                    with_weights = "--no-weights" not in container["command"]
                    assert with_weights == (pod.component in ("prefill", "decode", "worker"))


def test_a_pod_asks_its_node_for_the_room_that_its_model_takes() -> None:
    """Where each has its own; a volume's room is not the node's."""

    def asked(values: Values) -> dict[str, str]:
        return {
            pod.component: each["resources"].get("requests", {}).get("ephemeral-storage", "")
            for pod in pods(render(values))
            for each in pod.serving
            if each["name"] in ("router", "controller", "worker")
        }

    own = {"router": "512Mi", "controller": "512Mi", "prefill": "2Gi", "decode": "2Gi"}
    assert asked(Values()) == own
    more = ("modelCache.ephemeralStorage.weights=80Gi", "router.resources.requests.ephemeral-storage=1Gi")
    assert asked(Values(sets=more)) == own | {"router": "1Gi", "prefill": "80Gi", "decode": "80Gi"}
    for name in ("a-claim", "a-host-path", "a-model-image"):
        assert set(asked(MATRIX[name]).values()) == {""}


def test_models_outlive_the_release_unless_that_is_not_wanted() -> None:
    kept = the(render(MATRIX["a-claim"]), "PersistentVolumeClaim", "baton-models")
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    lost = render(Values(sets=(*MATRIX["a-claim"].sets, "modelCache.keep=false")))
    assert "annotations" not in the(lost, "PersistentVolumeClaim", "baton-models")["metadata"]


def test_an_image_s_model_is_where_the_settings_say_and_routers_have_it_without_weights() -> None:
    objects = render(MATRIX["a-model-image"])
    config = yaml.safe_load(the(objects, "ConfigMap", "baton-config")["data"]["baton.yaml"])
    assert config["model"]["path"] == "/var/lib/baton-model/qwen"
    for pod in parts(objects, "worker", "router", "controller"):
        reference = "qwen:1" if pod.component in ("prefill", "decode") else "qwen-tokenizer:1"
        image = {"reference": f"models.example/{reference}", "pullPolicy": "IfNotPresent"}
        assert volume_of(pod, "model")["image"] == image
        ours = [each for each in pod.containers if each["name"] in ("model", "check", pod.component, "worker")]
        assert len(ours) == 3
        for container in ours:
            assert {"name": "model", "mountPath": "/var/lib/baton-model", "readOnly": True} in container["volumeMounts"]
    whole = render(Values(sets=MATRIX["a-model-image"].sets[:2]))
    assert volume_of(pod_of(whole, "router"), "model")["image"]["reference"] == "models.example/qwen:1"
    assert '"/var/lib/baton-model"' in the(whole, "ConfigMap", "baton-config")["data"]["baton.yaml"]
    done = helm(4, "template", "baton", str(CHART), "--kube-version", OLD_CLUSTER, "--set", "modelCache.type=image")
    assert done.returncode


def test_a_job_fetches_the_model_of_these_values_before_the_upgrade() -> None:
    """The ConfigMap is that of the version before: the settings are in its environment."""
    (job,) = (each for each in jobs(render(MATRIX["an-existing-claim"])) if each.component == "prefetch")
    (container,) = job.containers
    assert container["command"] == ["baton", "run", "model"], "with weights"
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert values["BATON_MODEL_ID"] == "smollm2-135m-instruct"
    assert values["BATON_ENGINE_DRAFT_MODEL"] == "org/small"
    assert values["BATON_CACHE"] == "/var/cache/baton"
    assert {"HF_TOKEN", "HF_HOME"} <= values.keys()
    assert volume_of(job, "model-cache")["persistentVolumeClaim"] == {"claimName": "models"}
    assert not any("configMap" in volume or "secret" in volume for volume in job.spec["volumes"])
    assert job.spec["nodeSelector"] == {"disk": "fast"}


def test_the_chart_s_own_claim_is_filled_from_the_first_upgrade_on() -> None:
    """At the installation it is not there yet."""
    sets = (*MATRIX["a-claim"].sets, "modelCache.prefetch.enabled=true")
    assert {job.component for job in jobs(render(Values(sets=sets)))} == {"crds", "secrets"}
    options = [word for item in (*sets, "crds.upgrade=false") for word in ("--set", item)]
    done = helm(4, "template", "baton", str(CHART), "--is-upgrade", "--show-only", "templates/hooks.yaml", *options)
    assert done.returncode == 0, done.stderr
    objects = documents(done.stdout)
    assert [job.component for job in jobs(objects)] == ["secrets", "prefetch"]
    assert volume_of(jobs(objects)[1], "model-cache")["persistentVolumeClaim"] == {"claimName": "baton-models"}


def test_hooks_are_gone_when_they_are_done_and_come_in_order() -> None:
    objects = render(MATRIX["an-existing-claim"])
    weights: dict[str, int] = {}
    for each in objects:
        annotations = each["metadata"].get("annotations", {})
        if annotations.get("helm.sh/hook") == "pre-install,pre-upgrade":
            assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
            weights[f"{each['kind']}/{each['metadata']['name'].split('-')[1]}"] = int(
                annotations["helm.sh/hook-weight"]
            )
    order = sorted(weights, key=lambda name: weights[name])
    assert order[0] == "NetworkPolicy/hooks"
    assert {*order[-3:-1]} == {"Job/crds", "Job/secrets"}
    assert order[-1] == "Job/prefetch"
    of_secrets = {f"{kind}/secrets" for kind in ("ServiceAccount", "Role", "RoleBinding")}
    assert set(order[1:-3]) == {f"{kind}/crds" for kind in HOOK_KINDS} | of_secrets
    mounted = the(objects, "ConfigMap", volume_of(jobs(objects)[0], "crds")["configMap"]["name"])
    assert yaml.safe_load(mounted["data"]["servingpools.yaml"]) == yaml.safe_load(
        (CHART / "crds" / "servingpools.yaml").read_text()
    )
    assert {job.component for job in jobs(render(MATRIX["pod-monitor"]))} == {"secrets"}, "crds.upgrade is off"


HOOK_KINDS = ("ConfigMap", "ServiceAccount", "ClusterRole", "ClusterRoleBinding")


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("ingress.enabled=true", "ingress.host=a.example"), ("silent for 60 s", "proxy-read-timeout")),
        (MATRIX["gateway"].sets, ("ends a response, streams included, after 1h",)),
        (("config.cluster.start_timeout_s=900",), ("A worker may take 960 s to leave", "after 600 s")),
        (MATRIX["a-claim"].sets, ("The claim baton-models and its models survive `helm uninstall`",)),
    ],
)
def test_the_notes_say_what_ends_answers_and_what_stays(sets: tuple[str, ...], words: tuple[str, ...]) -> None:
    for given, is_said in ((sets, True), ((), False)):
        options = [word for item in given for word in ("--set", item)]
        done = helm(4, "install", "baton", str(CHART), "--dry-run=client", *options)
        assert done.returncode == 0, done.stderr
        assert all((word in done.stdout) == is_said for word in words)

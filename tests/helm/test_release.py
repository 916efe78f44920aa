"""What helm does to objects that are there: sizes, secrets, permissions. A test API server, and no pods."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from lightkube import Client, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.core_v1 import ObjectReference
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Event, Pod
from lightkube.types import PatchType

from tests.fakekube.apiserver import RunningApi, running_api
from tests.fakekube.store import Key, Object, Resource
from tests.helm.chart import CHART, MAJORS, MATRIX, NAMESPACE, Values, jobs, of_kind, render
from tests.kube.commands import CommandFailed, Commands

pytestmark = pytest.mark.integration

DEPLOYMENTS, SECRETS = Resource("apps", "deployments"), Resource("", "secrets")
POOLS, RAYCLUSTERS = Resource("baton.dev", "servingpools"), Resource("ray.io", "rayclusters")
ServingPool = create_namespaced_resource("baton.dev", "v1alpha1", "ServingPool", "servingpools")
RAY_CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "rayclusters.ray.io"},
    "spec": {
        "group": "ray.io",
        "scope": "Namespaced",
        "names": {
            "plural": "rayclusters",
            "singular": "raycluster",
            "kind": "RayCluster",
            "listKind": "RayClusterList",
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "properties": {"spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
                    }
                },
            }
        ],
    },
}


@pytest.fixture
def api() -> Iterator[RunningApi]:
    with running_api() as running:
        yield running


@pytest.fixture(params=MAJORS, ids=lambda major: f"helm{major}")
def commands(request: pytest.FixtureRequest, api: RunningApi, tmp_path: Path) -> Commands:
    return Commands(request.param, api.kubeconfig(namespace=NAMESPACE), tmp_path)


def install(commands: Commands, *sets: str) -> None:
    _helm(commands, "install", *sets)


def upgrade(commands: Commands, *sets: str) -> None:
    _helm(commands, "upgrade", *sets)


def _helm(commands: Commands, verb: str, *sets: str) -> None:
    more = ["--create-namespace"] if verb == "install" else []
    # Nothing runs pods here, so that no hook would end.
    flags = [flag for item in sets for flag in ("--set", item)]
    commands.helm(verb, "baton", CHART, "--namespace", NAMESPACE, "--no-hooks", *more, *flags)


def pool(api: RunningApi, role: str) -> Object:
    return api.store.get(Key(POOLS, NAMESPACE, f"baton-{role}"))


def account(commands: Commands, api: RunningApi, name: str) -> Commands:
    """What somebody could do with a pod's token."""
    user = f"system:serviceaccount:{NAMESPACE}:{name}"
    return Commands(commands.helm_major, api.kubeconfig(user, NAMESPACE), commands.home)


def client_of(commands: Commands) -> Client:
    return Client(KubeConfig.from_file(commands.kubeconfig).get(), namespace=NAMESPACE)


def set_nodes(client: Client, name: str, size: int) -> None:
    """As the controller does."""
    client.patch(Deployment.Scale, name, {"spec": {"replicas": size}}, patch_type=PatchType.MERGE)


def test_sizes_outlive_upgrades_and_rollbacks(api: RunningApi, commands: Commands) -> None:
    install(commands)
    commands.kubectl("scale", "servingpool/baton-decode", "--replicas=7")
    with client_of(account(commands, api, "baton-controller")) as client:
        set_nodes(client, "baton-decode", 7)
    upgrade(commands, "config.router.max_in_flight=99", "pools.decode.maxReplicas=20", "config.engine.block_size=32")
    assert pool(api, "decode")["spec"]["replicas"] == 7
    assert pool(api, "decode")["spec"]["maxReplicas"] == 20
    deployment = api.store.get(Key(DEPLOYMENTS, NAMESPACE, "baton-decode"))
    assert deployment["spec"]["replicas"] == 7
    commands.helm("rollback", "baton", "1", "--namespace", NAMESPACE)
    assert pool(api, "decode")["spec"]["replicas"] == 7
    assert pool(api, "decode")["spec"]["maxReplicas"] == 8
    assert api.store.get(Key(DEPLOYMENTS, NAMESPACE, "baton-decode"))["spec"]["replicas"] == 7


def test_a_pool_that_was_paused_by_hand_stays_so(api: RunningApi, commands: Commands) -> None:
    install(commands)
    commands.kubectl("patch", "servingpool", "baton-decode", "--type=merge", '--patch={"spec": {"paused": true}}')
    upgrade(commands, "pools.decode.maxReplicas=20")
    assert pool(api, "decode")["spec"]["paused"] is True


def test_secrets_are_created_once_by_what_may_do_no_more(api: RunningApi, commands: Commands, tmp_path: Path) -> None:
    """The hook's command with its account, before the installation and an upgrade. Uninstalling leaves them."""
    objects = render(Values(sets=("crds.upgrade=false",)), commands.helm_major)
    (job,) = jobs(objects)
    account_of_hook = job.spec["serviceAccountName"]
    hook = [each for each in objects if each["metadata"]["name"] == account_of_hook and each["kind"] != "Job"]
    commands.kubectl("create", "namespace", NAMESPACE)
    commands.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(hook))
    arguments = [sys.executable, *job.containers[0]["command"][1:]]
    environ = os.environ | {"KUBECONFIG": str(account(commands, api, account_of_hook).kubeconfig)}

    def run_hook() -> list[str]:
        done = subprocess.run(arguments, env=environ, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert [line.rpartition(": ")[2] for line in run_hook()] == ["created."] * 5
    names = [each["metadata"]["name"] for each in of_kind(objects, "Secret")]
    before = {name: api.store.get(Key(SECRETS, NAMESPACE, name))["data"] for name in names}
    assert {name: set(data) for name, data in before.items()} == {
        each["metadata"]["name"]: set(each["data"]) for each in of_kind(objects, "Secret")
    }
    install(commands)
    assert [line.rpartition(": ")[2] for line in run_hook()] == ["kept."] * 5
    upgrade(commands, "router.replicas=3")
    commands.helm("uninstall", "baton", "--no-hooks", "--namespace", NAMESPACE)
    assert {name: api.store.get(Key(SECRETS, NAMESPACE, name))["data"] for name in names} == before
    stranger = account(commands, api, account_of_hook)
    for forbidden in (
        ("get", "secret", "another"),
        ("get", "secrets"),
        ("delete", "secret", names[0]),
        ("get", "pods"),
    ):
        with pytest.raises(CommandFailed, match="orbidden"):
            stranger.kubectl(*forbidden)


def test_what_helm_stores_of_a_release_is_far_from_the_limit(api: RunningApi, commands: Commands) -> None:
    """Kubernetes takes Secrets of 1 MiB. With all dashboards and rules."""
    install(commands, "monitoring.dashboards.enabled=true")  # the largest objects
    stored = api.store.get(Key(SECRETS, NAMESPACE, "sh.helm.release.v1.baton.v1"))
    assert 100_000 < len(base64.b64decode(stored["data"]["release"])) < 600_000


def test_the_controller_s_patches_are_limited_where_kubernetes_can(api: RunningApi, commands: Commands) -> None:
    install(commands)
    (policy,) = api.store.objects(Resource("admissionregistration.k8s.io", "validatingadmissionpolicies"))
    (binding,) = api.store.objects(Resource("admissionregistration.k8s.io", "validatingadmissionpolicybindings"))
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    (condition,) = policy["spec"]["matchConditions"]
    assert f'"system:serviceaccount:{NAMESPACE}:baton-controller"' in condition["expression"]
    assert binding["spec"]["validationActions"] == ["Deny"]
    labels = binding["spec"]["matchResources"]["namespaceSelector"]["matchLabels"]
    assert labels == {"kubernetes.io/metadata.name": NAMESPACE}
    text = " ".join(each["expression"] for each in policy["spec"]["validations"])
    assert all(part in text for part in ("== 'baton'", "object.spec == oldObject.spec", "labels", "ownerReferences"))


def test_a_rayclusters_live_sizes_are_kept(api: RunningApi, commands: Commands) -> None:
    commands.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(RAY_CRD))
    install(commands, "orchestrator=kuberay", "pools.decode.initialReplicas=2")
    key = Key(RAYCLUSTERS, NAMESPACE, "baton")
    assert _groups(api.store.get(key)) == {"prefill": 1, "decode": 2}

    def autoscaler(cluster: Object) -> None:
        cluster["spec"]["workerGroupSpecs"][1]["replicas"] = 5

    api.store.modify(key, autoscaler)
    upgrade(commands, "orchestrator=kuberay", "pools.decode.initialReplicas=2", "config.engine.block_size=32")
    assert _groups(api.store.get(key)) == {"prefill": 1, "decode": 5}


def _groups(cluster: Object) -> dict[str, int]:
    return {group["groupName"]: group["replicas"] for group in cluster["spec"]["workerGroupSpecs"]}


def test_uninstalling_leaves_the_definition_of_serving_pools_alone(api: RunningApi, commands: Commands) -> None:
    install(commands, *MATRIX["a-claim"].sets, *MATRIX["ingress"].sets, *MATRIX["router-hpa"].sets)
    before = {key for key in api.store.keys() if key.namespace == NAMESPACE}  # noqa: SIM118
    assert len(before) > 20
    commands.helm("uninstall", "baton", "--no-hooks", "--namespace", NAMESPACE)
    left = {key.name for key in api.store.keys() if NAMESPACE in (key.namespace, key.name)}  # noqa: SIM118
    assert left <= {NAMESPACE, "default", "kube-root-ca.crt", "baton-models"}
    assert "baton-models" in left, "what was downloaded stays"
    install(commands, *MATRIX["a-claim"].sets)  # which takes it up again
    assert "servingpools.baton.dev" in {key.name for key in api.store.keys()}  # noqa: SIM118


def test_the_controller_may_do_what_it_does_and_no_more(api: RunningApi, commands: Commands) -> None:
    install(commands)
    controller = account(commands, api, "baton-controller")
    with client_of(controller) as client:
        for name in ("prefill", "decode"):
            client.get(ServingPool, f"baton-{name}")
            client.patch(ServingPool, f"baton-{name}", {"spec": {"replicas": 2}}, patch_type=PatchType.MERGE)
            client.patch(ServingPool.Status, f"baton-{name}", {"status": {"replicas": 2}}, patch_type=PatchType.MERGE)
            client.get(Deployment, f"baton-{name}")
            set_nodes(client, f"baton-{name}", 2)
            assert pool(api, name)["status"] == {"replicas": 2}
        assert list(client.list(Pod)) == []
        involved = ObjectReference(kind="ServingPool", name="baton-decode", namespace=NAMESPACE)
        client.create(Event(metadata=ObjectMeta(name="a", namespace=NAMESPACE), involvedObject=involved))
        kind, _ = next(iter(client.watch(ServingPool, server_timeout=5)))
        assert kind == "ADDED"
        with pytest.raises(ApiError, match="orbidden"):
            set_nodes(client, "baton-router", 9)
    for forbidden in (
        ("get", "secret", "baton-router"),
        ("get", "secrets"),
        ("get", "deployment", "baton-router"),
        ("patch", "deployment", "baton-decode", "--type=merge", '--patch={"metadata": {"labels": {"a": "b"}}}'),
        ("delete", "servingpool", "baton-decode"),
        ("delete", "pod", "baton-decode-0"),
        ("get", "nodes"),
    ):
        with pytest.raises(CommandFailed, match="orbidden"):
            controller.kubectl(*forbidden)


def test_nobody_else_may_do_anything(api: RunningApi, commands: Commands) -> None:
    install(commands)
    for what in ("servingpools", "pods", "secrets"):
        with pytest.raises(CommandFailed, match="orbidden"):
            account(commands, api, "baton").kubectl("get", what)


REFUSED_POOLS = {
    '{"maxReplicas": 0}': "minReplicas must not exceed maxReplicas",
    '{"initialReplicas": 9}': "initialReplicas must not exceed maxReplicas",
    '{"minReplicas": 2}': "initialReplicas must be at least minReplicas",
    '{"role": "prefill"}': "a pool's role stays what it is",
    '{"replicas": -1}': "replicas",
    '{"drainTimeoutSeconds": 0}': "drainTimeoutSeconds",
}


def test_kubernetes_refuses_a_pool_that_cannot_be(commands: Commands) -> None:
    install(commands)
    for wrong, why in REFUSED_POOLS.items():
        with pytest.raises(CommandFailed, match=why):
            commands.kubectl("patch", "servingpool", "baton-decode", "--type=merge", f'--patch={{"spec": {wrong}}}')


def test_releases_with_models_join_and_leave_one_with_routers(api: RunningApi, commands: Commands) -> None:
    """In its namespace and in another one. Whoever leaves takes nothing of the others."""
    install(commands, "parts.model=false")
    joined = ("parts.door=false", "door.release=baton")
    away = (
        *("door.namespace=serving", "clusterSecret.existingSecret=baton-cluster"),
        "redis.passwords.existingSecret=baton-redis",
    )
    for name, namespace, sets in (("qwen", NAMESPACE, joined), ("llama", "team", (*joined, *away))):
        flags = [flag for item in sets for flag in ("--set", item)]
        commands.helm("install", name, CHART, "--namespace", namespace, "--create-namespace", "--no-hooks", *flags)

    def names(resource: Resource) -> set[tuple[str, str]]:
        found = [each["metadata"] for each in api.store.objects(resource)]
        return {(each["namespace"], each["name"]) for each in found}

    pools = {("serving", "qwen-baton-prefill"), ("serving", "qwen-baton-decode")}
    others = {("team", "llama-baton-prefill"), ("team", "llama-baton-decode")}
    assert names(POOLS) == pools | others
    table = commands.kubectl("get", "servingpools", "-n", "team")
    assert "MODEL" in table
    assert "smollm2-135m-instruct" in table
    with client_of(account(commands, api, "qwen-baton-controller")) as client:
        set_nodes(client, "qwen-baton-decode", 2)
        with pytest.raises(ApiError, match="orbidden"):
            client.get(ServingPool, "llama-baton-decode", namespace="team")
    commands.helm("uninstall", "qwen", "--no-hooks", "--namespace", NAMESPACE)
    assert names(POOLS) == others
    assert ("serving", "baton-router") in names(DEPLOYMENTS)
    assert ("serving", "baton-redis") in names(DEPLOYMENTS)

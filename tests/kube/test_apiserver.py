"""The test API server, as the real clients see it: both majors of helm, their kubectl, and lightkube."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from lightkube import AsyncClient, KubeConfig
from lightkube.core.exceptions import ApiError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.resources.core_v1 import ConfigMap
from lightkube.types import PatchType

from tests.fakekube.apiserver import RunningApi, running_api
from tests.fakekube.store import Key, Object, Resource
from tests.kube.commands import CommandFailed, Commands
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

POOLS = Resource("example.dev", "pools")
DEPLOYMENTS = Resource("apps", "deployments")
CONFIG_MAPS = Resource("", "configmaps")
SECRETS = Resource("", "secrets")
PODS = Resource("", "pods")

CRD = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: pools.example.dev}
spec:
  group: example.dev
  scope: Namespaced
  names: {plural: pools, singular: pool, kind: Pool, shortNames: [po4]}
  versions:
    - name: v1
      served: true
      storage: true
      subresources:
        status: {}
        scale:
          specReplicasPath: .spec.replicas
          statusReplicasPath: .status.replicas
          labelSelectorPath: .status.selector
      additionalPrinterColumns:
        - {name: Role, type: string, jsonPath: .spec.role}
        - {name: Ready, type: string, jsonPath: '.status.conditions[?(@.type=="Ready")].status'}
      schema:
        openAPIV3Schema:
          type: object
          required: [spec]
          properties:
            spec:
              type: object
              required: [role]
              x-kubernetes-validations:
                - {rule: "!has(self.replicas) || self.replicas <= self.most", message: replicas must not exceed most}
              properties:
                role: {type: string, enum: [prefill, decode]}
                replicas: {type: integer, minimum: 0}
                most: {type: integer, default: 100}
                steps:
                  type: array
                  x-kubernetes-list-type: map
                  x-kubernetes-list-map-keys: [name]
                  items: {type: object, required: [name], properties: {name: {type: string}, size: {type: integer}}}
            status:
              type: object
              properties:
                replicas: {type: integer}
                selector: {type: string}
                conditions:
                  type: array
                  items: {type: object, properties: {type: {type: string}, status: {type: string}}}
"""
POOL = """
apiVersion: example.dev/v1
kind: Pool
metadata: {name: decode, annotations: {note: "{{ .Values.note }}"}}
spec: {role: decode{{ with .Values.replicas }}, replicas: {{ . }}{{ end }}}
"""
DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  {{- with .Values.replicas }}
  replicas: {{ . }}
  {{- end }}
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
        - {name: main, image: busybox, env: [{name: NOTE, value: "{{ .Values.note }}"}], ports: [{containerPort: 80}]}
"""
OTHERS = """
apiVersion: v1
kind: Secret
metadata: {name: key}
stringData: {note: "{{ .Values.note }}"}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings}
data: {note: "{{ .Values.note }}"}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
"""
PLAIN_POOL = {
    "apiVersion": "example.dev/v1",
    "kind": "Pool",
    "metadata": {"name": "decode"},
    "spec": {"role": "decode"},
}


@pytest.fixture
def api() -> Iterator[RunningApi]:
    with running_api() as running:
        yield running


HELM_3, HELM_4 = pytest.param(3, id="helm3"), pytest.param(4, id="helm4")
both_majors = pytest.mark.parametrize("commands", [HELM_3, HELM_4], indirect=True)
"""For what helm does itself, which the two do in different ways."""


@pytest.fixture(params=[pytest.param(3, id="helm3", marks=pytest.mark.chaos), HELM_4])
def commands(request: pytest.FixtureRequest, api: RunningApi, tmp_path: Path) -> Commands:
    return Commands(request.param, api.kubeconfig(), tmp_path)


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    folder = tmp_path / "chart"
    for path, text in {
        "Chart.yaml": "{apiVersion: v2, name: small, version: 0.1.0}",
        "values.yaml": "{note: first, replicas: 0}",
        "crds/pools.yaml": CRD,
        "templates/pool.yaml": POOL,
        "templates/deployment.yaml": DEPLOYMENT,
        "templates/others.yaml": OTHERS,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@both_majors
def test_helm_installs_upgrades_rolls_back_and_uninstalls(api: RunningApi, commands: Commands, chart: Path) -> None:
    before = api.store.keys()

    commands.helm("install", "small", chart)
    assert _pool(api)["metadata"]["annotations"]["note"] == "first"
    assert base64.b64decode(_get(api, SECRETS, "key")["data"]["note"]) == b"first"
    assert _get(api, DEPLOYMENTS, "web")["spec"]["replicas"] == 1
    first = _get(api, Resource("", "services"), "web")

    commands.helm("upgrade", "small", chart, "--set", "note=second")
    assert _pool(api)["metadata"]["annotations"]["note"] == "second"
    assert _get(api, CONFIG_MAPS, "settings")["data"] == {"note": "second"}
    container = _get(api, DEPLOYMENTS, "web")["spec"]["template"]["spec"]["containers"][0]
    assert container["env"] == [{"name": "NOTE", "value": "second"}]
    assert container["ports"] == [{"containerPort": 80, "protocol": "TCP"}]
    assert _get(api, Resource("", "services"), "web") == first  # what did not change has no new version

    commands.helm("rollback", "small", "1")
    assert _get(api, CONFIG_MAPS, "settings")["data"] == {"note": "first"}
    history = json.loads(commands.helm("history", "small", "-o", "json"))
    assert [release["status"] for release in history] == ["superseded", "superseded", "deployed"]
    assert [release["name"] for release in json.loads(commands.helm("list", "-o", "json"))] == ["small"]

    commands.helm("uninstall", "small")
    left = set(api.store.keys()) - set(before)
    assert {key.name for key in left} == {"pools.example.dev"}  # helm leaves CRDs alone


@both_majors
def test_what_kubectl_scaled_survives_an_upgrade(api: RunningApi, commands: Commands, chart: Path) -> None:
    commands.helm("install", "small", chart)
    commands.kubectl("scale", "pool/decode", "deployment/web", "--replicas=7")
    commands.helm("upgrade", "small", chart, "--set", "note=second")
    assert _pool(api)["metadata"]["annotations"]["note"] == "second"
    assert _replicas(api) == (7, 7)


@both_majors
def test_rendered_replicas_are_fought_over(api: RunningApi, commands: Commands, chart: Path) -> None:
    """Helm 3 takes a Deployment back; of a custom resource it sends only what changed between the charts. Helm 4 asks
    the server to apply, which refuses."""
    commands.helm("install", "small", chart, "--set", "replicas=2")
    commands.kubectl("scale", "pool/decode", "deployment/web", "--replicas=7")
    upgrade = ["upgrade", "small", str(chart), "--set", "replicas=2", "--set", "note=second"]
    if commands.helm_major == 3:
        commands.helm(*upgrade)
        assert _replicas(api) == (7, 2)
        commands.helm(*upgrade, "--set", "replicas=3")
        assert _replicas(api) == (3, 3)
        return
    with pytest.raises(CommandFailed, match=r'conflict with "kubectl" with subresource "scale" .*: \.spec\.replicas'):
        commands.helm(*upgrade)
    assert _replicas(api) == (7, 7)
    commands.helm(*upgrade, "--force-conflicts")
    assert _replicas(api) == (2, 2)
    commands.helm(*upgrade, "--set", "note=third")  # nobody else owns them any more
    assert _pool(api)["metadata"]["annotations"]["note"] == "third"


def test_kubectl_prints_the_columns_of_a_crd(api: RunningApi, commands: Commands) -> None:
    _with_pool(commands)
    status = {"status": {"conditions": [{"type": "Other", "status": "no"}, {"type": "Ready", "status": "True"}]}}
    commands.kubectl("patch", "po4", "decode", "--subresource=status", "--type=merge", "-p", json.dumps(status))
    header, row = commands.kubectl("get", "po4").splitlines()
    assert header.split() == ["NAME", "ROLE", "READY"]
    assert row.split() == ["decode", "decode", "True"]
    deployment = _deployment([{"name": "main", "image": "busybox"}])
    commands.kubectl("apply", "-f", "-", stdin=json.dumps(deployment))
    header, row = commands.kubectl("get", "deployments").splitlines()
    assert header.split() == ["NAME", "READY", "UP-TO-DATE", "AVAILABLE", "AGE"]
    assert row.split()[:4] == ["web", "0/1", "0", "0"]


def test_status_and_spec_are_written_apart(api: RunningApi, commands: Commands) -> None:
    _with_pool(commands)
    both = json.dumps({"spec": {"replicas": 4}, "status": {"replicas": 3}})
    commands.kubectl("patch", "pool", "decode", "--type=merge", "-p", both)
    assert _pool(api)["spec"]["replicas"] == 4
    assert "status" not in _pool(api)
    generation = _pool(api)["metadata"]["generation"]
    both = json.dumps({"spec": {"replicas": 9}, "status": {"replicas": 3}})
    commands.kubectl("patch", "pool", "decode", "--subresource=status", "--type=merge", "-p", both)
    assert _pool(api)["status"] == {"replicas": 3}
    assert _pool(api)["spec"]["replicas"] == 4
    assert _pool(api)["metadata"]["generation"] == generation
    commands.kubectl("scale", "pool/decode", "--replicas=5")
    assert _pool(api)["metadata"]["generation"] == generation + 1


def test_kubectl_waits_for_a_status(api: RunningApi, commands: Commands) -> None:
    _with_pool(commands)
    key = Key(POOLS, "default", "decode")
    with _later(lambda: api.store.modify(key, lambda pool: pool.update(status={"replicas": 2})), 0.3):
        waited = commands.kubectl("wait", "pool/decode", "--for=jsonpath={.status.replicas}=2", "--timeout=60s")
    assert "condition met" in waited
    with pytest.raises(CommandFailed, match="timed out"):
        commands.kubectl("wait", "pool/decode", "--for=jsonpath={.status.replicas}=3", "--timeout=1s")


def test_a_dry_run_changes_nothing(api: RunningApi, commands: Commands) -> None:
    _with_pool(commands)
    before = api.store.version
    changed = json.dumps(PLAIN_POOL | {"spec": {"role": "prefill"}})
    for how in ("client", "server"):
        commands.kubectl("apply", f"--dry-run={how}", "-f", "-", stdin=changed)
        commands.kubectl("create", f"--dry-run={how}", "-f", "-", stdin=changed.replace('"decode"', '"other"'))
        commands.kubectl("delete", f"--dry-run={how}", "pool", "decode")
    shown = commands.kubectl("apply", "--dry-run=server", "-o", "yaml", "-f", "-", stdin=changed)
    assert yaml.safe_load(shown)["spec"] == {"role": "prefill", "most": 100}
    with pytest.raises(CommandFailed, match="supported values"):
        commands.kubectl("apply", "--dry-run=server", "-f", "-", stdin=changed.replace('"prefill"', '"preffil"'))
    assert api.store.version == before


def test_kubectl_apply_merges_lists_by_their_keys(api: RunningApi, commands: Commands) -> None:
    container = {"name": "main", "image": "busybox", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
    deployment = _deployment([container, {"name": "side", "image": "busybox"}])
    commands.kubectl("apply", "-f", "-", stdin=json.dumps(deployment))
    # a sidecar and a variable that kubectl knows nothing of, as a webhook or a person would add them
    added = {
        "containers": [{"name": "main", "env": [{"name": "C", "value": "3"}]}, {"name": "new", "image": "busybox"}]
    }
    patch = json.dumps({"spec": {"template": {"spec": added}}})
    commands.kubectl("patch", "deployment", "web", "-p", patch)
    container["env"] = [{"name": "B", "value": "20"}]
    commands.kubectl("apply", "-f", "-", stdin=json.dumps(_deployment([container])))
    containers = _get(api, DEPLOYMENTS, "web")["spec"]["template"]["spec"]["containers"]
    assert {one["name"] for one in containers} == {"main", "new"}
    main = next(one for one in containers if one["name"] == "main")
    assert {one["name"]: one["value"] for one in main["env"]} == {"B": "20", "C": "3"}
    assert main["imagePullPolicy"] == "Always"


@both_majors
def test_server_side_apply_knows_who_owns_what(api: RunningApi, commands: Commands) -> None:
    commands.kubectl("apply", "-f", "-", stdin=CRD)

    def apply(manager: str, spec: Object, *more: str) -> str:
        pool = json.dumps(PLAIN_POOL | {"spec": spec})
        return commands.kubectl("apply", "--server-side", f"--field-manager={manager}", *more, "-f", "-", stdin=pool)

    apply("one", {"role": "decode", "replicas": 2, "steps": [{"name": "a", "size": 1}]})
    apply("two", {"role": "decode", "steps": [{"name": "b", "size": 2}]})
    assert [step["name"] for step in _pool(api)["spec"]["steps"]] == ["a", "b"]
    with pytest.raises(CommandFailed, match=r'conflict with "one" using example.dev/v1: .spec.steps\[name="a"\].size'):
        apply("two", {"role": "decode", "steps": [{"name": "a", "size": 5}, {"name": "b", "size": 2}]})
    apply("two", {"role": "decode", "steps": [{"name": "a", "size": 5}, {"name": "b", "size": 2}]}, "--force-conflicts")
    assert _pool(api)["spec"]["steps"] == [{"name": "a", "size": 5}, {"name": "b", "size": 2}]
    version = _pool(api)["metadata"]["resourceVersion"]
    apply("one", {"role": "decode", "steps": [{"name": "a"}]})  # no opinion on replicas any more, and nobody else has
    spec = _pool(api)["spec"]
    assert "replicas" not in spec
    assert spec["steps"] == [{"name": "a", "size": 5}, {"name": "b", "size": 2}]
    assert spec["role"] == "decode"
    assert _pool(api)["metadata"]["resourceVersion"] != version
    version = _pool(api)["metadata"]["resourceVersion"]
    apply("one", {"role": "decode", "steps": [{"name": "a"}]})
    assert _pool(api)["metadata"]["resourceVersion"] == version


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"spec": {"role": "decode", "replica": 3}}, 'unknown field "spec.replica"'),
        (
            {"spec": {"role": "decoder"}},
            'spec.role: Unsupported value: "decoder": supported values: "prefill", "decode"',
        ),
        ({"spec": {"role": "decode", "replicas": "3"}}, "spec.replicas in body must be of type integer"),
        ({"spec": {"role": "decode", "replicas": -1}}, "should be greater than or equal to 0"),
        ({"spec": {}}, "spec.role: Required value"),
        ({"spec": {"role": "decode", "replicas": 5, "most": 4}}, "replicas must not exceed most"),
        ({"metadata": {"name": "Decode"}}, "metadata.name: Invalid value"),
        ({"metadata": {"name": "decode", "labels": {"a": "b c"}}}, "metadata.labels: Invalid value"),
    ],
)
def test_a_wrong_custom_resource_is_refused(api: RunningApi, tmp_path: Path, change: Object, said: str) -> None:
    kubectl = Commands(4, api.kubeconfig(), tmp_path).kubectl
    kubectl("apply", "-f", "-", stdin=CRD)
    with pytest.raises(CommandFailed) as failed:
        kubectl("apply", "-f", "-", stdin=json.dumps(PLAIN_POOL | change))
    assert said in str(failed.value)
    assert not api.store.objects(POOLS)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec.replica", 3, 'unknown field "spec.replica"'),
        ("spec.template.spec.containers", [{"name": "a", "image": "b", "imag": "c"}], "containers[0].imag"),
        ("spec.replicas", "three", "cannot unmarshal string into Go struct field spec.replicas of type integer"),
        ("spec.selector.matchLabels", {"app": "other"}, "`selector` does not match template `labels`"),
        ("spec.template.spec.containers", [{"name": "a"}], "spec.template.spec.containers[0].image: Required value"),
        ("spec.template.spec.containers", [], "spec.template.spec.containers: Required value"),
        (
            "spec.template.spec.containers",
            [{"name": "a", "image": "b", "volumeMounts": [{"name": "x", "mountPath": "/x"}]}],
            'spec.template.spec.containers[0].volumeMounts[0].name: Not found: "x"',
        ),
        (
            "spec.template.spec.containers",
            [{"name": "a", "image": "b", "resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": "1"}}}],
            "must be less than or equal to cpu limit",
        ),
    ],
)
def test_a_wrong_deployment_is_refused(api: RunningApi, tmp_path: Path, path: str, value: Any, said: str) -> None:
    kubectl = Commands(3, api.kubeconfig(), tmp_path).kubectl
    deployment = _deployment([{"name": "main", "image": "busybox"}])
    part = deployment
    *parents, last = path.split(".")
    for name in parents:
        part = part[name]
    part[last] = value
    with pytest.raises(CommandFailed) as failed:
        kubectl("apply", "-f", "-", stdin=json.dumps(deployment))
    assert said in str(failed.value)
    assert not api.store.objects(DEPLOYMENTS)


def test_a_typo_can_be_only_warned_of(api: RunningApi, commands: Commands) -> None:
    _with_pool(commands)
    typo = json.dumps(PLAIN_POOL | {"spec": {"role": "prefill", "replica": 3}})
    with pytest.raises(CommandFailed, match=r'Warning: unknown field "spec\.replica"'):
        commands.kubectl("apply", "--validate=warn", "--warnings-as-errors", "-f", "-", stdin=typo)
    assert _pool(api)["spec"] == {"role": "prefill", "most": 100}
    typo = typo.replace("prefill", "decode")
    commands.kubectl("apply", "--validate=ignore", "--warnings-as-errors", "-f", "-", stdin=typo)
    assert _pool(api)["spec"] == {"role": "decode", "most": 100}


def test_an_update_is_checked_like_a_new_object(api: RunningApi, commands: Commands) -> None:
    _with_pool(commands)
    patch = ["patch", "pool", "decode", "--type=merge", "-p"]
    with pytest.raises(CommandFailed, match=r'spec\.role: Unsupported value: "x"'):
        commands.kubectl(*patch, '{"spec": {"role": "x"}}')
    with pytest.raises(CommandFailed, match="replicas must not exceed most"):
        commands.kubectl("scale", "pool/decode", "--replicas=200")
    commands.kubectl("scale", "pool/decode", "--replicas=2")
    with pytest.raises(CommandFailed, match="must be greater than or equal to 0"):
        commands.kubectl(*patch, '{"spec": {"replicas": -1}}', "--subresource=scale")
    assert _pool(api)["spec"] == {"role": "decode", "most": 100, "replicas": 2}


def test_a_secret_of_more_than_a_mebibyte_is_refused(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "fits").write_bytes(os.urandom(1 << 20))
    commands.kubectl("create", "secret", "generic", "fits", f"--from-file=key={tmp_path / 'fits'}")
    (tmp_path / "large").write_bytes(os.urandom((1 << 20) + 1))
    with pytest.raises(CommandFailed, match="Too long: may not be more than 1048576 bytes"):
        commands.kubectl("create", "secret", "generic", "large", f"--from-file=key={tmp_path / 'large'}")


def test_a_service_account_may_what_its_roles_say(api: RunningApi, commands: Commands) -> None:
    _with_pool(commands)
    commands.kubectl("apply", "-f", "-", stdin=json.dumps(PLAIN_POOL | {"metadata": {"name": "other"}}))
    commands.kubectl("create", "serviceaccount", "robot")
    robot = Commands(
        commands.helm_major, api.kubeconfig("system:serviceaccount:default:robot"), commands.home / "robot"
    )
    denied = 'User "system:serviceaccount:default:robot" cannot {} resource "{}" in API group "example.dev" in the'
    with pytest.raises(CommandFailed, match=denied.format("list", "pools")):
        robot.kubectl("get", "pools")
    commands.kubectl(
        *("create", "role", "robot", "--verb=get,patch,update", "--resource=pools.example.dev,pools.example.dev/scale"),
        "--resource-name=decode",
    )
    commands.kubectl("create", "rolebinding", "robot", "--role=robot", "--serviceaccount=default:robot")
    robot.kubectl("get", "pool", "decode")
    robot.kubectl("scale", "pool/decode", "--replicas=3")
    assert _pool(api)["spec"]["replicas"] == 3
    with pytest.raises(CommandFailed, match=denied.format("get", "pools")):
        robot.kubectl("get", "pool", "other")
    with pytest.raises(CommandFailed, match=denied.format("get", "pools/status")):
        robot.kubectl("patch", "pool", "decode", "--subresource=status", "--type=merge", "-p", "{}")
    assert robot.kubectl("auth", "can-i", "get", "pools/decode").strip() == "yes"
    with pytest.raises(CommandFailed, match="no"):
        robot.kubectl("auth", "can-i", "delete", "pools/decode")


def test_no_token_no_answer(api: RunningApi) -> None:
    connection = http.client.HTTPConnection(urlsplit(api.url).netloc)
    connection.request("GET", "/api/v1/namespaces")
    assert connection.getresponse().status == 401
    connection.close()


def test_dependents_go_with_their_owner(api: RunningApi, commands: Commands) -> None:
    for how, left in (("background", []), ("foreground", []), ("orphan", ["child"])):
        commands.kubectl("create", "configmap", "owner")
        owner = _get(api, CONFIG_MAPS, "owner")["metadata"]["uid"]
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner, "blockOwnerDeletion": True}
        child = {"metadata": {"name": "child", "ownerReferences": [reference]}}
        commands.kubectl("create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "ConfigMap"} | child))
        commands.kubectl("delete", "configmap", "owner", f"--cascade={how}")
        wait_until(lambda: [value["metadata"]["name"] for value in api.store.objects(CONFIG_MAPS)] == left)  # noqa: B023
    assert not _get(api, CONFIG_MAPS, "child")["metadata"].get("ownerReferences")


def test_a_finalizer_holds_an_object(api: RunningApi, commands: Commands) -> None:
    held = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "held", "finalizers": ["example.dev/wait"]}}
    commands.kubectl("create", "-f", "-", stdin=json.dumps(held))
    commands.kubectl("delete", "configmap", "held", "--wait=false")
    assert _get(api, CONFIG_MAPS, "held")["metadata"]["deletionTimestamp"]
    commands.kubectl(
        "patch", "configmap", "held", "--type=json", "-p", '[{"op":"remove","path":"/metadata/finalizers"}]'
    )
    assert not api.store.objects(CONFIG_MAPS)


def test_a_namespace_takes_everything_along(api: RunningApi, commands: Commands) -> None:
    with pytest.raises(CommandFailed, match='namespaces "team" not found'):
        commands.kubectl("create", "configmap", "a", "-n", "team")
    commands.kubectl("create", "namespace", "team")
    commands.kubectl("create", "configmap", "a", "-n", "team")
    commands.kubectl("create", "configmap", "a")
    commands.kubectl("delete", "namespace", "team", "--timeout=60s")
    assert [key for key in api.store.keys() if "team" in (key.namespace, key.name)] == []  # noqa: SIM118
    assert _get(api, CONFIG_MAPS, "a")


def test_a_crd_takes_its_objects_along(api: RunningApi, commands: Commands) -> None:
    _with_pool(commands)
    commands.kubectl("delete", "crd", "pools.example.dev")
    wait_until(lambda: not api.store.objects(POOLS))
    with pytest.raises(CommandFailed, match="the server could not find the requested resource"):
        commands.kubectl("get", "pools")


def test_a_pod_stays_until_its_kubelet_lets_it_go(api: RunningApi, commands: Commands) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}
    pod["spec"] = {"nodeName": "here", "terminationGracePeriodSeconds": 7, "containers": [{"name": "m", "image": "i"}]}
    commands.kubectl("create", "-f", "-", stdin=json.dumps(pod))
    commands.kubectl("delete", "pod", "a", "--wait=false")
    metadata = _get(api, PODS, "a")["metadata"]
    assert metadata["deletionTimestamp"]
    assert metadata["deletionGracePeriodSeconds"] == 7
    with _later(lambda: api.store.delete(Key(PODS, "default", "a"), 0), 0.3):
        commands.kubectl("wait", "pod/a", "--for=delete", "--timeout=60s")


def test_kubectl_reads_and_follows_a_log(api: RunningApi, commands: Commands, tmp_path: Path) -> None:
    log = tmp_path / "main.log"
    log.write_text("one\ntwo\n")
    metadata = {"name": "a", "annotations": {"baton.dev/test-log": json.dumps({"main": str(log)})}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    pod["spec"] = {"containers": [{"name": "main", "image": "busybox"}]}
    commands.kubectl("create", "-f", "-", stdin=json.dumps(pod))
    assert commands.kubectl("logs", "a", "--tail=1") == "two\n"

    def end() -> None:
        log.write_text("one\ntwo\nthree\n")
        status = {"containerStatuses": [{"name": "main", "state": {"terminated": {"exitCode": 0}}}]}
        api.store.modify(Key(PODS, "default", "a"), lambda value: value.update(status=status))

    with _later(end, 0.3):
        assert commands.kubectl("logs", "-f", "a") == "one\ntwo\nthree\n"


async def test_lightkube_watches_and_writes(api: RunningApi) -> None:
    pools = create_namespaced_resource("example.dev", "v1", "Pool", "pools")
    async with AsyncClient(KubeConfig.from_file(api.kubeconfig())) as client:
        crd: Any = CustomResourceDefinition.from_dict(yaml.safe_load(CRD))
        await client.create(crd)
        await client.create(pools(metadata=ObjectMeta(name="decode"), spec={"role": "decode"}))
        seen: list[tuple[str, Any, Any]] = []
        async for kind, pool in client.watch(pools, namespace="default"):
            status: Any = pool.status or {}
            seen.append((kind, pool.spec.get("replicas"), status.get("replicas")))
            if len(seen) == 1:
                scale = {"spec": {"replicas": 3}}
                await client.patch(pools.Scale, "decode", scale, patch_type=PatchType.MERGE)
            elif len(seen) == 2:
                await client.patch(pools.Status, "decode", {"status": {"replicas": 1}}, patch_type=PatchType.MERGE)
            elif len(seen) == 3:
                await client.delete(pools, "decode")
            else:
                break
        assert seen == [
            ("ADDED", None, None),
            ("MODIFIED", 3, None),
            ("MODIFIED", 3, 1),
            ("DELETED", 3, 1),
        ]


async def test_lightkube_is_told_that_somebody_was_faster(api: RunningApi) -> None:
    async with AsyncClient(KubeConfig.from_file(api.kubeconfig())) as client:
        old = await client.create(ConfigMap(metadata=ObjectMeta(name="a"), data={"n": "1"}))
        new = await client.get(ConfigMap, "a")
        new.data = {"n": "2"}
        await client.replace(new)
        old.data = {"n": "3"}
        with pytest.raises(ApiError) as failed:
            await client.replace(old)
        assert failed.value.status.code == 409
        assert failed.value.status.reason == "Conflict"
        with pytest.raises(ApiError, match="already exists"):
            await client.create(ConfigMap(metadata=ObjectMeta(name="a")))
        assert (await client.get(ConfigMap, "a")).data == {"n": "2"}


def test_an_unset_scale_cannot_be_read_but_written(api: RunningApi, tmp_path: Path) -> None:
    """As on a real server: a reader of `/scale` must wait until somebody has set the replicas."""
    kubectl = Commands(4, api.kubeconfig(), tmp_path).kubectl
    kubectl("apply", "-f", "-", stdin=CRD)
    kubectl("apply", "-f", "-", stdin=json.dumps(PLAIN_POOL))
    path = "/apis/example.dev/v1/namespaces/default/pools/decode/scale"
    with pytest.raises(CommandFailed, match=r'the spec replicas field "\.spec\.replicas" does not exist'):
        kubectl("get", "--raw", path)
    kubectl("scale", "pool/decode", "--replicas=2")
    assert json.loads(kubectl("get", "--raw", path))["spec"] == {"replicas": 2}
    with pytest.raises(CommandFailed, match="could not find the requested resource"):
        kubectl("get", "--raw", "/api/v1/namespaces/default/configmaps/a/scale")


def test_a_watch_from_a_version_misses_nothing(api: RunningApi) -> None:
    path = "/api/v1/namespaces/default/configmaps"
    _create(api, "before")
    version = api.store.version
    _create(api, "after")
    api.store.delete(Key(CONFIG_MAPS, "default", "before"))
    _create(api, "last")
    with contextlib.closing(_watched(api, f"{path}?watch=1&resourceVersion={version}")) as watched:
        events = list(islice(watched, 3))
    assert [(event["type"], event["object"]["metadata"]["name"]) for event in events] == [
        ("ADDED", "after"),
        ("DELETED", "before"),
        ("ADDED", "last"),
    ]
    assert not list(_watched(api, f"{path}?watch=1&timeoutSeconds=1&resourceVersion={api.store.version}"))


def test_a_watch_says_when_it_has_told_everything(api: RunningApi) -> None:
    _create(api, "a")
    query = "watch=1&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan"
    path = "/api/v1/namespaces/default/configmaps"
    with contextlib.closing(_watched(api, f"{path}?{query}&resourceVersion={api.store.version}")) as watched:
        events = list(islice(watched, 2))
        _create(api, "b")
        events.append(next(watched))
    assert [event["type"] for event in events] == ["ADDED", "BOOKMARK", "ADDED"]
    metadata = events[1]["object"]["metadata"]
    assert metadata["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert int(metadata["resourceVersion"]) >= int(events[0]["object"]["metadata"]["resourceVersion"])


def test_what_leaves_a_selector_is_deleted_for_its_watch(api: RunningApi) -> None:
    _create(api, "a", labels={"team": "x"})
    _create(api, "b", labels={"team": "y"})

    def relabel() -> None:
        for name, team in (("a", "y"), ("b", "x")):
            api.store.modify(
                Key(CONFIG_MAPS, "default", name),
                lambda value: value["metadata"].update(labels={"team": team}),  # noqa: B023
            )

    with contextlib.closing(_watched(api, "/api/v1/configmaps?watch=1&labelSelector=team%3Dx")) as watched:
        events = [next(watched)]
        relabel()
        events += islice(watched, 2)
    seen = [(event["type"], event["object"]["metadata"]["name"]) for event in events]
    assert seen == [("ADDED", "a"), ("DELETED", "a"), ("ADDED", "b")]


def test_a_client_that_goes_away_is_forgotten(api: RunningApi, capfd: pytest.CaptureFixture[str]) -> None:
    _create(api, "a")
    events = _watched(api, "/api/v1/configmaps?watch=1")
    assert next(events)["type"] == "ADDED"
    assert len(api.store._watches) == 2  # the garbage collector's and this
    events.close()
    wait_until(lambda: len(api.store._watches) == 1)
    assert "Traceback" not in capfd.readouterr().err


def test_the_server_ends_with_its_watches(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    lines: list[Object] = []
    with running_api() as api:
        watching = threading.Thread(target=lambda: lines.extend(_watched(api, "/api/v1/pods?watch=1")))
        watching.start()
        idle = http.client.HTTPConnection(urlsplit(api.url).netloc)
        idle.request("GET", f"{_base(api)}/version")
        idle.getresponse().read()
        wait_until(lambda: len(api.store._watches) == 2)  # the garbage collector's and this
    watching.join(60)
    idle.close()
    assert set(threading.enumerate()) <= before


def _with_pool(commands: Commands) -> None:
    commands.kubectl("apply", "-f", "-", stdin=CRD)
    commands.kubectl("apply", "-f", "-", stdin=json.dumps(PLAIN_POOL))


def _get(api: RunningApi, resource: Resource, name: str) -> Object:
    return api.store.get(Key(resource, "default", name))


def _pool(api: RunningApi) -> Object:
    return _get(api, POOLS, "decode")


def _replicas(api: RunningApi) -> tuple[int, int]:
    """Of the pool and of the Deployment."""
    return _pool(api)["spec"]["replicas"], _get(api, DEPLOYMENTS, "web")["spec"]["replicas"]


def _deployment(containers: list[Object]) -> Object:
    template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": containers}}
    spec = {"selector": {"matchLabels": {"app": "web"}}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": spec}


def _create(api: RunningApi, name: str, labels: dict[str, str] | None = None) -> None:
    value = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"labels": labels or {}}}
    api.store.create(Key(CONFIG_MAPS, "default", name), value)


def _base(api: RunningApi) -> str:
    """The path that an admin's requests begin with."""
    config = yaml.safe_load(api.kubeconfig().read_text())
    return str(urlsplit(config["clusters"][0]["cluster"]["server"]).path)


def _watched(api: RunningApi, path: str) -> Generator[Object]:
    connection = http.client.HTTPConnection(urlsplit(api.url).netloc)
    connection.request("GET", _base(api) + path)
    response = connection.getresponse()
    assert response.status == 200
    try:
        for line in response:
            yield json.loads(line)
    except (http.client.IncompleteRead, ConnectionError):
        return  # the server has gone
    finally:
        connection.close()


@contextmanager
def _later(act: Callable[[], object], delay_s: float) -> Iterator[None]:
    timer = threading.Timer(delay_s, act)
    timer.start()
    yield
    timer.join()

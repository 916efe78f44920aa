"""The decisions of the test machine: rollouts, victims, endpoints, thresholds, and what stands in for a container's
names and paths."""

from __future__ import annotations

import base64
import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.fakekube.machine import deployment, replicaset, scheduler, service
from tests.fakekube.machine.environment import NotYet, field, variables
from tests.fakekube.machine.objects import CONFIG_MAP, GPU, REPLICA_SET, SECRET, name_of, quantity
from tests.fakekube.machine.podstatus import ContainerState, status_of
from tests.fakekube.machine.probes import Threshold
from tests.fakekube.machine.translate import Translation, UnknownService, expand, image_name
from tests.fakekube.store import Key, Missing, Object, Resource, Store

AT = datetime(2026, 1, 1, tzinfo=UTC)
SERVICES = {("redis", "prod"): "127.128.0.2"}


def stamp(seconds_ago: float) -> str:
    return (AT - timedelta(seconds=seconds_ago)).strftime("%Y-%m-%dT%H:%M:%SZ")


def translated(text: str, **mounts: str) -> str:
    paths = {f"/{path.replace('_', '/')}": place for path, place in mounts.items()}
    return Translation("127.64.0.2", paths, lambda name, namespace: SERVICES.get((name, namespace))).text(text)


# Text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/tmp", "/k/v0"),
        ("/tmp/ray/x", "/k/v1/x"),
        ("--dir=/tmp/a:/tmp/ray", "--dir=/k/v0/a:/k/v1"),
        ("file:///tmp/a", "file:///k/v0/a"),
        ('{"a": "/tmp"}', '{"a": "/k/v0"}'),
        ("/tmpfoo /tmp.d /tmp-1", "/tmpfoo /tmp.d /tmp-1"),
        ("/var/tmp ./tmp x/tmp ${HOME}/tmp", "/var/tmp ./tmp x/tmp ${HOME}/tmp"),
        ("/tmp/rays", "/k/v0/rays"),
    ],
)
def test_paths_of_mounts_lead_to_their_folders(text: str, expected: str) -> None:
    assert translated(text, tmp="/k/v0", tmp_ray="/k/v1") == expected


def test_what_was_put_in_is_not_translated_again() -> None:
    assert translated("/etc/a /tmp", tmp="/x", etc="/tmp/k/v0") == "/tmp/k/v0/a /x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://redis.prod.svc:6379/0", "redis://127.128.0.2:6379/0"),
        ("redis.prod.svc.cluster.local", "127.128.0.2"),
        ("user@redis.prod.svc, redis.prod.svc.", "user@127.128.0.2, 127.128.0.2."),
        ("redis.prod.svcs a.redis.prod.svc redis.prod.svc.example.com", None),
        ("redis.prod", None),
        ("0.0.0.0:80 http://0.0.0.0", "127.64.0.2:80 http://127.64.0.2"),
        ("0.0.0.0/0 10.0.0.0 0.0.0.01", None),
    ],
)
def test_names_of_services_and_the_any_address_become_addresses(text: str, expected: str | None) -> None:
    assert translated(text) == (text if expected is None else expected)


def test_a_service_without_an_address_is_an_error() -> None:
    with pytest.raises(UnknownService, match="'other' of namespace 'prod'"):
        translated("http://other.prod.svc:80")


def test_variables_expand_as_in_kubernetes() -> None:
    assert expand("$(A)-$(B) $$(A) $A $$", {"A": "1"}) == "1-$(B) $(A) $A $"


@pytest.mark.parametrize(
    "image", ["r.io:5000/a/b", "r.io:5000/a/b:1.2", "r.io:5000/a/b@sha256:00", "r.io:5000/a/b:1@sha256:0"]
)
def test_an_image_is_known_without_tag_and_digest(image: str) -> None:
    assert image_name(image) == "r.io:5000/a/b"


# Environment

POD: Object = {
    "metadata": {
        "name": "p",
        "namespace": "n",
        "uid": "u",
        "labels": {"app.kubernetes.io/name": "x"},
        "annotations": {},
    },
    "spec": {"nodeName": "machine", "serviceAccountName": "s"},
    "status": {"podIP": "127.64.0.2"},
}


def lookup(resource: Resource, name: str) -> Object:
    found: dict[tuple[Resource, str], Object] = {
        (CONFIG_MAP, "c"): {"data": {"A": "1", "B": "2"}},
        (SECRET, "s"): {"data": {"T": base64.b64encode(b"token").decode()}},
    }
    if (resource, name) not in found:
        raise Missing(name)
    return found[resource, name]


def environment(*env: Object, **container: Any) -> dict[str, str]:
    return variables({"env": list(env), **container}, POD, lookup)


def from_(kind: str, **source: Any) -> Object:
    return {"name": "V", "valueFrom": {kind: source}}


def test_env_comes_after_env_from_and_sees_what_came_before() -> None:
    sources = [{"configMapRef": {"name": "c"}}, {"prefix": "S_", "secretRef": {"name": "s"}}]
    found = environment({"name": "A", "value": "$(B)3"}, {"name": "C", "value": "$(A)$(D)"}, envFrom=sources)
    assert found == {"A": "23", "B": "2", "S_T": "token", "C": "23$(D)"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "p"),
        ("metadata.namespace", "n"),
        ("metadata.uid", "u"),
        ("metadata.labels['app.kubernetes.io/name']", "x"),
        ("metadata.annotations['none']", ""),
        ("metadata.labels", 'app.kubernetes.io/name="x"'),
        ("status.podIP", "127.64.0.2"),
        ("spec.nodeName", "machine"),
        ("spec.serviceAccountName", "s"),
    ],
)
def test_fields_of_the_pod(path: str, value: str) -> None:
    assert field(POD, path) == value


def test_keys_of_config_maps_and_secrets() -> None:
    assert environment(from_("configMapKeyRef", name="c", key="A")) == {"V": "1"}
    assert environment(from_("secretKeyRef", name="s", key="T")) == {"V": "token"}
    assert environment(from_("secretKeyRef", name="s", key="U", optional=True)) == {}
    assert environment(from_("secretKeyRef", name="t", key="T", optional=True)) == {}
    for missing in (from_("secretKeyRef", name="s", key="U"), from_("configMapKeyRef", name="d", key="A")):
        with pytest.raises(NotYet) as caught:
            environment(missing)
        assert caught.value.reason == "CreateContainerConfigError"


def test_limits_are_in_units_of_the_divisor() -> None:
    resources = {"limits": {"cpu": "1500m", "memory": "2Gi"}}
    assert environment(from_("resourceFieldRef", resource="limits.cpu"), resources=resources) == {"V": "2"}
    memory = from_("resourceFieldRef", resource="limits.memory", divisor="1Mi")
    assert environment(memory, resources=resources) == {"V": "2048"}


@pytest.mark.parametrize(("text", "value"), [("500m", 0.5), (2, 2), ("1.5Gi", 1.5 * 2**30), ("3k", 3000)])
def test_quantities(text: str | int, value: float) -> None:
    assert quantity(text) == value


# Deployments

TEMPLATE: Object = {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [{"name": "c", "image": "i:1"}]}}


class Cluster:
    """A Deployment whose pods come and go at once, or when the test says so."""

    def __init__(self, replicas: int, **strategy: Any) -> None:
        self.user: Object = {
            "metadata": {"name": "d", "namespace": "n", "uid": "u", "generation": 1},
            "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "x"}}, "template": TEMPLATE},
        }
        if strategy:
            kind = strategy.pop("type", "RollingUpdate")
            self.user["spec"]["strategy"] = {"type": kind, "rollingUpdate": strategy}
        self.sets: list[Object] = []
        self.is_old_pod_left = False
        self.least_available: int | None = None
        self.most = 0

    def change(self, image: str) -> None:
        container = {"name": "c", "image": image}
        self.user["spec"]["template"] = TEMPLATE | {"spec": {"containers": [container]}}

    def step(self, ready: bool = True) -> deployment.Rollout:
        """One look. Pods of the current set are available then, if `ready`; those of the others stay as they are."""
        plan = deployment.plan(self.user, self.sets, self.is_old_pod_left)
        if plan.create is not None:
            self.sets.append(plan.create | {"status": {}})
        current = deployment.current_set(self.user, self.sets)
        self.sets = [s for s in self.sets if name_of(s) not in plan.delete]
        for replica_set in self.sets:
            replicas = plan.replicas.get(name_of(replica_set), replica_set["spec"]["replicas"])
            replica_set["spec"]["replicas"] = replicas
            available = replicas if ready else min(replicas, replica_set["status"].get("availableReplicas", 0))
            replica_set["status"] = {"replicas": replicas, "availableReplicas": available, "readyReplicas": available}
        if current is not None:
            current["metadata"]["annotations"] = {deployment.REVISION: str(plan.revision)}
        if self.least_available is not None:
            self.least_available = min(self.least_available, self.count("availableReplicas"))
            self.most = max(self.most, self.count("replicas"))
        return plan

    def settle(self, ready: bool = True) -> None:
        while (plan := self.step(ready)).create or plan.replicas or plan.delete:
            pass

    def count(self, name: str) -> int:
        return sum(int(s["status"].get(name, 0)) for s in self.sets)

    def replicas(self) -> dict[str, int]:
        """By revision."""
        return {s["metadata"]["annotations"][deployment.REVISION]: s["spec"]["replicas"] for s in self.sets}


@pytest.mark.parametrize(
    ("surge", "unavailable", "most", "least"),
    [
        (1, 0, 5, 4),
        (0, 1, 4, 3),
        ("25%", "25%", 5, 3),
        ("30%", "30%", 6, 3),
        (4, 4, 8, 0),
        (0, 0, 4, 3),
        ("10%", "10%", 5, 4),
    ],
)
def test_a_rolling_update_stays_within_surge_and_unavailability(
    surge: int | str, unavailable: int | str, most: int, least: int
) -> None:
    cluster = Cluster(4, maxSurge=surge, maxUnavailable=unavailable)
    cluster.settle()
    assert cluster.replicas() == {"1": 4}
    cluster.least_available = 4
    cluster.change("i:2")
    for _ in range(40):
        cluster.step(ready=False)
        cluster.step(ready=True)
    assert cluster.replicas() == {"1": 0, "2": 4}
    assert cluster.most <= most
    assert cluster.least_available >= least


def test_a_rollout_waits_for_pods_that_do_not_come_up() -> None:
    cluster = Cluster(3, maxSurge=1, maxUnavailable=0)
    cluster.settle()
    cluster.change("i:bad")
    cluster.settle(ready=False)
    assert cluster.replicas() == {"1": 3, "2": 1}


def test_the_broken_pods_of_an_old_set_go_first() -> None:
    cluster = Cluster(3, maxSurge=1, maxUnavailable=0)
    cluster.settle()
    cluster.change("i:bad")
    cluster.settle(ready=False)
    cluster.change("i:3")
    cluster.settle(ready=False)
    assert cluster.replicas() == {"1": 3, "2": 0, "3": 1}


def test_a_new_pod_that_is_not_up_makes_no_room_for_another() -> None:
    """Though all of the old set are broken too."""
    cluster = Cluster(3, maxSurge=1, maxUnavailable=0)
    cluster.settle(ready=False)
    cluster.change("i:2")
    cluster.settle(ready=False)
    assert cluster.replicas() == {"1": 3, "2": 1}


def test_going_back_takes_the_old_set_again_as_the_newest_revision() -> None:
    cluster = Cluster(2)
    cluster.settle()
    cluster.change("i:2")
    cluster.settle()
    cluster.change("i:1")
    cluster.settle()
    assert cluster.replicas() == {"3": 2, "2": 0}


def test_recreate_stops_all_before_it_starts_any() -> None:
    cluster = Cluster(2, type="Recreate")
    cluster.settle()
    cluster.change("i:2")
    cluster.is_old_pod_left = True
    cluster.settle()
    assert cluster.replicas() == {"1": 0, "2": 0}
    cluster.is_old_pod_left = False
    cluster.settle()
    assert cluster.replicas() == {"1": 0, "2": 2}


def test_history_is_as_long_as_it_may_be() -> None:
    cluster = Cluster(1)
    cluster.user["spec"]["revisionHistoryLimit"] = 2
    for number in range(5):
        cluster.change(f"i:{number}")
        cluster.settle()
    assert cluster.replicas() == {"3": 0, "4": 0, "5": 1}


def test_a_paused_deployment_only_scales() -> None:
    cluster = Cluster(2)
    cluster.settle()
    cluster.user["spec"] |= {"paused": True, "replicas": 3}
    cluster.change("i:2")
    cluster.settle()
    assert cluster.replicas() == {"1": 3}


def test_a_deployment_is_complete_when_nothing_of_the_old_is_left() -> None:
    cluster = Cluster(1, maxSurge=1, maxUnavailable=0)

    def status() -> tuple[bool, str]:
        found = deployment.status(cluster.user, cluster.sets, AT)
        cluster.user["status"] = found
        available, progressing = found["conditions"]
        return available["status"] == "True", progressing["reason"]

    cluster.step(ready=False)
    cluster.step(ready=False)
    assert status() == (False, "ReplicaSetUpdated")
    cluster.step()
    assert status() == (True, "NewReplicaSetAvailable")
    cluster.change("i:2")
    cluster.step()
    cluster.step()
    assert status() == (True, "ReplicaSetUpdated")
    cluster.settle()
    assert status() == (True, "NewReplicaSetAvailable")


def test_a_deployment_that_stands_still_is_late() -> None:
    cluster = Cluster(1)
    cluster.user["spec"]["progressDeadlineSeconds"] = 60
    cluster.step(ready=False)
    cluster.step(ready=False)
    cluster.user["status"] = deployment.status(cluster.user, cluster.sets, AT)
    since = datetime.now(UTC)
    for later_s, reason in ((30, "ReplicaSetUpdated"), (90, "ProgressDeadlineExceeded")):
        found = deployment.status(cluster.user, cluster.sets, since + timedelta(seconds=later_s))
        assert found["conditions"][1]["reason"] == reason


# Pods of a set


def pod(
    name: str, *, ready: bool = True, cost: int = 0, age_s: float = 10, phase: str = "Running", **more: Any
) -> Object:
    condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": stamp(more.pop("ready_for_s", 5))}
    metadata = {"name": name, "namespace": "n", "creationTimestamp": stamp(age_s), "labels": {"app": "x"}}
    metadata |= {"annotations": {replicaset.DELETION_COST: str(cost)}} | more.pop("metadata", {})
    status = {"phase": phase, "conditions": [condition], "podIP": f"127.64.0.{2 + len(name)}"}
    spec = {"nodeName": "machine", "containers": more.pop("containers", [{"name": "c"}])}
    return {"metadata": metadata, "spec": spec | more, "status": status}


def test_victims_are_chosen_as_kubernetes_does() -> None:
    in_order = [
        pod("unassigned", nodeName=""),
        pod("pending", phase="Pending", cost=100),
        pod("unready", ready=False, cost=100),
        pod("cheap", cost=-5, age_s=1000, ready_for_s=1000),
        pod("newly-ready", ready_for_s=1),
        pod("young", age_s=6),
        pod("old", age_s=7),
        pod("dear", cost=3, age_s=1, ready_for_s=0),
    ]
    shuffled = random.Random(1).sample(in_order, len(in_order))
    for count in range(len(in_order) + 1):
        assert [name_of(p) for p in replicaset.victims(shuffled, count)] == [name_of(p) for p in in_order[:count]]


def test_pods_that_end_do_not_count() -> None:
    wanted = {"spec": {"replicas": 3, "template": TEMPLATE}, "metadata": {"generation": 4}}
    leaving = pod("leaving", metadata={"deletionTimestamp": stamp(0)})
    pods = [pod("a"), pod("unready", ready=False), leaving, pod("failed", phase="Failed")]
    assert replicaset.num_missing(wanted, pods) == 1
    assert replicaset.victims(pods, 4) == [pods[1], pods[0]]
    status = replicaset.status(wanted, pods, AT)
    assert status == {
        "replicas": 2,
        "readyReplicas": 1,
        "availableReplicas": 1,
        "fullyLabeledReplicas": 2,
        "observedGeneration": 4,
    }


def test_a_pod_is_available_when_it_has_been_ready_for_long_enough() -> None:
    wanted = {"spec": {"replicas": 2, "template": TEMPLATE, "minReadySeconds": 8}, "metadata": {"generation": 1}}
    pods = [pod("a", ready_for_s=7), pod("b", ready_for_s=8)]
    assert replicaset.status(wanted, pods, AT)["availableReplicas"] == 1


def test_a_job_starts_pods_until_enough_have_succeeded_or_too_many_failed() -> None:
    job: Object = {"metadata": {}, "spec": {"backoffLimit": 1}}
    assert replicaset.num_missing_of_job(job, []) == 1
    assert replicaset.num_missing_of_job(job, [pod("a")]) == 0
    assert replicaset.num_missing_of_job(job, [pod("a", phase="Failed")]) == 1
    failed = [pod("a", phase="Failed"), pod("b", phase="Failed")]
    assert replicaset.num_missing_of_job(job, failed) == 0
    assert replicaset.job_status(job, failed)["conditions"][0]["type"] == "Failed"
    done = replicaset.job_status(job, [failed[0], pod("c", phase="Succeeded")])
    assert done["conditions"][0]["type"] == "Complete"
    assert done["completionTime"]


# Services


def test_only_ready_pods_that_stay_are_endpoints() -> None:
    of_user = {
        "metadata": {"name": "s", "namespace": "n", "uid": "u"},
        "spec": {"selector": {"app": "x"}, "ports": [{"port": 80}]},
    }
    leaving = pod("leaving", metadata={"deletionTimestamp": stamp(0)})
    other = pod("other", metadata={"labels": {"app": "y"}})
    elsewhere = pod("elsewhere", metadata={"namespace": "m"})
    found = service.endpoints(of_user, [pod("a"), pod("unready", ready=False), leaving, other, elsewhere])
    assert [(e.pod, e.ports) for e in found] == [("a", (80,))]
    of_user["spec"]["publishNotReadyAddresses"] = True  # type: ignore[index]
    assert len(service.endpoints(of_user, [pod("unready", ready=False), leaving])) == 1


def test_a_named_target_port_is_each_pods_own() -> None:
    port = {"name": "main", "port": 80, "targetPort": "http"}
    of_user = {
        "metadata": {"name": "s", "namespace": "n", "uid": "u"},
        "spec": {"selector": {"app": "x"}, "ports": [port]},
    }

    def serving(name: str, number: int) -> Object:
        return pod(name, containers=[{"name": "c", "ports": [{"name": "http", "containerPort": number}]}])

    found = service.endpoints(of_user, [serving("a", 8000), serving("b", 9000), pod("none")])
    assert [e.ports for e in found] == [(8000,), (9000,)]
    slices = service.slices(of_user, found)
    assert [s["ports"][0]["port"] for s in slices] == [8000, 9000]
    assert len({name_of(s) for s in slices}) == 2
    subsets = service.endpoints_object(of_user, found)["subsets"]
    assert [s["addresses"][0]["targetRef"]["name"] for s in subsets] == ["a", "b"]


# Scheduling


def test_a_node_takes_as_many_gpus_as_it_has() -> None:
    node = {"metadata": {"labels": {"zone": "a"}}, "status": {"allocatable": {GPU: "2"}}}

    def wanting(num_gpus: int, **spec: Any) -> Object:
        return pod("p", containers=[{"name": "c", "resources": {"limits": {GPU: num_gpus}}}], **spec)

    assert scheduler.why_not(wanting(2), node, []) == ""
    assert GPU in scheduler.why_not(wanting(3), node, [])
    assert GPU in scheduler.why_not(wanting(1), node, [wanting(2)])
    assert scheduler.why_not(wanting(0), node, [wanting(2)]) == ""
    assert scheduler.why_not(wanting(1), node, [wanting(2, nodeName="")]) == ""
    assert scheduler.why_not(wanting(0, nodeSelector={"zone": "a"}), node, []) == ""
    assert "selector" in scheduler.why_not(wanting(0, nodeSelector={"zone": "b"}), node, [])


# Probes and statuses


def test_a_verdict_takes_as_many_answers_in_a_row() -> None:
    threshold = Threshold.of({"successThreshold": 2, "failureThreshold": 3}, is_good=False)
    verdicts = []
    for answer in [True, False, True, True, False, False, True, False, False, False]:
        threshold.seen(answer)
        verdicts.append(threshold.is_good)
    assert verdicts == [False, False, False, True, True, True, True, True, True, False]


def running(name: str = "c", is_init: bool = False, **spec: Any) -> ContainerState:
    state = ContainerState(spec={"name": name} | spec, is_init=is_init)
    state.run()
    return state


def ended(exit_code: int, name: str = "c", is_init: bool = False, **spec: Any) -> ContainerState:
    state = running(name, is_init, **spec)
    state.end(exit_code)
    return state


@pytest.mark.parametrize(
    ("policy", "containers", "phase", "is_ready"),
    [
        ("Always", [ContainerState(spec={"name": "c"}, is_init=False)], "Pending", False),
        ("Always", [running("i", True), ContainerState(spec={"name": "c"}, is_init=False)], "Pending", False),
        ("Always", [ended(0, "i", True), running()], "Running", True),
        ("Always", [running("s", True, restartPolicy="Always"), running()], "Running", True),
        ("Always", [running(), running("d", readinessProbe={})], "Running", False),
        ("Always", [running(startupProbe={})], "Running", False),
        ("Always", [ended(0)], "Running", False),
        ("Never", [ended(0), ended(0, "d")], "Succeeded", False),
        ("Never", [ended(0), ended(3, "d")], "Failed", False),
        ("Never", [ended(0), running("d")], "Running", False),
        ("OnFailure", [ended(0)], "Succeeded", False),
        ("OnFailure", [ended(1)], "Running", False),
        ("Never", [ended(1, "i", True), ContainerState(spec={"name": "c"}, is_init=False)], "Failed", False),
    ],
)
def test_phase_and_readiness(policy: str, containers: list[ContainerState], phase: str, is_ready: bool) -> None:
    status = status_of({"metadata": {}, "spec": {"restartPolicy": policy}}, containers, "127.64.0.2", "127.64.0.1")
    conditions = {c["type"]: c["status"] for c in status["conditions"]}
    assert (status["phase"], conditions["Ready"]) == (phase, str(is_ready))


def test_a_new_pod_belongs_to_its_set() -> None:
    store = Store()
    value = {"kind": "ReplicaSet", "metadata": {}, "spec": {"replicas": 1, "template": TEMPLATE}}
    owner = store.create(Key(REPLICA_SET, "n", "d-1"), value)
    made = replicaset.pod_from(owner, "apps/v1", "ReplicaSet", random.Random(1))
    assert name_of(made).startswith("d-1-")
    assert made["metadata"]["labels"] == {"app": "x"}
    assert made["metadata"]["ownerReferences"][0]["uid"] == owner["metadata"]["uid"]
    assert made["spec"] == TEMPLATE["spec"]

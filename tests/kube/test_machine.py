"""The machine with real processes: small programs in pods, seen from outside."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.fakekube.machine import Machine, replicaset, running_machine
from tests.fakekube.machine.objects import (
    BUDGET,
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    ENDPOINT_SLICE,
    ENDPOINTS,
    EVENT,
    GPU,
    JOB,
    POD,
    REPLICA_SET,
    SECRET,
    SERVICE,
    SERVICE_ACCOUNT,
    condition,
    is_deleted,
    is_true,
    labels_of,
    name_of,
)
from tests.fakekube.store import Key, Object, Resource, Store
from tests.support.waiting import wait_until

pytestmark = pytest.mark.integration

NAMESPACE = "here"
PYTHON = [sys.executable, "-I", "-S", "-c"]
SERVER = """
import os, socket, sys, time
here = socket.create_server((os.environ["IP"], 8080))
while True:
    there, _ = here.accept()
    there.recv(4096)
    says = os.environ["SAYS"].encode()
    there.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n%s" % (len(says), says))
    there.close()
"""
"""Answers every request with SAYS. It does not handle SIGTERM, and ends at once."""


class Kube:
    """A store and a machine, as a client sees them."""

    def __init__(self, store: Store, machine: Machine) -> None:
        self.store = store
        self.machine = machine

    def create(self, resource: Resource, name: str, spec: Object | None = None, **parts: Any) -> Key:
        key = Key(resource, NAMESPACE, name)
        metadata = parts.pop("metadata", {})
        self.store.create(key, {"metadata": metadata} | ({"spec": spec} if spec is not None else {}) | parts)
        return key

    def pod(self, name: str, *containers: Object, labels: dict[str, str] | None = None, **spec: Any) -> Key:
        return self.create(POD, name, {"containers": list(containers)} | spec, metadata={"labels": labels or {}})

    def deployment(self, name: str, replicas: int, container: Object, **more: Any) -> Key:
        spec = {"terminationGracePeriodSeconds": 5, "containers": [container]} | more.pop("pod", {})
        template = {"metadata": {"labels": {"app": name}}, "spec": spec}
        selector = {"matchLabels": {"app": name}}
        return self.create(DEPLOYMENT, name, {"replicas": replicas, "selector": selector, "template": template} | more)

    def service(self, name: str, app: str, **more: Any) -> Key:
        return self.create(
            SERVICE, name, {"selector": {"app": app}, "ports": [{"port": 80, "targetPort": 8080}]} | more
        )

    def get(self, key: Key) -> Object:
        return self.store.get(key)

    def status(self, key: Key) -> Object:
        return self.get(key).get("status") or {}

    def pods(self, app: str) -> list[Object]:
        return [pod for pod in self.machine.pods() if labels_of(pod).get("app") == app]

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 120.0) -> Any:
        def found() -> Any:
            answer = condition()
            assert answer or self.machine.is_alive
            return answer

        return wait_until(found, timeout_s, every_s=0.01, seen=self.picture)

    def wait_for_rollout(self, key: Key) -> None:
        def is_done() -> bool:
            value = self.get(key)
            status, wanted = value.get("status") or {}, value["spec"]["replicas"]
            counts = {status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")}
            return status.get("observedGeneration") == value["metadata"]["generation"] and counts == {wanted}

        self.wait_for(is_done)

    def wait_for_service(self, key: Key) -> Key:
        """Until it has an address."""
        self.wait_for(lambda: self.get(key)["spec"].get("clusterIP"))
        return key

    def wait_until_ready(self, key: Key) -> Object:
        self.wait_for(lambda: is_true(self.get(key), "Ready"))
        return self.get(key)

    def wait_until_over(self, key: Key) -> None:
        self.wait_for(lambda: self.status(key).get("phase") in ("Succeeded", "Failed"))

    def wait_until_gone(self, key: Key) -> None:
        self.wait_for(lambda: not self.has(key))

    def has(self, key: Key) -> bool:
        return key in self.store.versions(key.resource)

    def container(self, key: Key, number: int = 0) -> Object:
        """What the status says of it."""
        found: Object = self.status(key).get("containerStatuses", [{}] * 9)[number]
        return found

    def reason(self, key: Key) -> str:
        return str(self.container(key).get("state", {}).get("waiting", {}).get("reason"))

    def reasons(self) -> Counter[str]:
        """Of Events: how often."""
        found: Counter[str] = Counter()
        for event in self.store.objects(EVENT):
            found[event["reason"]] += event["count"]
        return found

    def logged(self, key: Key, container: str = "c") -> Any:
        """What a container has written, as JSON."""
        return json.loads(self.wait_for(lambda: self.machine.logs(key.name, container)))

    def picture(self) -> str:
        found = {name_of(pod): pod.get("status") for pod in self.machine.pods()}
        return json.dumps([found, [event["message"] for event in self.store.objects(EVENT)]], indent=1)


@contextmanager
def running(**settings: Any) -> Iterator[Kube]:
    store = Store()
    with running_machine(store, {"repo/test": []}, **({"backoff_s": 0.05} | settings)) as machine:
        yield Kube(store, machine)


@pytest.fixture
def kube() -> Iterator[Kube]:
    with running() as kube:
        yield kube


def container(*argv: str, name: str = "c", env: dict[str, str] | None = None, **more: Any) -> Object:
    variables: list[Object] = [{"name": name, "value": value} for name, value in (env or {}).items()]
    variables.append({"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    return {"name": name, "image": "repo/test:1", "command": list(argv), "env": variables} | more


def python(code: str, **more: Any) -> Object:
    return container(*PYTHON, code, **more)


def server(says: str, **more: Any) -> Object:
    ready = {"tcpSocket": {"port": "http"}, "periodSeconds": 1, "initialDelaySeconds": 0.05}
    ports = [{"name": "http", "containerPort": 8080}]
    return python(SERVER, env={"SAYS": says}, ports=ports, **({"readinessProbe": ready} | more))


def shell(script: str, **more: Any) -> Object:
    return container("sh", "-c", script, **more)


def answer(address: str, port: int = 80) -> str:
    """Raises OSError: refused, or broken."""
    connection = http.client.HTTPConnection(address, port, timeout=60)
    try:
        connection.request("GET", "/")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def is_refused(address: str, port: int = 80) -> bool:
    try:
        answer(address, port)
    except ConnectionRefusedError:
        return True
    except (OSError, http.client.HTTPException):
        return False
    return False


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def load(address: str) -> Iterator[list[str]]:
    """Requests one after another, of two clients. What they are answered, and what goes wrong, stands in the list."""
    found: list[str] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                found.append(answer(address))
            except (OSError, http.client.HTTPException) as error:
                found.append(repr(error))

    clients = [threading.Thread(target=ask) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        yield found
    finally:
        over.set()
        for client in clients:
            client.join()


PATIENT_S = 60
"""Time for what must not fail by being slow: a probe's command, a hook, the end of a container."""
STAYS = {"preStop": {"sleep": {"seconds": 1}}}
"""Longer than anybody takes to see that the pod is leaving."""


def test_nobody_notices_a_rolling_update(kube: Kube) -> None:
    rolling = {"strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}}
    stays = {"preStop": {"sleep": {"seconds": 6}}}  # longer than a connection that has come to it may wait
    pod = {"terminationGracePeriodSeconds": PATIENT_S}
    key = kube.deployment("web", 2, server("one", lifecycle=stays), pod=pod, **rolling)
    service = kube.service("web", "web")
    kube.wait_for_rollout(key)
    with load(kube.get(service)["spec"]["clusterIP"]) as answers, least_available(kube, key) as seen:
        kube.store.modify(
            key, lambda d: d["spec"]["template"]["spec"].update(containers=[server("two", lifecycle=stays)])
        )
        kube.wait_for_rollout(key)
        kube.wait_for(lambda: len(kube.pods("web")) == 2)
        asked = len(answers)
        kube.wait_for(lambda: len(answers) > asked + 2)
    assert set(answers) == {"one", "two"}
    assert answers[-1] == "two"
    assert min(seen) == 2
    sets = {
        s["metadata"]["annotations"]["deployment.kubernetes.io/revision"]: s for s in kube.store.objects(REPLICA_SET)
    }
    assert {revision: s["spec"]["replicas"] for revision, s in sets.items()} == {"1": 0, "2": 2}
    assert kube.get(key)["metadata"]["annotations"]["deployment.kubernetes.io/revision"] == "2"


@contextmanager
def least_available(kube: Kube, key: Key) -> Iterator[list[int]]:
    """availableReplicas at every change of a Deployment, and the ready pods beside it."""
    seen: list[int] = []
    with kube.store.watch(lambda changed: changed == key or changed.resource == POD) as changes:
        yield seen
        kube.store.delete(kube.create(POD, "last", {"containers": [], "nodeName": "none"}))
        ready: dict[str, bool] = {}
        for change in changes:
            if change.key.name == "last":
                break
            if change.key == key:
                seen.append(change.object["status"].get("availableReplicas", 0))
            else:
                ready[change.key.name] = is_true(change.object, "Ready") and not is_deleted(change.object)
                if change.type != "ADDED" and sum(ready.values()) < 2 and len(ready) > 2:
                    seen.append(sum(ready.values()))


def test_scaling_down_takes_the_pods_that_cost_least(kube: Kube) -> None:
    key = kube.deployment("web", 4, server("x"))
    kube.wait_for_rollout(key)
    dear = sorted(name_of(pod) for pod in replicaset.victims(kube.pods("web"), 2))  # they would go
    annotations = {"controller.kubernetes.io/pod-deletion-cost": "10"}
    for name in dear:
        kube.store.modify(Key(POD, NAMESPACE, name), lambda pod: pod["metadata"]["annotations"].update(annotations))
    kube.store.modify(key, lambda d: d["spec"].update(replicas=2))
    kube.wait_for(lambda: len(kube.pods("web")) == 2)
    assert sorted(name_of(pod) for pod in kube.pods("web")) == dear
    kube.wait_for_rollout(key)


def test_recreate_never_runs_two_at_once(kube: Kube, tmp_path: Path) -> None:
    notes = (
        "trap 'sleep 0.3; echo end >> /notes/log; exit' TERM; echo begin >> /notes/log; while :; do sleep 0.02; done"
    )
    volumes = {"volumes": [{"name": "notes", "hostPath": {"path": str(tmp_path)}}]}
    mounted = {"volumeMounts": [{"name": "notes", "mountPath": "/notes"}]}
    key = kube.deployment("head", 1, shell(notes, **mounted), strategy={"type": "Recreate"}, pod=volumes)
    kube.wait_for_rollout(key)
    kube.wait_for((tmp_path / "log").exists)
    kube.store.modify(key, lambda d: d["spec"]["template"]["metadata"].update(annotations={"restarted": "now"}))
    kube.wait_for(lambda: (tmp_path / "log").read_text().split() == ["begin", "end", "begin"])
    kube.wait_for_rollout(key)


def test_a_deleted_deployment_leaves_nothing(kube: Kube) -> None:
    key = kube.deployment("web", 2, server("x"))
    service = kube.service("web", "web")
    kube.wait_for_rollout(key)
    kube.store.delete(key)
    kube.store.delete(service)
    left = (DEPLOYMENT, REPLICA_SET, POD, SERVICE, ENDPOINTS, ENDPOINT_SLICE)
    kube.wait_for(lambda: not any(kube.store.objects(resource) for resource in left))


def test_readiness_gates_the_service(kube: Kube, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    is_open = {"exec": {"command": ["test", "-e", "/gate/open"]}}
    probe = is_open | {"periodSeconds": 0.1, "failureThreshold": 1, "timeoutSeconds": PATIENT_S}
    mounted = {"volumeMounts": [{"name": "gate", "mountPath": "/gate"}]}
    volumes = [{"name": "gate", "hostPath": {"path": str(tmp_path)}}]
    key = kube.pod("p", server("x", readinessProbe=probe, **mounted), labels={"app": "web"}, volumes=volumes)
    service = kube.wait_for_service(kube.service("web", "web"))
    kube.wait_for(lambda: kube.reasons()["Unhealthy"])
    address = kube.get(service)["spec"]["clusterIP"]
    assert is_refused(address)
    assert not slice_addresses(kube)
    gate.touch()
    kube.wait_until_ready(key)
    kube.wait_for(lambda: not is_refused(address))
    assert slice_addresses(kube) == [kube.status(key)["podIP"]]
    gate.unlink()
    kube.wait_for(lambda: not is_true(kube.get(key), "Ready"))
    kube.wait_for(lambda: is_refused(address))
    assert kube.container(key)["restartCount"] == 0


def slice_addresses(kube: Kube) -> list[str]:
    return [e["addresses"][0] for value in kube.store.objects(ENDPOINT_SLICE) for e in value["endpoints"]]


def test_connections_go_to_the_pods_of_a_service_in_turn(kube: Kube) -> None:
    for name in ("a", "b"):
        kube.wait_until_ready(kube.pod(name, server(name), labels={"app": "web"}))
    address = kube.get(kube.wait_for_service(kube.service("web", "web")))["spec"]["clusterIP"]
    assert address.startswith("127.")
    kube.wait_for(lambda: not is_refused(address))
    assert Counter(answer(address) for _ in range(10)) == {"a": 5, "b": 5}


def test_a_container_waits_for_the_services_it_names(kube: Kube) -> None:
    client = python(
        "import sys; print('[\"' + '\", \"'.join(sys.argv[1:]) + '\"]')",
        args=["http://web.here.svc:80", "bare.here.svc"],
    )
    key = kube.pod("client", client, restartPolicy="Never")
    kube.wait_for(lambda: kube.reason(key) == "CreateContainerConfigError")
    address = kube.get(kube.wait_for_service(kube.service("web", "web")))["spec"]["clusterIP"]
    kube.service("bare", "web", clusterIP="None")
    web = kube.wait_until_ready(kube.pod("p", server("x"), labels={"app": "web"}))
    assert kube.logged(key) == [f"http://{address}:80", web["status"]["podIP"]]
    kube.wait_for(lambda: kube.status(key)["phase"] == "Succeeded")


@contextmanager
def beating() -> Iterator[list[float]]:
    """A thread notes the time every 0.05 s while the block is entered."""
    beats_s: list[float] = []
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.05):
            beats_s.append(time.time())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield beats_s
    finally:
        is_over.set()
        thread.join()


def test_a_pod_ends_as_it_was_told(kube: Kube, tmp_path: Path) -> None:
    """preStop, SIGTERM when that is over, and at the end of the grace time SIGKILL: to children too.

    A process that beats every 0.05 s, and a thread beside the kubelet's, show how long what is due is held up; limits
    give way to that.
    """
    note = "note() { echo $1 $(date +%s.%N) >> /notes/log; }"
    beat = "(trap '' TERM; while :; do date +%s.%N >> /notes/beats; sleep 0.05; done) &"
    script = f"{note}; {beat} trap 'note TERM' TERM; note begin; while :; do sleep 0.05; done"
    stop = {"exec": {"command": ["sh", "-c", f"{note}; note preStop; sleep 1; note stopped"]}}
    mounted = {"volumeMounts": [{"name": "notes", "mountPath": "/notes"}]}
    volumes = [{"name": "notes", "hostPath": {"path": str(tmp_path)}}]
    main = shell(script, lifecycle={"preStop": stop}, **mounted)
    key = kube.pod("p", main, terminationGracePeriodSeconds=4, volumes=volumes)
    log, beats = tmp_path / "log", tmp_path / "beats"
    kube.wait_for(lambda: beats.exists() and log.exists() and "begin" in log.read_text())
    with beating() as own_beats_s:
        deleted_at = time.time()
        kube.store.delete(key, 4)
        kube.wait_until_gone(key)
        took_s = time.time() - deleted_at
    notes = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert [name for name, _ in notes] == ["begin", "preStop", "stopped", "TERM"]
    at = {name: float(when) - deleted_at for name, when in notes}
    beats_s = [float(when) - deleted_at for when in (tmp_path / "beats").read_text().split()]
    gaps_s = [b - a for beats in (beats_s, own_beats_s) for a, b in itertools.pairwise(beats)]
    longest_gap_s = max(gaps_s)
    slack_s = 10 * longest_gap_s  # about half a second where nothing is held up
    print(f"longest gap {longest_gap_s:.3f} s; {at}, last beat {beats_s[-1]:.2f} s, gone {took_s:.2f} s")
    assert at["preStop"] < slack_s
    assert at["preStop"] + 1 <= at["stopped"] <= at["TERM"] < 1.3 + slack_s
    assert 4 - 2 * longest_gap_s <= beats_s[-1] < took_s < 4.5 + slack_s
    assert kube.reasons()["Killing"] == 1


def test_a_leaving_pod_is_no_endpoint_while_it_still_answers(kube: Kube, tmp_path: Path) -> None:
    stays = {"preStop": {"exec": {"command": ["sh", "-c", "until [ -e /gate/open ]; do sleep 0.05; done"]}}}
    mounted = {"volumeMounts": [{"name": "gate", "mountPath": "/gate"}]}
    volumes = [{"name": "gate", "hostPath": {"path": str(tmp_path)}}]
    key = kube.pod("p", server("x", lifecycle=stays, **mounted), labels={"app": "web"}, volumes=volumes)
    pod_ip = kube.wait_until_ready(key)["status"]["podIP"]
    address = kube.get(kube.wait_for_service(kube.service("web", "web")))["spec"]["clusterIP"]
    kube.wait_for(lambda: not is_refused(address))
    kube.store.delete(key, 1000)
    kube.wait_for(lambda: is_refused(address))
    assert answer(pod_ip, 8080) == "x"
    (tmp_path / "open").touch()
    kube.wait_until_gone(key)
    assert is_refused(pod_ip, 8080)


def test_a_frozen_pod_is_killed(kube: Kube) -> None:
    key = kube.pod("p", shell("echo $$$$; exec sleep 1000"), terminationGracePeriodSeconds=1)
    pid = kube.logged(key)
    os.kill(pid, signal.SIGSTOP)
    kube.store.delete(key, 1)
    kube.wait_until_gone(key)
    assert not lives(pid)


def test_a_pod_that_is_taken_away_is_killed_at_once(kube: Kube) -> None:
    stays = {"preStop": {"sleep": {"seconds": 1000}}}
    key = kube.pod("p", shell("trap '' TERM; echo $$$$; while :; do sleep 0.1; done", lifecycle=stays))
    pid = kube.logged(key)
    kube.store.delete(key)
    kube.wait_for(lambda: not lives(pid))


def test_nothing_of_a_pods_tree_survives_it(kube: Kube) -> None:
    """Neither a child that ignores SIGTERM, nor an orphan, nor one with a session of its own."""
    script = """
        trap '' TERM
        sh -c 'sleep 1001 & echo $$! > $HOME/orphan'
        setsid sh -c 'echo $$$$ > $HOME/session; exec sleep 1002' &
        sleep 1003 & echo $$! > $HOME/child
        while ! [ -s $HOME/session ]; do sleep 0.01; done
        echo [$(cat $HOME/orphan), $(cat $HOME/session), $(cat $HOME/child), $$$$]
        trap exit TERM
        while :; do sleep 0.05; done
    """
    key = kube.pod("p", shell(script))
    pids = kube.logged(key)
    assert all(map(lives, pids))
    kube.store.delete(key, 5)
    kube.wait_until_gone(key)
    assert not any(map(lives, pids))


def test_what_a_container_leaves_behind_ends_with_it(kube: Kube) -> None:
    key = kube.pod("p", shell("sleep 1000 & echo $!"), restartPolicy="Never")
    pid = kube.logged(key)
    kube.wait_for(lambda: kube.status(key)["phase"] == "Succeeded")
    assert not lives(pid)


def test_liveness_restarts_a_container(kube: Kube) -> None:
    is_well = {"exec": {"command": ["sh", "-c", "test -e $HOME/well"]}}
    probe = is_well | {"periodSeconds": 0.1, "failureThreshold": 2, "timeoutSeconds": PATIENT_S}
    heals = {"preStop": {"exec": {"command": ["sh", "-c", "touch $HOME/well"]}}}
    main = shell("exec sleep 1000", livenessProbe=probe, lifecycle=heals)
    key = kube.pod("p", main, terminationGracePeriodSeconds=PATIENT_S)
    kube.wait_for(lambda: kube.container(key).get("restartCount") == 1)
    kube.wait_until_ready(key)
    assert kube.container(key)["lastState"]["terminated"]["exitCode"] == 128 + signal.SIGTERM
    assert kube.reasons()["Unhealthy"]
    time.sleep(0.5)
    assert kube.container(key)["restartCount"] == 1


def test_a_container_has_its_time_to_start(kube: Kube) -> None:
    """Liveness and readiness are not asked before."""
    is_up = {"exec": {"command": ["sh", "-c", "test -e $HOME/up"]}, "periodSeconds": 0.1, "timeoutSeconds": PATIENT_S}
    startup, never = is_up | {"failureThreshold": 300}, is_up | {"failureThreshold": 1}
    main = shell(
        "sleep 1; touch $HOME/up; exec sleep 1000", startupProbe=startup, livenessProbe=never, readinessProbe=never
    )
    key = kube.pod("p", main)
    kube.wait_until_ready(key)
    assert kube.container(key)["restartCount"] == 0
    late = kube.pod("late", shell("exec sleep 1000", startupProbe=startup | {"failureThreshold": 2}))
    kube.wait_for(lambda: kube.container(late).get("restartCount"))


def test_a_grpc_probe_asks_for_health(kube: Kube) -> None:
    probe = {"grpc": {"port": 50052, "service": "s"}, "periodSeconds": 0.1, "failureThreshold": 1}
    key = kube.pod("p", container("sleep", "1000", readinessProbe=probe))
    address = kube.wait_for(lambda: kube.status(key).get("podIP"))
    kube.wait_for(lambda: kube.reasons()["Unhealthy"])
    servicer = health.HealthServicer()
    served = grpc.server(futures.ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, served)
    served.add_insecure_port(f"{address}:50052")
    served.start()
    try:
        servicer.set("s", health_pb2.HealthCheckResponse.NOT_SERVING)
        time.sleep(0.5)
        assert not is_true(kube.get(key), "Ready")
        servicer.set("s", health_pb2.HealthCheckResponse.SERVING)
        kube.wait_until_ready(key)
        servicer.set("s", health_pb2.HealthCheckResponse.NOT_SERVING)
        kube.wait_for(lambda: not is_true(kube.get(key), "Ready"))
    finally:
        served.stop(None).wait()


@pytest.mark.parametrize(("status", "is_ready"), [(200, True), (399, True), (400, False), (503, False)])
def test_an_http_probe_goes_by_the_status(kube: Kube, status: int, is_ready: bool) -> None:
    headers = [{"name": "X-Status", "value": str(status)}]
    get = {"path": "/readyz", "port": "http", "httpHeaders": headers}
    code = SERVER.replace("there.recv(4096)", "got = there.recv(4096).decode(); assert 'GET /readyz HTTP/1.1' in got")
    code = code.replace('b"HTTP/1.1 200', 'b"HTTP/1.1 " + got.split("X-Status: ")[1][:3].encode() + b"')
    probe = {"httpGet": get, "periodSeconds": 0.1, "failureThreshold": 1, "timeoutSeconds": PATIENT_S}
    main = python(code, env={"SAYS": ""}, ports=[{"name": "http", "containerPort": 8080}], readinessProbe=probe)
    key = kube.pod("p", main)

    def num_refused() -> int:
        return sum(e["count"] for e in kube.store.objects(EVENT) if f"statuscode: {status}" in e["message"])

    seen = kube.wait_for(lambda: "ready" if is_true(kube.get(key), "Ready") else "refused" if num_refused() > 5 else "")
    assert seen == ("ready" if is_ready else "refused"), kube.picture()


def test_init_containers_come_one_after_another(kube: Kube) -> None:
    volumes = [{"name": "work", "emptyDir": {}}]
    mounted = {"volumeMounts": [{"name": "work", "mountPath": "/data"}]}
    # The first does not succeed at once.
    first = shell("sleep 0.2; echo first >> /data/log; [ $(wc -l < /data/log) = 2 ]", name="first", **mounted)
    second = shell("echo second >> /data/log", name="second", **mounted)
    main = shell("""echo "\\"$(cat /data/log | tr '\\n' ' ')\\""; exec sleep 1000""", **mounted)
    key = kube.pod("p", main, initContainers=[first, second], volumes=volumes)
    kube.wait_until_ready(key)
    assert kube.logged(key) == "first first second "
    assert [c["restartCount"] for c in kube.status(key)["initContainerStatuses"]] == [1, 0]


def test_a_failed_init_container_fails_a_pod_that_does_not_restart(kube: Kube) -> None:
    main = shell("echo main")
    key = kube.pod("p", main, initContainers=[shell("exit 3", name="check")], restartPolicy="Never")
    kube.wait_for(lambda: kube.status(key).get("phase") == "Failed")
    assert kube.status(key)["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    assert kube.machine.logs("p", "c") == ""


def test_a_sidecar_is_there_before_and_after(kube: Kube) -> None:
    volumes = [{"name": "work", "emptyDir": {}}]
    mounted = {"volumeMounts": [{"name": "work", "mountPath": "/data"}]}
    is_up = {"exec": {"command": ["test", "-e", "/data/up"]}}
    probe = is_up | {"periodSeconds": 0.1, "failureThreshold": 300, "timeoutSeconds": PATIENT_S}
    told = "trap 'echo sidecar >> /data/log; cat /data/log; exit' TERM"
    waits = f"sleep 0.3; {told}; touch /data/up; while :; do sleep 0.02; done"
    sidecar = shell(waits, name="sidecar", restartPolicy="Always", startupProbe=probe, **mounted)
    main = shell("test -e /data/up || exit 1; sleep 0.2; echo main >> /data/log", **mounted)
    key = kube.pod("p", main, initContainers=[sidecar], volumes=volumes, restartPolicy="Never")
    kube.wait_for(lambda: kube.status(key).get("phase") == "Succeeded")
    kube.wait_for(lambda: kube.machine.logs("p", "sidecar").split() == ["main", "sidecar"])


def test_a_container_sees_what_it_was_given(kube: Kube, tmp_path: Path) -> None:
    """Environment, ConfigMaps, Secrets and shared folders, each name and path translated."""
    address = kube.get(kube.wait_for_service(kube.service("redis", "redis")))["spec"]["clusterIP"]
    text = "url: redis://redis.here.svc:6379\nhost: 0.0.0.0\nfile: /var/lib/x/state\ntmp: /tmp/ray\n"
    kube.create(CONFIG_MAP, "config", data={"x.yaml": text, "other": "o"})
    kube.create(SECRET, "keys", data={"token": "c2VzYW1l"}, type="Opaque")
    code = """
import json, os, pathlib, sys
read = lambda path: pathlib.Path(path).read_text()
print(json.dumps({
    "env": dict(os.environ), "args": sys.argv[1:], "config": read(sys.argv[1]), "one": read("/etc/one"),
    "secret": read("/etc/keys/token"), "labels": read("/etc/pod/labels"), "shared": read("/var/lib/x/note"),
    "through tmp": read(os.environ["TMPDIR"] + "/ray/note"),
}))
"""
    volumes = [
        {"name": "config", "configMap": {"name": "config", "items": [{"key": "x.yaml", "path": "sub/x.yaml"}]}},
        {"name": "one", "configMap": {"name": "config"}},
        {"name": "all", "projected": {"sources": [{"secret": {"name": "keys"}}]}},
        {"name": "pod", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "ray", "emptyDir": {"medium": "Memory"}},
    ]
    shared = [{"name": "ray", "mountPath": "/tmp/ray"}, {"name": "tmp", "mountPath": "/var/lib/x", "subPath": "x"}]
    mounts = [
        {"name": "config", "mountPath": "/etc/x/"},
        {"name": "one", "mountPath": "/etc/one", "subPath": "other"},
        {"name": "all", "mountPath": "/etc/keys"},
        {"name": "pod", "mountPath": "/etc/pod"},
        *shared,
    ]
    env = {"STATE": "/var/lib/x/state", "URL": "redis.here.svc.cluster.local:$(PORT)", "PORT": "1", "LATER": "$(PORT)"}
    main = python(code, args=["/etc/x/sub/x.yaml", "--host=0.0.0.0:$(PORT)", "$(STATE)"], env=env, volumeMounts=mounts)
    writes = shell("echo shared > /var/lib/x/note; echo ray > /tmp/ray/note", name="writes", volumeMounts=shared)
    key = kube.pod("p", main, initContainers=[writes], volumes=volumes, restartPolicy="Never", labels={"a": "b"})
    found = kube.logged(key)
    ip, state = kube.status(key)["podIP"], found["env"]["STATE"]
    assert state.endswith("/x/state")
    assert len(state) < 40, "sockets lie below"
    ray = str(Path(state).parents[1].with_name("v5"))
    assert found["config"] == f"url: redis://{address}:6379\nhost: {ip}\nfile: {state}\ntmp: {ray}\n"
    assert found["args"][1:] == [f"--host={ip}:1", state]
    assert (found["env"]["URL"], found["env"]["LATER"]) == (f"{address}:$(PORT)", "1")
    assert (found["one"], found["secret"], found["labels"]) == ("o", "sesame", 'a="b"')
    assert (found["through tmp"], found["shared"]) == ("ray\n", "shared\n")
    assert set(found["env"]) == {
        "PATH",
        "HOME",
        "TMPDIR",
        "LANG",
        "HOSTNAME",
        "IP",
        "LD_PRELOAD",
        "MACHINE_CONTAINER",
        "MACHINE_POD_IP",
        *env,
    } | ({"LC_CTYPE"} & set(found["env"]))


def test_a_copied_file_names_what_its_reader_mounts(kube: Kube) -> None:
    kube.create(CONFIG_MAP, "config", data={"x.yaml": "file: /var/lib/x/state"})
    volumes = [
        {"name": "config", "configMap": {"name": "config"}},
        {"name": "copy", "emptyDir": {}},
        {"name": "state", "emptyDir": {}},
    ]
    copy, state = {"name": "copy", "mountPath": "/etc/copy"}, {"name": "state", "mountPath": "/var/lib/x"}
    of_config = {"name": "config", "mountPath": "/etc/x"}
    copies = shell("cp /etc/x/x.yaml /etc/copy/", name="copies", volumeMounts=[of_config, copy])
    code = "import json, sys; print(json.dumps({'read': open(sys.argv[1]).read(), 'state': sys.argv[2]}))"
    main = python(code, args=["/etc/copy/x.yaml", "/var/lib/x/state"], volumeMounts=[copy, state])
    found = kube.logged(kube.pod("p", main, initContainers=[copies], volumes=volumes, restartPolicy="Never"))
    assert found["read"] == f"file: {found['state']}"
    assert not found["state"].startswith("/var/lib/x")


def test_a_claim_keeps_what_is_in_it(kube: Kube) -> None:
    claim = kube.create(CLAIM, "models", {"resources": {"requests": {"storage": "1Gi"}}})
    volumes = [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}]
    mounted = {"volumeMounts": [{"name": "models", "mountPath": "/models"}]}
    for name, seen in (("a", []), ("b", ["a"])):
        key = kube.pod(
            name,
            shell(f"cat /models/*; echo {name} > /models/{name}", **mounted),
            volumes=volumes,
            restartPolicy="Never",
        )
        kube.wait_until_over(key)
        assert [line for line in kube.machine.logs(name, "c").split() if len(line) == 1] == seen
        kube.store.delete(key)
    assert kube.status(claim)["phase"] == "Bound"


def test_tokens_go_to_those_who_mount_them() -> None:
    with running(kubeconfig_of=lambda user: f"/kube/{user}") as kube:
        kube.create(SERVICE_ACCOUNT, "closed", automountServiceAccountToken=False)
        script = 'echo "\\"$KUBECONFIG\\""'
        specs: dict[str, Object] = {
            "a": {},
            "b": {"serviceAccountName": "open"},
            "c": {"serviceAccountName": "closed"},
            "d": {"automountServiceAccountToken": False},
            "e": {"serviceAccountName": "closed", "automountServiceAccountToken": True},
        }
        keys = {name: kube.pod(name, shell(script), restartPolicy="Never", **spec) for name, spec in specs.items()}
        found = {name: kube.logged(key).removeprefix("/kube/system:serviceaccount:here:") for name, key in keys.items()}
        assert found == {"a": "default", "b": "open", "c": "", "d": "", "e": "closed"}


def test_a_container_that_crashes_is_started_again_and_again(kube: Kube) -> None:
    key = kube.pod("p", shell("exit 7"))
    kube.wait_for(lambda: kube.container(key).get("restartCount", 0) >= 3)
    assert kube.container(key)["lastState"]["terminated"]["exitCode"] == 7

    def crashed() -> Object | None:
        pod = kube.get(key)
        waiting = pod["status"]["containerStatuses"][0]["state"].get("waiting", {})
        return pod if waiting.get("reason") == "CrashLoopBackOff" else None

    pod = kube.wait_for(crashed)
    assert pod["status"]["phase"] == "Running"
    assert not is_true(pod, "Ready")


@pytest.mark.parametrize(
    ("main", "reason"),
    [
        (container("no-such-program"), "CrashLoopBackOff"),
        (container("sleep", "1", image="repo/other"), "ErrImagePull"),
        (container(), "CreateContainerError"),
        (container("sleep", "1", envFrom=[{"configMapRef": {"name": "none"}}]), "CreateContainerConfigError"),
    ],
)
def test_a_container_that_cannot_start_says_why(kube: Kube, main: Object, reason: str) -> None:
    key = kube.pod("p", main)
    kube.wait_for(lambda: kube.reason(key) == reason)
    kube.store.delete(key, 5)
    kube.wait_until_gone(key)


def test_a_job_runs_until_a_pod_has_succeeded(kube: Kube, tmp_path: Path) -> None:
    script = "echo x >> /notes/log; [ $(wc -l < /notes/log) = 2 ]"
    spec = {
        "restartPolicy": "Never",
        "containers": [shell(script, volumeMounts=[{"name": "notes", "mountPath": "/notes"}])],
        "volumes": [{"name": "notes", "hostPath": {"path": str(tmp_path)}}],
    }
    key = kube.create(JOB, "hook", {"template": {"spec": spec}})
    kube.wait_for(lambda: is_true(kube.get(key), "Complete"))
    assert (kube.status(key)["failed"], kube.status(key)["succeeded"]) == (1, 1)
    kube.store.delete(key)
    kube.wait_for(lambda: not kube.machine.pods())


def test_pods_wait_for_gpus() -> None:
    with running(num_gpus=1) as kube:
        limits: Any = {"resources": {"limits": {GPU: 1}}}
        first = kube.pod("a", container("sleep", "1000", **limits))
        kube.wait_until_ready(first)
        second = kube.pod("b", container("sleep", "1000", **limits))
        kube.wait_for(lambda: (condition(kube.get(second), "PodScheduled") or {}).get("reason") == "Unschedulable")
        assert kube.status(second)["phase"] == "Pending"
        kube.store.delete(first, 1)
        kube.wait_until_ready(second)


def test_a_budget_counts_the_healthy(kube: Kube) -> None:
    kube.wait_for_rollout(kube.deployment("web", 3, server("x")))
    key = kube.create(BUDGET, "web", {"minAvailable": "50%", "selector": {"matchLabels": {"app": "web"}}})
    kube.wait_for(lambda: kube.status(key).get("disruptionsAllowed") == 1)
    assert (kube.status(key)["currentHealthy"], kube.status(key)["desiredHealthy"]) == (3, 2)


def test_leaving_the_machine_ends_all_that_runs() -> None:
    threads = set(threading.enumerate())
    with running() as kube:
        key = kube.deployment("web", 2, server("x", lifecycle=STAYS))
        service = kube.service("web", "web")
        stubborn = kube.pod(
            "p", shell("trap '' TERM; setsid sleep 1000 & echo [$$$$, $!]; while :; do sleep 0.1; done")
        )
        running_on = kube.pod("q", shell("setsid sleep 1000 & echo [$$$$, $!]; while :; do sleep 0.1; done"))
        kube.wait_for_rollout(key)
        pids = kube.logged(stubborn) + kube.logged(running_on)
        kube.store.delete(stubborn, 30)
        kube.wait_for(lambda: kube.reasons()["Killing"])
        address = kube.get(service)["spec"]["clusterIP"]
        open_one = socket.create_connection((address, 80))
        folders = kube.machine.folder
        assert all(map(lives, pids))
    assert not any(map(lives, pids))
    assert set(threading.enumerate()) == threads
    assert is_refused(address)
    assert not folders.exists()
    open_one.close()


def test_two_pods_may_listen_on_all_addresses_at_one_port(kube: Kube) -> None:
    """IPv4 and IPv6 alike: Ray's processes do so."""
    four = 'socket.create_server((os.environ["IP"], 8080))'
    six = 'socket.create_server(("::", 8080), family=socket.AF_INET6, dualstack_ipv6=True)'
    any_address = SERVER.replace(four, 'socket.create_server(("", 8080))'), SERVER.replace(four, six)
    ready = {"tcpSocket": {"port": 8080}, "periodSeconds": 0.1}
    keys = [
        kube.pod(f"p{n}", python(code, env={"SAYS": str(n)}, readinessProbe=ready))
        for n, code in enumerate([*any_address, *any_address])
    ]
    addresses = [kube.wait_until_ready(key)["status"]["podIP"] for key in keys]
    assert [answer(address, 8080) for address in addresses] == ["0", "1", "2", "3"]
    assert is_refused("127.0.0.1", 8080)


def test_two_machines_do_not_meet() -> None:
    with running() as one, running() as other:
        pods = [kube.wait_until_ready(kube.pod("p", server("x"))) for kube in (one, other)]
        assert len({pod["status"]["podIP"] for pod in pods}) == 2
        assert len({pod["status"]["hostIP"] for pod in pods}) == 2


def test_a_broken_machine_says_so() -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(KeyError, match="containers"), flatten_subgroups=True), running() as kube:
        kube.create(POD, "p", {"nodeName": "machine"})
        wait_until(lambda: not kube.machine.is_alive)

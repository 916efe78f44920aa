"""The controllers: each looks at the store and writes what should be otherwise. Decisions are made in the pure modules.

`routes` and `look` are called after every change. `look` does one step of everything; what it writes leads to the next
call. Routes come first: when a Deployment says that it is available, its Service leads there.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from tests.fakekube.machine import deployment, replicaset, scheduler, service
from tests.fakekube.machine.addresses import Addresses
from tests.fakekube.machine.objects import (
    BUDGET,
    CLAIM,
    DEFAULT_GRACE_S,
    DEPLOYMENT,
    ENDPOINT_SLICE,
    ENDPOINTS,
    JOB,
    POD,
    REPLICA_SET,
    SERVICE,
    annotations_of,
    is_active,
    is_deleted,
    is_true,
    key_of,
    labels_of,
    matches,
    name_of,
    new_condition,
    owned,
    owner_uid,
)
from tests.fakekube.machine.proxy import Address
from tests.fakekube.machine.view import View
from tests.fakekube.store import Exists, Key, Missing, Object, Resource, Stale, Store

OWNERS = {"Deployment": DEPLOYMENT, "ReplicaSet": REPLICA_SET, "Job": JOB, "Service": SERVICE}
OWNED = (REPLICA_SET, POD, ENDPOINT_SLICE, ENDPOINTS)


class Controllers:
    def __init__(self, store: Store, view: View, addresses: Addresses, node: Key) -> None:
        self._store = store
        self._view = view
        self._addresses = addresses
        self._node = node
        self._rng = random.Random()

    def routes(self) -> dict[Address, list[Address]]:
        """Where the ports of Services lead."""
        found: dict[Address, list[Address]] = {}
        for of_user in self._living(SERVICE):
            found |= self._service(of_user)
        return found

    def look(self) -> None:
        """One step of everything."""
        at = datetime.now(UTC)
        self._collect_orphans()
        for replica_set in self._living(REPLICA_SET):
            self._replica_set(replica_set, at)
        for of_user in self._living(DEPLOYMENT):
            self._deployment(of_user, at)
        for job in self._living(JOB):
            self._job(job)
        self._schedule()
        for claim in self._living(CLAIM):
            self._bind(claim)
        for budget in self._living(BUDGET):
            self._budget(budget)

    def _replica_set(self, replica_set: Object, at: datetime) -> None:
        pods = owned(replica_set, self._view.objects(POD, replica_set["metadata"]["namespace"]))
        missing = replicaset.num_missing(replica_set, pods)
        for _ in range(missing):
            self._create(POD, replicaset.pod_from(replica_set, "apps/v1", "ReplicaSet", self._rng))
        for pod in replicaset.victims(pods, -missing) if missing < 0 else []:
            self._delete_pod(pod)
        # What a rollout goes by: what is left, not what was there before.
        pods = owned(replica_set, self._view.objects(POD, replica_set["metadata"]["namespace"]))
        self._set_status(REPLICA_SET, replica_set, replicaset.status(replica_set, pods, at))

    def _deployment(self, of_user: Object, at: datetime) -> None:
        namespace = of_user["metadata"]["namespace"]
        sets = owned(of_user, self._view.objects(REPLICA_SET, namespace))
        old = [s for s in sets if s is not deployment.current_set(of_user, sets)]
        old_pods = [pod for s in old for pod in owned(s, self._view.objects(POD, namespace))]
        plan = deployment.plan(of_user, sets, any(is_deleted(pod) or is_active(pod) for pod in old_pods))
        if plan.create is not None:
            sets.append(self._create(REPLICA_SET, plan.create) or plan.create)
        for name, replicas in plan.replicas.items():
            self._scale(Key(REPLICA_SET, namespace, name), replicas)
        for name in plan.delete:
            self._delete(Key(REPLICA_SET, namespace, name))
        current = deployment.current_set(of_user, sets)
        annotations = {deployment.REVISION: str(plan.revision)}
        if current is not None:
            copied = deployment.copied_annotations(of_user) | annotations
            self._annotate(REPLICA_SET, current, copied)
        self._annotate(DEPLOYMENT, of_user, annotations)
        self._set_status(DEPLOYMENT, of_user, deployment.status(of_user, sets, at))

    def _scale(self, key: Key, replicas: int) -> None:
        self._modify(key, lambda replica_set: replica_set["spec"].update(replicas=replicas))

    def _job(self, job: Object) -> None:
        pods = owned(job, self._view.objects(POD, job["metadata"]["namespace"]))
        for _ in range(replicaset.num_missing_of_job(job, pods)):
            self._create(POD, replicaset.pod_from(job, "batch/v1", "Job", self._rng))
        self._set_status(JOB, job, replicaset.job_status(job, pods))

    def _schedule(self) -> None:
        node = self._store.get(self._node)
        for pod in self._living(POD):
            if pod["spec"].get("nodeName"):
                continue
            if why := scheduler.why_not(pod, node, self._view.objects(POD)):
                unscheduled = new_condition(pod, "PodScheduled", False, "Unschedulable", why)
                self._set_status(POD, pod, {"phase": "Pending", "conditions": [unscheduled]})
            else:
                self._modify(key_of(POD, pod), lambda p: p["spec"].update(nodeName=name_of(node)))

    def _bind(self, claim: Object) -> None:
        wanted = (claim["spec"].get("resources") or {}).get("requests") or {}
        if "volumeName" not in claim["spec"]:
            name = f"pv-{claim['metadata']['uid']}"
            self._modify(key_of(CLAIM, claim), lambda c: c["spec"].update(volumeName=name))
        found = {"phase": "Bound", "accessModes": claim["spec"].get("accessModes") or [], "capacity": wanted}
        self._set_status(CLAIM, claim, found)

    def _budget(self, budget: Object) -> None:
        spec = budget["spec"]
        pods = self._view.objects(POD, budget["metadata"]["namespace"])
        pods = [pod for pod in pods if is_active(pod) and matches(spec.get("selector"), labels_of(pod))]
        healthy = sum(is_true(pod, "Ready") for pod in pods)
        if "maxUnavailable" in spec:
            wanted = len(pods) - deployment.rounded_up(spec["maxUnavailable"], len(pods))
        else:
            wanted = deployment.rounded_up(spec.get("minAvailable", 1), len(pods))
        found = {
            "observedGeneration": budget["metadata"]["generation"],
            "expectedPods": len(pods),
            "currentHealthy": healthy,
            "desiredHealthy": max(0, wanted),
            "disruptionsAllowed": max(0, healthy - max(0, wanted)),
        }
        self._set_status(BUDGET, budget, found)

    def _service(self, of_user: Object) -> dict[Address, list[Address]]:
        spec = of_user["spec"]
        if spec.get("type") == "ExternalName":
            return {}
        if not spec.get("clusterIP"):
            used = {other["spec"].get("clusterIP", "") for other in self._view.objects(SERVICE)}
            address = self._addresses.for_service(used)
            self._modify(key_of(SERVICE, of_user), lambda s: s["spec"].update(clusterIP=address, clusterIPs=[address]))
            return {}  # the change leads here again
        if spec.get("type") == "LoadBalancer":
            self._set_status(SERVICE, of_user, {"loadBalancer": {"ingress": [{"ip": spec["clusterIP"]}]}})
        if not spec.get("selector"):
            return {}
        found = service.endpoints(of_user, self._view.objects(POD, of_user["metadata"]["namespace"]))
        self._put(ENDPOINTS, service.endpoints_object(of_user, found))
        slices = service.slices(of_user, found)
        for value in slices:
            self._put(ENDPOINT_SLICE, value)
        for old in owned(of_user, self._view.objects(ENDPOINT_SLICE, of_user["metadata"]["namespace"])):
            if name_of(old) not in map(name_of, slices):
                self._delete(key_of(ENDPOINT_SLICE, old))
        if spec["clusterIP"] == "None":
            return {}
        ports = [port["port"] for port in spec.get("ports") or []]
        return {(spec["clusterIP"], port): [(e.ip, e.ports[n]) for e in found] for n, port in enumerate(ports)}

    def _collect_orphans(self) -> None:
        """Deletes what belongs to a controller that is gone. Those of kinds that are not known here are left alone."""
        uids = {value["metadata"]["uid"] for owner in OWNERS.values() for value in self._view.objects(owner)}
        for resource in OWNED:
            for value in self._living(resource):
                references = value["metadata"].get("ownerReferences") or []
                kind = next((r["kind"] for r in references if r.get("controller")), None)
                if kind in OWNERS and owner_uid(value) not in uids:
                    self._delete_pod(value) if resource == POD else self._delete(key_of(resource, value))

    def _living(self, resource: Resource) -> Iterator[Object]:
        return (value for value in self._view.objects(resource) if not is_deleted(value))

    def _delete_pod(self, pod: Object) -> None:
        grace_s = pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
        with contextlib.suppress(Missing):
            self._store.delete(key_of(POD, pod), grace_s)

    def _delete(self, key: Key) -> None:
        with contextlib.suppress(Missing):
            self._store.delete(key)

    def _create(self, resource: Resource, value: Object) -> Object | None:
        with contextlib.suppress(Exists):
            return self._store.create(key_of(resource, value), value)
        return None

    def _put(self, resource: Resource, value: Object) -> None:
        """Creates or replaces, whichever it needs."""
        parts = {name: part for name, part in value.items() if name != "metadata"}
        there = self._view.objects(resource, value["metadata"]["namespace"])
        old = next((other for other in there if name_of(other) == name_of(value)), None)
        if old is None:
            self._create(resource, value)
        elif owner_uid(old) != owner_uid(value) or old | parts != old:
            self._modify(key_of(resource, value), lambda newest: _replace(newest, parts, value["metadata"]))

    def _modify(self, key: Key, change: Callable[[Object], None]) -> None:
        """What is being deleted stays as it is."""

        def unless_deleted(value: Object) -> None:
            if not is_deleted(value):
                change(value)

        with contextlib.suppress(Missing, Stale):
            self._store.modify(key, unless_deleted)

    def _set_status(self, resource: Resource, value: Object, status: Object) -> None:
        if value.get("status") != status:
            self._modify(key_of(resource, value), lambda newest: newest.update(status=status))

    def _annotate(self, resource: Resource, value: Object, annotations: dict[str, str]) -> None:
        if not annotations.items() <= annotations_of(value).items():
            self._modify(
                key_of(resource, value),
                lambda newest: newest["metadata"].update(annotations=annotations_of(newest) | annotations),
            )


def _replace(value: Object, parts: Object, metadata: Object) -> None:
    value.update(parts)
    value["metadata"].update(metadata)

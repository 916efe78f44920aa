"""How long starts and roll-outs of large pools take, in virtual time: `reconcile` with Kubernetes and Ray around it.

A worker takes five minutes to load its model and half a minute to drain. Ray places it on any pod with room, where at
most `cluster.starting_per_node` load at a time. Kubernetes rolls a Deployment out as its documentation says: with
`maxSurge` more pods than its size, and at least its size less `maxUnavailable` of them ready.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

import pytest

from baton.cluster import Role
from baton.config import ClusterConfig
from deploy.controller.reconcile import (
    EndWorker,
    ForgetWorker,
    GivingWay,
    ObservedWorker,
    RetireWorker,
    StartWorker,
    WorkerPhase,
    is_serving,
    num_serving,
    reconcile,
)
from deploy.kubernetes.node_plan import NodeLayout, NodePod, PlacedWorker, plan, pod_rollout

START_S, DRAIN_S, POD_S, TICK_S = 300.0, 30.0, 10.0, 1.0
DECODE = Role.DECODE
NAME = "decode"


@dataclass(slots=True)
class Life:
    """A worker: what the controller sees of it, and when it goes on."""

    seen: ObservedWorker
    pod: str = ""
    until_s: float = 0.0
    """LEAVING, or STARTING with its turn: the time at which that is over."""
    since_s: float = 0.0
    has_turn: bool = False


class Kubernetes:
    """A Deployment of nodes, and the workers on them, of which `reconcile` decides."""

    def __init__(self, size: int, config: ClusterConfig, per_pod: int = 1) -> None:
        self.now_s = 0.0
        self.config = config
        self.per_pod = per_pod
        self.size = size
        self.num_pods = size // per_pod
        self.layout = NodeLayout({Role.PREFILL: "prefill", DECODE: NAME}, per_pod)
        self._names = count()
        self.pods: dict[str, NodePod] = {}
        self.runs_at_s: dict[str, float] = {}
        self.lives: dict[str, Life] = {}
        for _ in range(self.num_pods):
            self._new_pod(0.0)
        self.fewest = size
        self.most_loading = 0

    def whole(self) -> bool:
        return self.num_serving == self.size == len(self.lives) and not any(
            life.seen.is_outdated for life in self.lives.values()
        )

    @property
    def num_serving(self) -> int:
        return num_serving((life.seen for life in self.lives.values()), DECODE)

    @property
    def num_answering(self) -> int:
        """Workers that have to leave answer until then."""
        return sum(life.seen.phase is WorkerPhase.READY for life in self.lives.values())

    def roll_out(self) -> None:
        self.pods = {name: replace(pod, is_current=False) for name, pod in self.pods.items()}
        for life in self.lives.values():
            life.seen = replace(life.seen, is_outdated=True)

    def run(self, limit_s: float) -> float:
        """Return the seconds until everything is as it should be; the limit if it takes longer."""
        began_s = self.now_s
        while not self.whole() and self.now_s - began_s < limit_s:
            self.now_s += TICK_S
            self._live()
            self._reconcile()
            self._keep_pods()
            self.fewest = min(self.fewest, self.num_answering)
            self.most_loading = max(self.most_loading, sum(life.has_turn for life in self.lives.values()))
        return self.now_s - began_s

    def _live(self) -> None:
        for worker_id, life in list(self.lives.items()):
            if life.seen.phase is WorkerPhase.LEAVING and life.until_s <= self.now_s:
                del self.lives[worker_id]
            elif life.seen.phase is WorkerPhase.STARTING:
                self._start(life)

    def _start(self, life: Life) -> None:
        num_on = [other.pod for other in self.lives.values()]
        if not life.pod:
            free = [
                name
                for name, pod in self.pods.items()
                if pod.is_running and not pod.is_leaving and num_on.count(name) < self.per_pod
            ]
            life.pod = min(free, key=num_on.count, default="")
        loading = [other.pod for other in self.lives.values() if other.has_turn]
        if life.pod and not life.has_turn and loading.count(life.pod) < self.config.starting_per_node:
            life.has_turn, life.until_s = True, self.now_s + START_S
        waits_s = self.now_s - life.since_s
        life.seen = replace(
            life.seen, waits_for_room=not life.pod and waits_s > 10, waits_for_turn=bool(life.pod) and not life.has_turn
        )
        if life.has_turn and life.until_s <= self.now_s:
            is_outdated = not self.pods[life.pod].is_current
            life.has_turn = False
            life.seen = replace(life.seen, phase=WorkerPhase.READY, is_outdated=is_outdated)

    def _reconcile(self) -> None:
        rolling = pod_rollout(
            self.layout, list(self.pods.values()), [self._pod_of(life) for life in self.lives.values()]
        )
        workers = [life.seen for life in self.lives.values()]
        desired = {Role.PREFILL: 0, DECODE: self.size}
        for action in reconcile(desired, workers, self.now_s, self.config, GivingWay(room=rolling.room)):
            match action:
                case StartWorker(worker_id, role):
                    seen = ObservedWorker(id=worker_id, pool=role, role=role, phase=WorkerPhase.STARTING)
                    self.lives[worker_id] = Life(seen, since_s=self.now_s)
                case RetireWorker(worker_id):
                    self.lives[worker_id].seen = replace(self.lives[worker_id].seen, is_retiring=True)
                case EndWorker(worker_id):
                    life = self.lives[worker_id]
                    life.seen, life.has_turn = replace(life.seen, phase=WorkerPhase.LEAVING), False
                    life.until_s = self.now_s + DRAIN_S
                case ForgetWorker(worker_id):
                    del self.lives[worker_id]

    def _pod_of(self, life: Life) -> str:
        return life.pod if life.seen.phase in (WorkerPhase.READY, WorkerPhase.LEAVING) else ""

    def _keep_pods(self) -> None:
        """What the Deployment's controller does, with the deletion costs that `plan` gives the pods."""
        placed = [
            PlacedWorker(DECODE, DECODE, self._pod_of(life), is_staying=not life.seen.is_retiring)
            for life in self.lives.values()
        ]
        found = list(self.pods.values())
        wanted = plan(self.layout, {Role.PREFILL: 0, DECODE: self.size}, {NAME: self.num_pods}, found, placed)
        assert wanted.sizes == {NAME: self.num_pods}
        used = {life.pod for life in self.lives.values()}
        for name, pod in list(self.pods.items()):
            runs = self.runs_at_s[name] <= self.now_s
            self.pods[name] = replace(pod, cost=wanted.costs.get(name, pod.cost), is_running=runs)
            if pod.is_leaving and name not in used:
                del self.pods[name]
        kept = [pod for pod in self.pods.values() if not pod.is_leaving]
        older = sorted((pod for pod in kept if not pod.is_current), key=lambda pod: pod.cost)
        if not older:
            return
        least = self.num_pods - self.config.num_unavailable(self.num_pods)
        num_new_not_ready = sum(pod.is_current and not self._is_ready(pod) for pod in kept)
        num_to_spare = max(len(kept) - least - num_new_not_ready, 0)
        for pod in [pod for pod in older if not self._is_ready(pod)][:num_to_spare]:
            self._delete(pod)
        num_ready_to_spare = max(min(num_to_spare, sum(map(self._is_ready, kept)) - least), 0)
        for pod in [pod for pod in older if self._is_ready(pod)][:num_ready_to_spare]:
            self._delete(pod)
        num_kept = sum(not pod.is_leaving for pod in self.pods.values())
        num_new = sum(pod.is_current for pod in kept)
        for _ in range(min(self.num_pods + self.config.num_surge(self.num_pods) - num_kept, self.num_pods - num_new)):
            self._new_pod(POD_S)

    def _is_ready(self, pod: NodePod) -> bool:
        """Every worker on it serves, as the probe of the chart's pods asks."""
        on = [life for life in self.lives.values() if life.pod == pod.name]
        return bool(on) and all(life.seen.phase is WorkerPhase.READY for life in on)

    def _delete(self, pod: NodePod) -> None:
        """Its hook orders its workers to leave."""
        self.pods[pod.name] = replace(pod, is_leaving=True)
        for life in self.lives.values():
            if life.pod == pod.name:
                life.seen = replace(life.seen, is_retiring=True)

    def _new_pod(self, after_s: float) -> None:
        name = f"pod-{next(self._names)}"
        self.pods[name] = NodePod(name=name, deployment=NAME, is_running=not after_s)
        self.runs_at_s[name] = self.now_s + after_s


@pytest.mark.parametrize(("per_pod", "limit_s", "most_loading"), [(1, 720, 32), (4, 720, 32), (8, 1260, 16)])
def test_64_workers_of_five_minutes_are_whole_in_twelve_where_two_start_on_a_node(
    per_pod: int, limit_s: float, most_loading: int
) -> None:
    """On eight nodes only sixteen can start at a time."""
    cluster = Kubernetes(64, ClusterConfig(), per_pod)
    assert cluster.run(3600.0) <= limit_s
    assert cluster.most_loading == most_loading


def test_a_rollout_of_64_takes_twelve_minutes_and_a_quarter_may_be_missing() -> None:
    cluster = Kubernetes(64, ClusterConfig(max_surge="25%", max_unavailable="25%"))
    cluster.run(3600.0)
    cluster.fewest = 64
    cluster.roll_out()
    assert cluster.run(3600.0) <= 720.0
    assert cluster.fewest >= 48
    assert cluster.whole()


@pytest.mark.parametrize(("surge", "waves"), [("25%", 4), ("16", 4), ("50%", 2), ("100%", 2)])
def test_a_rollout_that_may_miss_no_worker_takes_a_wave_for_each_surge(surge: str, waves: int) -> None:
    """At most half of the pool starts at a time."""
    cluster = Kubernetes(64, ClusterConfig(max_surge=surge, max_unavailable="0"))
    cluster.run(3600.0)
    cluster.fewest = 64
    cluster.roll_out()
    took_s = cluster.run(3600.0)
    assert waves * START_S <= took_s <= waves * (START_S + DRAIN_S + 2 * POD_S)
    assert cluster.fewest >= 64


def test_after_the_death_of_all_workers_half_of_them_start_at_a_time() -> None:
    cluster = Kubernetes(64, ClusterConfig())
    cluster.run(3600.0)
    for life in cluster.lives.values():
        life.seen, life.pod = replace(life.seen, phase=WorkerPhase.DOWN), ""
    cluster.most_loading = 0
    for life in cluster.lives.values():
        assert not is_serving(life.seen)
    assert cluster.run(3600.0) <= 720.0
    assert cluster.most_loading == 32

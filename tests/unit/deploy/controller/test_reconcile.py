"""From the pools as they should be to what has to be done, on workers that exist only here."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster import Role
from baton.config import ClusterConfig
from deploy.controller.reconcile import (
    Action,
    EndWorker,
    ForgetWorker,
    GivingWay,
    ObservedWorker,
    RetireWorker,
    StartWorker,
    WorkerPhase,
    is_serving,
    reconcile,
)

PREFILL, DECODE = Role.PREFILL, Role.DECODE
DOWN, STARTING, READY, LEAVING = WorkerPhase
ONE_AT_A_TIME = ClusterConfig(max_surge="1", max_unavailable="1")


def sizes(prefill: int, decode: int) -> dict[Role, int]:
    return {PREFILL: prefill, DECODE: decode}


def worker(number: int, role: Role, phase: WorkerPhase = READY, **fields: Any) -> ObservedWorker:
    return ObservedWorker(id=f"worker-{number}", pool=role, role=role, phase=phase, **fields)


def prefill(number: int) -> ObservedWorker:
    return worker(number, PREFILL)


def decode(number: int, num_requests: int = 0, num_unique_blocks: int = 0) -> ObservedWorker:
    return worker(number, DECODE, num_requests=num_requests, num_unique_blocks=num_unique_blocks)


def decide(
    prefill: int, decode: int, *workers: ObservedWorker, now_s: float = 0.0, config: ClusterConfig = ONE_AT_A_TIME
) -> list[Action]:
    return reconcile(sizes(prefill, decode), workers, now_s, config)


def test_nothing_to_do() -> None:
    assert decide(1, 2, prefill(100), decode(0), decode(1)) == []


def test_the_workers_of_the_emptiest_pod_leave_first() -> None:
    full = [replace(decode(number), num_neighbours=3) for number in range(4)]
    busy = replace(decode(4, num_requests=9), num_neighbours=0)
    assert decide(0, 4, *full, busy) == [RetireWorker("worker-4"), EndWorker("worker-4")]


def test_new_workers_take_the_smallest_free_numbers() -> None:
    assert decide(0, 3, decode(1)) == [StartWorker("worker-0", DECODE), StartWorker("worker-2", DECODE)]


def test_a_worker_keeps_its_id_whatever_its_role() -> None:
    moved = replace(prefill(0), role=DECODE)
    assert decide(1, 2, moved, decode(1)) == [StartWorker("worker-2", PREFILL)]


def test_at_the_first_start_prefill_workers_take_the_first_numbers() -> None:
    """Whichever of a few that start at a time are ready first, and though the pool that has nobody goes first."""
    workers: dict[str, ObservedWorker] = {}
    while starts := [action for action in decide(6, 3, *workers.values()) if isinstance(action, StartWorker)]:
        for start in starts:
            workers[start.worker_id] = worker(int(start.worker_id.removeprefix("worker-")), start.role, STARTING)
        begun = next(each for each in workers.values() if each.phase is STARTING)
        workers[begun.id] = replace(begun, phase=READY)
    assert {each.id: each.role for each in workers.values()} == {
        f"worker-{number}": PREFILL if number < 6 else DECODE for number in range(9)
    }


def test_pools_share_the_numbers() -> None:
    assert decide(2, 2, decode(1)) == [
        StartWorker("worker-0", PREFILL), StartWorker("worker-2", PREFILL), StartWorker("worker-3", DECODE),
    ]  # fmt: skip


@pytest.mark.parametrize("phase", WorkerPhase)
def test_the_number_of_a_worker_that_leaves_is_not_free(phase: WorkerPhase) -> None:
    leaving = worker(0, DECODE, phase=phase, is_retiring=True)
    assert StartWorker("worker-2", DECODE) in decide(0, 2, leaving, decode(1))


def test_the_dead_are_started_again_under_their_id_once_their_wait_is_over() -> None:
    dead = worker(1, DECODE, phase=DOWN, start_at_s=5.0)
    assert decide(0, 2, decode(0), dead, now_s=4.9) == []
    assert decide(0, 2, decode(0), dead, now_s=5.0) == [StartWorker("worker-1", DECODE)]


def test_a_dead_worker_comes_back_in_the_role_that_it_had() -> None:
    dead = worker(100, DECODE, phase=DOWN)
    assert decide(0, 1, dead) == [StartWorker("worker-100", DECODE)]


def test_after_a_mass_death_a_few_start_at_a_time() -> None:
    """Half of both pools together, but some even of a small cluster; or as many as are configured."""
    dead = [worker(number, DECODE, phase=DOWN) for number in range(20)]
    assert len(decide(0, 20, *dead)) == len(decide(10, 10, *dead[:10])) == 10
    assert len(decide(0, 5, *dead[:5])) == 4
    starting = [replace(worker, phase=STARTING) for worker in dead[:3]]
    assert len(decide(0, 20, *starting, *dead[3:])) == 10 - 3
    few = ClusterConfig(starting=5)
    assert len(decide(0, 20, *dead, config=few)) == 5
    assert len(decide(0, 20, *starting, *dead[3:], config=few)) == 2


def test_workers_that_wait_for_their_turn_on_a_node_do_not_hold_up_others() -> None:
    """They load nothing yet. They come, though: nobody else has to make room for them."""
    few = ClusterConfig(starting=2, max_unavailable="1")
    waiting = [worker(n, DECODE, phase=STARTING, waits_for_turn=True) for n in range(1, 5)]
    assert len(decide(0, 9, *waiting, config=few)) == 2
    retiring = replace(decode(9), is_retiring=True)
    others = [decode(number) for number in range(10, 13)]
    assert not [a for a in decide(0, 8, retiring, *others, *waiting, config=few) if isinstance(a, EndWorker)]


def test_both_pools_come_back_side_by_side() -> None:
    """The pool that has nobody first: else a large decode pool would hold up all prompts."""
    dead = [worker(number, DECODE, phase=DOWN) for number in range(10)]
    starts = decide(1, 11, decode(10), *dead, worker(100, PREFILL, phase=DOWN))
    assert starts[0] == StartWorker("worker-100", PREFILL)


def test_workers_that_ray_has_no_room_for_do_not_hold_up_others() -> None:
    waiting = [worker(n, DECODE, phase=STARTING, waits_for_room=True) for n in range(1, 9)]
    dead = worker(100, PREFILL, phase=DOWN)
    assert decide(1, 9, decode(0), *waiting, dead) == [StartWorker("worker-100", PREFILL)]


def test_scaling_in_takes_those_that_serve_least() -> None:
    workers = [decode(0, num_requests=3), decode(1, num_requests=1), decode(2, num_requests=2)]
    assert decide(0, 2, *workers) == [RetireWorker("worker-1"), EndWorker("worker-1")]


def test_among_those_it_takes_the_one_whose_cache_is_missed_least() -> None:
    workers = [decode(0, 1, 500), decode(1, 1, 900), decode(2, 1, 400), decode(3, 2)]
    assert decide(0, 3, *workers) == [RetireWorker("worker-2"), EndWorker("worker-2")]


def test_otherwise_the_highest_number_goes() -> None:
    assert decide(0, 1, decode(2), decode(10)) == [RetireWorker("worker-10"), EndWorker("worker-10")]


def test_workers_that_do_not_serve_yet_go_first() -> None:
    busy = decode(0, num_requests=9)
    starting = worker(1, DECODE, phase=STARTING)
    down = worker(2, DECODE, phase=DOWN, start_at_s=99.0)
    assert decide(0, 1, busy, starting, down) == [
        RetireWorker("worker-1"), RetireWorker("worker-2"), EndWorker("worker-1"), ForgetWorker("worker-2"),
    ]  # fmt: skip


def test_the_last_decode_worker_stays_until_another_is_ready() -> None:
    drained = replace(decode(0), is_retiring=True)
    assert decide(0, 1, drained) == [StartWorker("worker-1", DECODE)]
    assert decide(0, 1, drained, worker(1, DECODE, phase=STARTING)) == []
    assert decide(0, 1, drained, decode(1)) == [EndWorker("worker-0")]


def test_a_worker_that_changes_its_role_stands_in_for_nobody() -> None:
    drained = replace(decode(0), is_retiring=True)
    changing = replace(decode(1), is_held=True)
    assert decide(0, 2, drained, changing) == [StartWorker("worker-2", DECODE)]


def test_of_many_that_are_drained_one_goes_for_each_that_comes() -> None:
    drained = [replace(decode(n), is_retiring=True) for n in range(8)]
    coming = [worker(n, DECODE, phase=STARTING) for n in (9, 10, 11)]
    come = [replace(worker, phase=READY) for worker in coming]

    def leaves(*workers: ObservedWorker) -> list[str]:
        return [action.worker_id for action in decide(0, 8, *workers) if isinstance(action, EndWorker)]

    assert leaves(*drained, decode(8), *coming) == ["worker-0", "worker-1"]
    assert leaves(*drained[2:], decode(8), *coming) == []
    assert leaves(*drained[2:], decode(8), *come) == ["worker-2", "worker-3", "worker-4"]


def test_where_there_is_no_room_for_others_drained_workers_make_it_one_at_a_time() -> None:
    """Ray has room for five of eight."""
    drained = [replace(decode(n), is_retiring=True) for n in range(2)]
    others = [decode(n) for n in (2, 3, 4)]
    waiting = [worker(n, DECODE, phase=STARTING, waits_for_room=True) for n in range(5, 10)]
    assert decide(0, 8, *drained, *others, *waiting) == [EndWorker("worker-0")]
    leaving = replace(drained[0], phase=LEAVING)
    assert decide(0, 8, leaving, drained[1], *others, *waiting) == []
    assert decide(0, 8, drained[1], *others, replace(waiting[0], waits_for_room=False), *waiting[1:]) == []


def test_a_worker_that_hangs_stands_in_for_nobody_and_may_always_leave() -> None:
    drained, hanging = replace(decode(0), is_retiring=True), replace(decode(1), is_silent=True)
    assert decide(0, 1, drained, hanging) == []
    assert decide(0, 1, decode(0, num_requests=9), hanging) == [RetireWorker("worker-1"), EndWorker("worker-1")]
    assert decide(0, 1, replace(hanging, is_retiring=True)) == [EndWorker("worker-1"), StartWorker("worker-0", DECODE)]


def test_a_worker_that_drains_without_an_order_goes_at_once_and_another_takes_its_place() -> None:
    """Whoever told it: it takes no new work, so nobody is served by its waiting for the other."""
    draining = replace(decode(0, num_requests=7), is_draining=True)
    assert decide(0, 1, draining) == [RetireWorker("worker-0"), EndWorker("worker-0"), StartWorker("worker-1", DECODE)]
    assert decide(0, 1, draining, decode(1)) == [RetireWorker("worker-0"), EndWorker("worker-0")], "no other is surplus"
    ordered = replace(draining, is_retiring=True)
    assert decide(0, 1, ordered) == [EndWorker("worker-0"), StartWorker("worker-1", DECODE)]
    drained = replace(decode(1), is_retiring=True)
    assert EndWorker("worker-1") not in decide(0, 1, draining, drained), "it stands in for nobody"


def rolling(*workers: ObservedWorker, desired: tuple[int, int] = (0, 2), room: Role = DECODE) -> list[Action]:
    """What is done while a newer version's pod of a pool has room."""
    return reconcile(sizes(*desired), workers, 0.0, ONE_AT_A_TIME, GivingWay(room={room: 1}))


def older(worker: ObservedWorker, role: Role | None = None) -> ObservedWorker:
    """The worker on a pod of an older version, and in that role by now."""
    return replace(worker, is_outdated=True, role=role or worker.role)


def test_a_newer_version_begins_before_another_worker_leaves() -> None:
    """The one that leaves is on an older pod, however much it has to do."""
    before = [replace(older(decode(0)), num_requests=9), replace(older(decode(1)), num_requests=8)]
    begun = worker(2, DECODE, phase=STARTING)
    assert rolling(*before) == [StartWorker("worker-2", DECODE)]
    assert rolling(*before, begun) == []
    served = decide(0, 2, *before, decode(2))
    assert served == [RetireWorker("worker-1"), EndWorker("worker-1")]
    leaving = replace(before[1], phase=LEAVING, is_retiring=True)
    assert decide(0, 2, before[0], leaving, decode(2)) == []
    assert rolling(before[0], decode(2)) == [StartWorker("worker-1", DECODE)]
    assert rolling(decode(1), decode(2)) == [], "all are of the newer version"


@pytest.mark.parametrize(
    ("surge", "room", "num_started"), [("3", 5, 3), ("25%", 5, 2), ("5", 2, 2), ("0", 5, 0), ("100%", 9, 8)]
)
def test_of_a_newer_version_as_many_begin_as_have_room_and_are_allowed(surge: str, room: int, num_started: int) -> None:
    before = [older(decode(number)) for number in range(8)]
    config = ClusterConfig(max_surge=surge, max_unavailable="1", starting=99)

    def decided(*workers: ObservedWorker) -> list[Action]:
        return reconcile(sizes(0, 8), workers, 0.0, config, GivingWay(room={DECODE: room}))

    assert decided(*before) == [StartWorker(f"worker-{8 + number}", DECODE) for number in range(num_started)]
    begun = [worker(8 + number, DECODE, phase=STARTING) for number in range(num_started)]
    assert decided(*before, *begun) == []
    leaving = [replace(each, is_retiring=True, phase=LEAVING) for each in before[:2]]
    assert len(decided(*leaving, *before[2:])) == max(min(num_started, room - 2), 0) + 2, "in place of both, and more"


def test_workers_whose_replacements_serve_leave_together() -> None:
    before, come = [older(decode(number)) for number in range(4)], [decode(number) for number in (4, 5, 6)]
    ended = [action for action in decide(0, 4, *before, *come) if isinstance(action, EndWorker)]
    assert ended == [EndWorker("worker-1"), EndWorker("worker-2"), EndWorker("worker-3")]


def test_where_none_may_be_missing_a_worker_leaves_once_its_replacement_serves() -> None:
    none = ClusterConfig(max_unavailable="0")
    drained, others = replace(decode(0), is_retiring=True), [decode(1), decode(2)]
    coming = worker(3, DECODE, phase=STARTING)
    assert decide(0, 3, drained, *others, coming, config=none) == []
    assert decide(0, 3, drained, *others, coming) == [EndWorker("worker-0")]
    assert decide(0, 3, drained, *others, replace(coming, phase=READY), config=none) == [EndWorker("worker-0")]
    waiting = replace(coming, waits_for_room=True)
    assert decide(0, 3, drained, *others, waiting, config=none) == [EndWorker("worker-0")], "it has the room"
    assert in_place(0, 3, drained, *others, coming, config=none) == [EndWorker("worker-0")]


def test_a_version_that_does_not_start_takes_nobody_s_place() -> None:
    """It is tried again and again beside all of the older ones, and forgotten when its pod goes."""
    before = [older(decode(0)), older(decode(1))]
    dead = worker(2, DECODE, phase=DOWN, start_at_s=5.0)
    assert rolling(*before, dead) == []
    assert rolling(*before, replace(dead, start_at_s=0.0)) == [StartWorker("worker-2", DECODE)]
    assert decide(0, 2, *before, dead) == [RetireWorker("worker-2"), ForgetWorker("worker-2")]


def test_a_pool_that_is_not_whole_mends_itself_first() -> None:
    """The newer version's pod takes what is missing."""
    dead = worker(1, DECODE, phase=DOWN)
    assert rolling(older(decode(0)), dead) == [StartWorker("worker-1", DECODE)]
    assert rolling(older(decode(0)), replace(dead, phase=STARTING)) == []
    assert rolling(older(decode(0))) == [StartWorker("worker-1", DECODE)]


def test_a_worker_that_changed_its_role_is_drained_off_an_older_pod() -> None:
    """None that begins in its pod's pool would have its role. Others on older pods of that pool give way first."""
    moved = older(prefill(100), DECODE)
    mates = [decode(0), decode(1)]
    assert rolling(moved, *mates, desired=(0, 3), room=PREFILL) == [
        RetireWorker("worker-100"),
        EndWorker("worker-100"),
        StartWorker("worker-2", DECODE),
    ]
    assert rolling(moved, *mates, older(prefill(101)), desired=(1, 3), room=PREFILL) == [
        StartWorker("worker-2", PREFILL)
    ]
    others = replace(older(prefill(101), DECODE), is_retiring=True, phase=LEAVING)
    assert rolling(moved, *mates, others, desired=(0, 3), room=PREFILL) == [], "one at a time"
    assert rolling(moved, *mates, desired=(0, 3), room=DECODE) == []


def in_place(
    prefill: int, decode: int, *workers: ObservedWorker, config: ClusterConfig = ONE_AT_A_TIME
) -> list[Action]:
    """What is done where no worker has room beside the one that it replaces."""
    giving_way = GivingWay(in_place=True, room={DECODE: 1})
    return reconcile(sizes(prefill, decode), workers, 0.0, config, giving_way)


def test_in_place_the_last_worker_of_a_pool_leaves_to_the_other_pool() -> None:
    """First the prefill worker, for a decode worker computes prompts; the decode worker when that one is back."""
    first, other = (replace(each, is_retiring=True) for each in (prefill(0), decode(1)))
    starts = [StartWorker("worker-2", PREFILL), StartWorker("worker-3", DECODE)]
    assert decide(1, 1, first, other) == starts
    assert in_place(1, 1, first, other) == [EndWorker("worker-0"), *starts]
    coming = worker(2, PREFILL, phase=STARTING)
    waiting = worker(3, DECODE, phase=STARTING, waits_for_room=True)
    assert in_place(1, 1, other, coming, waiting) == []
    assert in_place(1, 1, other, prefill(2), waiting) == [EndWorker("worker-1")]
    assert in_place(0, 1, other, waiting) == [EndWorker("worker-1")]


def test_in_place_at_most_one_of_a_pool_is_missing() -> None:
    """No pod of a newer version comes before an older one has gone, so none begins there beside them."""
    drained = [replace(decode(n), is_retiring=True) for n in range(2)]
    coming = [worker(n, DECODE, phase=STARTING) for n in (3, 4)]
    assert in_place(0, 3, *drained, decode(2), *coming) == [EndWorker("worker-0")]
    assert in_place(0, 2, older(decode(0)), older(decode(1))) == []


def test_a_prefill_pool_that_is_to_be_empty_needs_nobody_else() -> None:
    assert decide(0, 1, prefill(100), decode(0)) == [RetireWorker("worker-100"), EndWorker("worker-100")]


def test_a_change_of_role_under_way_is_left_alone() -> None:
    changing = replace(decode(1), is_held=True)
    assert decide(1, 2, prefill(100), decode(0), changing) == []
    assert decide(1, 1, prefill(100), decode(0, num_requests=5), changing) == [RetireWorker("worker-0")], (
        "orders refuse this meanwhile; even so nobody is left without a decode worker"
    )


def test_a_worker_that_has_to_leave_does_so_after_its_change_of_role() -> None:
    changing = replace(decode(1), is_held=True, is_retiring=True)
    assert decide(0, 1, decode(0), changing) == []
    assert decide(0, 1, decode(0), replace(changing, is_held=False)) == [EndWorker("worker-1")]


def test_who_leaves_is_not_told_twice() -> None:
    leaving = worker(1, DECODE, phase=LEAVING, is_retiring=True)
    assert decide(0, 1, decode(0), leaving) == []


class World:
    """Does what it is told, with workers that die and come up at random."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.config = ClusterConfig(
            starting=self.dice.choice((0, 1, 3)),
            max_unavailable=self.dice.choice(("0", "1", "2", "25%", "100%")),
        )
        self.desired = sizes(self.dice.randrange(0, 6), self.dice.randrange(1, 6))
        self.workers: dict[str, ObservedWorker] = {}
        self.now_s = 0.0

    def obey(self) -> list[Action]:
        actions = reconcile(self.desired, list(self.workers.values()), self.now_s, self.config)
        serving_before = {role: self.serving(role) for role in Role}
        num_loading = sum(w.phase is STARTING and not w.waits_for_turn for w in self.workers.values())
        was_leaving = {w.role for w in self.workers.values() if w.phase is LEAVING}
        for action in actions:
            match action:
                case StartWorker(worker_id, role):
                    before = self.workers.get(worker_id)
                    assert before is None or (before.phase is DOWN and before.role is role)
                    assert before is None or before.start_at_s <= self.now_s
                    self.workers[worker_id] = ObservedWorker(id=worker_id, pool=role, role=role, phase=STARTING)
                case RetireWorker(worker_id):
                    assert not self.workers[worker_id].is_retiring
                    self.workers[worker_id] = replace(self.workers[worker_id], is_retiring=True)
                case EndWorker(worker_id):
                    worker = self.workers[worker_id]
                    assert worker.is_retiring
                    assert not worker.is_held
                    assert worker.phase in (STARTING, READY)
                    self.workers[worker_id] = replace(worker, phase=LEAVING, is_silent=False, is_draining=False)
                case ForgetWorker(worker_id):
                    assert self.workers.pop(worker_id).phase is DOWN
        starting = [
            w for w in self.workers.values() if w.phase is STARTING and not w.is_retiring and not w.waits_for_room
        ]
        loading = sum(not w.waits_for_turn for w in starting)
        assert loading <= max(self.config.num_starting(sum(self.desired.values())), num_loading)
        for role in Role:
            least = self.desired[role] - self.config.num_unavailable(self.desired[role])
            if (num_left := serving_before[role] - self.serving(role)) and self.serving(role) < least:
                assert num_left == 1, "more than one is missing"
                assert role not in was_leaving | {w.role for w in starting}, "it did not wait for the others"
        for role in Role:
            if serving_before[role] and self.desired[role]:
                assert self.serving(role), f"nobody serves {role} any more: {actions}"
        assert reconcile(self.desired, list(self.workers.values()), self.now_s, self.config) == [], "told twice"
        return actions

    def serving(self, role: Role) -> int:
        """A worker that has to leave serves until it does."""
        return sum(
            w.role is role and w.phase is READY and not (w.is_held or w.is_silent or w.is_draining)
            for w in self.workers.values()
        )

    def advance(self, is_calm: bool) -> None:
        self.now_s += self.dice.random() * 3
        for worker in list(self.workers.values()):
            if worker.phase is LEAVING and self.dice.random() < 0.6:
                del self.workers[worker.id]
            elif worker.phase is STARTING and self.dice.random() < 0.6:
                num_requests = self.dice.randrange(4)
                self.workers[worker.id] = replace(
                    worker, phase=READY, waits_for_room=False, waits_for_turn=False, num_requests=num_requests
                )
            elif worker.phase is STARTING and not worker.waits_for_room and self.dice.random() < 0.3:
                self.workers[worker.id] = replace(worker, waits_for_turn=True)
            elif worker.phase is STARTING and not is_calm and self.dice.random() < 0.2:
                self.workers[worker.id] = replace(worker, waits_for_room=True)
            elif worker.is_silent and self.dice.random() < 0.5:
                self.workers[worker.id] = replace(worker, phase=DOWN, is_silent=False)
            elif is_serving(worker) and not is_calm and self.dice.random() < 0.05:
                self.workers[worker.id] = replace(worker, is_silent=True)
            elif is_serving(worker) and not is_calm and self.dice.random() < 0.05:
                self.workers[worker.id] = replace(worker, is_draining=True)
            elif not is_calm and worker.phase is not LEAVING and self.dice.random() < 0.15:
                start_at_s = self.now_s + self.dice.choice((0.0, 1.0, 5.0))
                self.workers[worker.id] = replace(
                    worker,
                    phase=DOWN,
                    is_silent=False,
                    is_draining=False,
                    waits_for_room=False,
                    waits_for_turn=False,
                    start_at_s=start_at_s,
                )
            elif not is_calm and is_serving(worker) and self.dice.random() < 0.1:
                self.workers[worker.id] = replace(worker, is_retiring=True)  # an operator's `baton drain`

    def resize(self) -> None:
        self.desired = sizes(self.dice.randrange(0, 8), self.dice.randrange(1, 8))

    def flip(self) -> None:
        """A change of role, done at once."""
        if (able := [w for w in self.workers.values() if is_serving(w)]) and self.serving(DECODE) > 1:
            worker = self.dice.choice(able)
            other = DECODE if worker.role is PREFILL else PREFILL
            if self.desired[worker.role] > (worker.role is DECODE):
                self.desired = {**self.desired, worker.role: self.desired[worker.role] - 1}
                self.desired[other] += 1
                self.workers[worker.id] = replace(worker, role=other)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_the_pools_become_what_they_should_be(seed: int) -> None:
    world = World(seed)
    for _ in range(40):
        world.obey()
        world.advance(is_calm=False)
        if world.dice.random() < 0.1:
            world.resize()
        if world.dice.random() < 0.1:
            world.flip()
    for _ in range(200):
        world.obey()
        world.advance(is_calm=True)
    for role in Role:
        members = [worker for worker in world.workers.values() if worker.role is role]
        assert len(members) == world.desired[role]
        assert all(is_serving(worker) for worker in members)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_a_change_of_role_changes_nothing_for_the_others(seed: int) -> None:
    world = World(seed)
    world.desired = sizes(2, 3)
    for _ in range(100):
        world.obey()
        world.advance(is_calm=True)
    for _ in range(20):
        world.flip()
        assert world.obey() == []

"""Who is admitted, who is refused, and who has to go for it. Predictions are made up, or come from a load book."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster import BlockCounts, Role, WorkerLoad
from baton.errors import Overloaded
from router.admission import TTFT_DEADLINE_FACTOR, Gate, QueueEntry
from router.admission.gate import CAUTION
from router.admission.tenants import Tenant
from router.placement import Job, LoadTracker, Mode, Placement, Prediction, Residence, Turn
from tests.support.builders import step_costs, worker

A, B, HEAVY = Tenant(id="a"), Tenant(id="b"), Tenant(id="heavy", weight=4.0)


def prediction(wait_s: float, compute_s: float = 1.0, *, room_s: float = 0.0, pull_s: float = 0.0) -> Prediction:
    return Prediction(wait_s=wait_s, room_s=room_s, pull_s=pull_s, compute_s=compute_s, exposed_s=0.0, step_s=0.0)


def placed(entry: QueueEntry, prediction: Prediction, worker_id: str = "w") -> QueueEntry:
    entry.is_placed(Placement(mode=Mode.AGGREGATED, decode_worker=worker_id, prediction=prediction))
    return entry


def admit(gate: Gate, entry: QueueEntry, prediction: Prediction, worker_id: str = "w") -> list[QueueEntry]:
    return gate.admit(placed(entry, prediction, worker_id), prediction)


def queued(
    gate: Gate,
    tenant: Tenant = A,
    *,
    num: int = 1,
    compute_s: float = 1.0,
    priority: int = 0,
    worker_id: str = "w",
) -> list[QueueEntry]:
    """Entries that were admitted while nobody waited."""
    entries = [QueueEntry(tenant=tenant, priority=priority, ttft_s=100.0) for _ in range(num)]
    for entry in entries:
        assert admit(gate, entry, prediction(0.0, compute_s), worker_id) == []
    return entries


def is_empty(gate: Gate) -> bool:
    return not any(gate._queues.values()) and not gate._shares


def test_who_comes_in_time_is_admit() -> None:
    gate = Gate(caution=1.0)
    assert admit(gate, QueueEntry(tenant=A, priority=0, ttft_s=5.0), prediction(4.0)) == []
    assert admit(gate, QueueEntry(tenant=A, priority=0, ttft_s=5.0), prediction(3.0, pull_s=1.0)) == []
    assert admit(gate, QueueEntry(tenant=A, priority=0, ttft_s=math.inf), prediction(1e9)) == []


def test_who_was_held_is_neither_refused_nor_preempted() -> None:
    """It was accepted when it arrived, and many come at once when their model wakes."""
    gate = Gate()
    (oldest,), late = queued(gate), prediction(4.0, 2.0)
    for _ in range(4):
        held = QueueEntry(tenant=A, priority=0, ttft_s=5.0, was_held=True)
        assert admit(gate, held, prediction(400.0)) == []
    with pytest.raises(Overloaded):  # it would be on time without two prompts
        admit(gate, QueueEntry(tenant=HEAVY, priority=0, ttft_s=5.0), late)
    assert admit(gate, QueueEntry(tenant=HEAVY, priority=0, ttft_s=6.0), late) == [oldest]


def test_a_fifth_of_the_time_left_is_kept_for_errors() -> None:
    assert CAUTION == 0.8
    gate = Gate()
    assert admit(gate, QueueEntry(tenant=A, priority=0, ttft_s=6.0), prediction(4.0)) == []
    with pytest.raises(Overloaded):
        admit(gate, QueueEntry(tenant=A, priority=0, ttft_s=6.0), prediction(4.25))


@pytest.mark.parametrize(
    ("late", "late_s"),
    [
        (prediction(4.5), 0.5),
        (prediction(4.0, pull_s=0.75), 0.75),
        (prediction(0.0, room_s=6.0), 2.0),
        (prediction(4.01), 0.1),  # but asked to come back no sooner than after 100 ms
    ],
)
def test_who_would_come_too_late_is_told_when_to_come_back(late: Prediction, late_s: float) -> None:
    gate = Gate(caution=1.0)
    with pytest.raises(Overloaded, match=r"later than the objective of 5\.0 s allows") as refusal:
        admit(gate, QueueEntry(tenant=A, priority=0, ttft_s=5.0), late)
    assert refusal.value.retry_after_s == pytest.approx(late_s)
    assert is_empty(gate)


def test_who_cannot_come_in_time_even_alone_waits_for_two_objectives() -> None:
    assert TTFT_DEADLINE_FACTOR == 2.0
    gate = Gate(caution=1.0)
    assert admit(gate, QueueEntry(tenant=A, priority=0, ttft_s=2.0), prediction(TTFT_DEADLINE_FACTOR * 2.0, 2.5)) == []
    with pytest.raises(Overloaded) as refusal:
        admit(gate, QueueEntry(tenant=A, priority=0, ttft_s=2.0), prediction(TTFT_DEADLINE_FACTOR * 2.0 + 3.0, 2.5))
    assert refusal.value.retry_after_s == pytest.approx(3.0)


def test_the_turn_tells_priority_and_then_who_can_come_in_time() -> None:
    def turn(entry: QueueEntry, prediction: Prediction) -> Turn:
        return placed(entry, prediction).turn

    assert turn(QueueEntry(tenant=A, priority=5, ttft_s=2.0), prediction(9.0, 2.0)) == (-5, False)
    assert turn(QueueEntry(tenant=A, priority=0, ttft_s=2.0), prediction(0.0, 2.1)) == (0, True)
    assert turn(QueueEntry(tenant=A, priority=0, ttft_s=2.0), prediction(0.0, 1.5, pull_s=1.0)) == (0, True), (
        "pulling counts as computing"
    )
    assert turn(QueueEntry(tenant=A, priority=0, ttft_s=0.0), prediction(0.0, 0.0)) == (0, False)


def test_it_is_queued_where_its_prompt_is_computed() -> None:
    entry = QueueEntry(tenant=A, priority=0, ttft_s=9.0)
    entry.is_placed(
        Placement(
            mode=Mode.DISAGGREGATED,
            decode_worker="d",
            prefill_worker="p",
            prediction=prediction(3.0, 2.0, room_s=5.0, pull_s=0.5),
        )
    )
    assert (entry.worker_id, entry.compute_s) == ("p", 2.5)
    entry.is_placed(Placement(mode=Mode.AGGREGATED, decode_worker="d", prediction=prediction(0.0, 2.0)))
    assert (entry.worker_id, entry.compute_s) == ("d", 2.0)


def test_a_tenant_below_its_share_displaces_one_above_it_newest_first() -> None:
    gate = Gate(caution=1.0)
    entries = queued(gate, A, num=6)
    assert admit(gate, QueueEntry(tenant=B, priority=0, ttft_s=5.0), prediction(6.0)) == entries[:-3:-1], (
        "1 s is left of 5: 2 s must go"
    )
    with pytest.raises(Overloaded):
        admit(gate, QueueEntry(tenant=A, priority=0, ttft_s=5.0), prediction(5.0))
    assert admit(gate, QueueEntry(tenant=B, priority=0, ttft_s=5.0), prediction(5.0)) == [entries[3]]
    with pytest.raises(Overloaded):
        # 3 s against 3: a would have less than b
        admit(gate, QueueEntry(tenant=B, priority=0, ttft_s=5.0), prediction(5.0))


def test_nobody_is_displaced_if_that_does_not_suffice() -> None:
    gate = Gate(caution=1.0)
    entries = queued(gate, A, num=4)
    with pytest.raises(Overloaded):
        admit(gate, QueueEntry(tenant=B, priority=0, ttft_s=1.0), prediction(4.0))  # 3 of 4 may go
    assert list(gate._queues["w"]) == entries
    assert gate._shares == {"a": 4.0}


def test_shares_go_by_weight() -> None:
    gate = Gate(caution=1.0)
    queued(gate, HEAVY, num=8)
    with pytest.raises(Overloaded):
        admit(
            gate, QueueEntry(tenant=B, priority=0, ttft_s=1.0), prediction(3.0, 0.9, pull_s=0.9)
        )  # 5 s / 4 would be less than 1.8 s
    gate = Gate(caution=1.0)
    mine = queued(gate, B, num=3)
    assert admit(gate, QueueEntry(tenant=HEAVY, priority=0, ttft_s=4.0), prediction(4.0, 2.0)) == mine[:0:-1], (
        "1 s against 2 s / 4"
    )


def test_who_leaves_takes_off_its_tenants_share_what_it_had_brought() -> None:
    gate = Gate(caution=1.0)
    first, second, third = queued(gate, HEAVY, num=3)
    gate.left(second)
    assert gate._shares == {"heavy": 0.5}
    assert admit(gate, QueueEntry(tenant=B, priority=0, ttft_s=1.25), prediction(2.0, 0.25)) == [third], (
        "1 s / 4 is left, against 0.25 s"
    )
    gate.left(first)
    assert gate._shares == {"b": 0.25}


def test_what_a_tenant_has_elsewhere_counts_but_only_where_the_newcomer_goes_somebody_has_to_go() -> None:
    gate = Gate(caution=1.0)
    there, here = queued(gate, A, num=5, worker_id="v"), queued(gate, A, num=2)
    assert admit(gate, QueueEntry(tenant=B, priority=0, ttft_s=2.0), prediction(3.0)) == here[::-1]
    with pytest.raises(Overloaded):
        admit(gate, QueueEntry(tenant=B, priority=0, ttft_s=2.0), prediction(3.0))
    assert list(gate._queues["v"]) == there


def test_a_refused_entry_leaves_nothing_behind_and_may_leave() -> None:
    gate = Gate(caution=1.0)
    (first,) = queued(gate)
    refused = QueueEntry(tenant=A, priority=0, ttft_s=1.0)
    with pytest.raises(Overloaded):
        admit(gate, refused, prediction(9.0))
    gate.left(refused)
    gate.left(QueueEntry(tenant=B, priority=0, ttft_s=1.0))
    assert gate._shares == {"a": 1.0}
    for _ in range(2):
        gate.left(first)
    assert is_empty(gate)


def eighths(num: int) -> float:
    """Of a second: sums of these are exact."""
    return num / 8


PRIORITIES = st.integers(-1, 1)
ARRIVALS = st.tuples(
    st.sampled_from([A, B, HEAVY]),
    PRIORITIES,
    st.sampled_from([0.5, 2.0, 5.0, 20.0, math.inf]),
    st.sampled_from(["v", "w"]),
    st.integers(1, 24).map(eighths),
    st.integers(0, 240).map(eighths),
    st.booleans(),
)


@settings(max_examples=60)
@given(st.lists(ARRIVALS, max_size=40))
def test_whatever_is_predicted_the_accounting_is_right_and_shedding_is_fair(
    arrivals: list[tuple[Tenant, int, float, str, float, float, bool]],
) -> None:
    gate = Gate(caution=1.0)
    inside: list[QueueEntry] = []

    def share(tenant: Tenant) -> float:
        return sum(entry.compute_s for entry in inside if entry.tenant == tenant) / tenant.weight

    for tenant, priority, ttft_s, worker_id, compute_s, wait_s, somebody_leaves in arrivals:
        entry = QueueEntry(tenant=tenant, priority=priority, ttft_s=ttft_s)
        try:
            victims = admit(gate, entry, prediction(wait_s, compute_s), worker_id)
        except Overloaded:
            assert wait_s + compute_s > ttft_s
        else:
            inside.append(entry)
            is_doomed = compute_s > ttft_s
            late_s = wait_s - (TTFT_DEADLINE_FACTOR * ttft_s if is_doomed else ttft_s - compute_s)
            assert bool(victims) == (late_s > 0)
            if victims:
                assert sum(victim.compute_s for victim in victims) >= late_s
                assert sum(victim.compute_s for victim in victims[:-1]) < late_s, "no more than it takes"
            on_worker = [other for other in reversed(inside) if other.worker_id == worker_id]
            assert victims == [other for other in on_worker if other in victims], "newest first"
            for victim in victims:
                inside.remove(victim)
                assert victim.worker_id == worker_id
                assert victim.priority == priority, "never a higher one, and a lower one is not in the way"
                assert victim.turn <= entry.turn
                assert victim.tenant != tenant
                assert share(victim.tenant) >= share(tenant) - 1e-6, "never of a tenant below its share"
        if somebody_leaves and inside:
            gate.left(inside.pop(len(inside) // 2))
        assert sorted(map(id, inside)) == sorted(id(each) for queue in gate._queues.values() for each in queue)
        assert gate._shares == pytest.approx({e.tenant.id: share(e.tenant) for e in inside})
    for entry in inside:
        gate.left(entry)
    assert is_empty(gate)


class Router:
    """A gate and a load book of one worker, used as the driver does, at one moment."""

    def __init__(self) -> None:
        costs = step_costs(s_per_token=1e-3)
        load = WorkerLoad(blocks=BlockCounts(100, 100), costs=costs)
        self.book = LoadTracker.of(worker("w", Role.PREFILL, load), Residence())
        self.gate = Gate(caution=1.0)
        self.jobs: dict[QueueEntry, Job] = {}

    def ask(self, tenant: Tenant, priority: int, ttft_s: float, compute_s: float) -> list[QueueEntry] | None:
        """Who has to go for the newcomer; None: it is refused."""
        entry = QueueEntry(tenant=tenant, priority=priority, ttft_s=ttft_s)
        turn = placed(entry, prediction(0.0, compute_s)).turn
        try:
            victims = self.gate.admit(entry, prediction(self.book.wait_s(turn, 0.0), compute_s))
        except Overloaded:
            return None
        for victim in victims:
            self.book.computed(self.jobs.pop(victim), 0.0)
        others_s = self.book.wait_s(turn, 0.0)
        job = self.jobs[entry] = Job(turn=turn, compute_s=compute_s, num_prompt_tokens=100, num_expected_tokens=10)
        self.book.queue(job, 0.0)
        timeout_s = TTFT_DEADLINE_FACTOR * ttft_s if turn[1] else ttft_s - compute_s
        assert others_s <= timeout_s + 1e-9, "whoever is admitted, comes in time once the others have gone"
        return victims


def test_two_tenants_do_not_displace_each_other_back_and_forth() -> None:
    """Both ask again and again for more than there is: each gets its half, and then nobody moves."""
    router = Router()
    assert [router.ask(A, 0, 10.0, 1.0) for _ in range(11)].count(None) == 1
    history = [router.ask(tenant, 0, 10.0, 1.0) for _ in range(20) for tenant in (B, A)]
    assert [victims is not None for victims in history[::2]] == [True] * 5 + [False] * 15
    assert history[1::2] == [None] * 20, "a had everything, and gets nothing more"
    assert sum(entry.tenant == A for entry in router.jobs) == sum(entry.tenant == B for entry in router.jobs) == 5


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([A, B, HEAVY]), st.floats(0.1, 3.0)), max_size=60))
def test_whoever_had_to_go_cannot_take_its_place_back(arrivals: list[tuple[Tenant, float]]) -> None:
    router = Router()
    for tenant, compute_s in arrivals:
        for victim in router.ask(tenant, 0, 5.0, compute_s) or ():
            router_shares = dict(router.gate._shares)
            again = router.ask(victim.tenant, 0, 5.0, victim.compute_s)
            assert tenant not in {entry.tenant for entry in again or ()}, router_shares


def test_who_is_not_in_the_way_does_not_go() -> None:
    """Workers compute an urgent prompt before the others anyway, and one that is late anyway after them."""
    router = Router()
    for _ in range(5):
        assert router.ask(A, 0, 100.0, 1.0) == []
    assert router.ask(A, 0, 5.0, 6.0) == []
    assert router.ask(B, 1, 3.0, 2.0) == []
    assert router.ask(B, 1, 3.0, 2.0) is None, "it waits for the other urgent one, of its own tenant"
    assert len(router.jobs) == 7
    victims = router.ask(B, 0, 7.0, 1.0) or []  # 7 s wait before it, 6 are in time
    assert [victim.compute_s for victim in victims] == [1.0], "not the newest, which is late anyway"


def test_nobody_displaces_a_higher_priority() -> None:
    gate = Gate(caution=1.0)
    queued(gate, A, num=9, priority=1)
    with pytest.raises(Overloaded):
        admit(gate, QueueEntry(tenant=B, priority=0, ttft_s=2.0), prediction(2.0))
    assert len(admit(gate, QueueEntry(tenant=B, priority=1, ttft_s=2.0), prediction(2.0))) == 1


def test_who_waits_for_room_to_decode_displaces_nobody_from_the_queue() -> None:
    gate = Gate(caution=1.0)
    queued(gate, A, num=5)
    with pytest.raises(Overloaded):
        admit(gate, QueueEntry(tenant=B, priority=0, ttft_s=3.0), prediction(0.0, room_s=4.0))


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from([A, B]), PRIORITIES, st.sampled_from([0.5, 2.0, 5.0, 20.0]), st.floats(0.1, 3.0)),
        max_size=30,
    )
)
def test_whoever_is_admitted_comes_in_time(arrivals: list[tuple[Tenant, int, float, float]]) -> None:
    router = Router()
    for tenant, priority, ttft_s, compute_s in arrivals:
        router.ask(tenant, priority, ttft_s, compute_s)

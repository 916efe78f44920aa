"""Candidates of large pools: few of the workers, and placements as good as among all of them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import Any

import pytest

from baton.cluster import BlockCounts, Role, Worker, WorkerState
from kvstore.index import BlockEvent, Mirror, Op
from router.placement import Candidate, ImageCosts, Job, LoadTracker, Placement, Prompt, Residence, Turn, place
from router.placement.load import LEAST_LOADED, MAX_TURNS, TURN_S, LoadOrders
from router.placement.pool_view import FEW_WORKERS, MAX_HOLDERS, SUSPICION_S, PoolView
from tests.support import builders

BLOCK = 16
NORMAL: Turn = (0, False)
COSTS = builders.step_costs(s_per_token=1e-3, s_overhead=0.01, s_per_kv_token=1e-7)
LOAD = replace(builders.READY, costs=COSTS, blocks=BlockCounts(total=10_000, free=10_000))
POET = builders.registered_adapter("poet").adapter
SEED = b"system prompt"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def worker(number: int, role: Role | None = None, load: dict[str, Any] | None = None, **info: Any) -> Worker:
    """Worker `number`: those of even number prefill, unless a role is given."""
    role = role or (Role.DECODE if number % 2 else Role.PREFILL)
    return builders.worker(f"w{number}", role, replace(LOAD, **load or {}), **{"block_size": BLOCK} | info)


def prompt(*keys: bytes, num_tokens: int = 0) -> Prompt:
    return Prompt(num_tokens or len(keys) * BLOCK + 1, keys)


def keys(name: str, number: int) -> tuple[bytes, ...]:
    return tuple(f"{name}/{index}".encode() for index in range(number))


def job(compute_s: float, turn: Turn = NORMAL, num_tokens: int = 1000) -> Job:
    return Job(turn=turn, compute_s=compute_s, num_prompt_tokens=num_tokens, num_expected_tokens=100)


class Pool:
    """A pool with its mirror, and the jobs that it was sent."""

    def __init__(self, few_workers: int = FEW_WORKERS) -> None:
        self.clock = Clock()
        self.mirror = Mirror()
        self.view = PoolView(self.mirror.lookup, self.clock, few_workers=few_workers)
        self.jobs = ExitStack()
        self._seqs: dict[str, int] = {}

    def store(self, number: int, *owned: bytes) -> None:
        name = f"w{number}"
        seq = self._seqs[name] = self._seqs.get(name, 0) + 1
        self.mirror.apply(BlockEvent(worker_id=name, epoch=1, seq=seq, op=Op.STORED, keys=owned))

    def queue(self, number: int, compute_s: float, turn: Turn = NORMAL) -> Job:
        queued = job(compute_s, turn)
        self.jobs.enter_context(self.view.computing(self.view.get(f"w{number}"), queued))
        return queued

    def decode(self, number: int, num_tokens: int = 1000) -> None:
        decoding = job(0.0, num_tokens=num_tokens)
        self.jobs.enter_context(self.view.decoding(self.view.get(f"w{number}"), decoding))

    def ids(self, asked: Prompt, **arguments: Any) -> set[str]:
        turn = arguments.pop("turn", NORMAL)
        return {c.worker_id for c in self.view.candidates(asked, turn, **arguments)}

    def found(self, asked: Prompt, **arguments: Any) -> dict[str, Candidate]:
        return {c.worker_id: replace(c) for c in self.view.candidates(asked, NORMAL, **arguments)}


async def pool_of(num_workers: int, few_workers: int = FEW_WORKERS, **info: Any) -> Pool:
    pool = Pool(few_workers)
    await pool.view.update([worker(number, **info) for number in range(num_workers)])
    return pool


# -- the same as among all ---------------------------------------------------------------------------------------------


class Twins:
    """The same pool twice: one considers all workers, the other one those that the orders give."""

    def __init__(self, num_workers: int, rng: Random) -> None:
        self._rng = rng
        self._num_workers = num_workers
        self.pools = Pool(few_workers=10**9), Pool(few_workers=0)
        self._running: list[tuple[ExitStack, ExitStack]] = []

    async def change(self) -> None:
        """Let something happen, as in a router."""
        rng = self._rng
        number, epoch = rng.randrange(self._num_workers), 1
        match rng.choice(["poll", "queue", "queue", "decode", "done", "done", "time", "suspect", "leave", "store"]):
            case "poll":
                workers = self._leases()
                for pool in self.pools:
                    await pool.view.update(workers)
            case "queue" | "decode" as what:
                each = rng.random(), rng.choice([(0, False), (-1, False), (0, True)]), rng.randrange(1, 3000)
                both = ExitStack(), ExitStack()
                for pool, stack in zip(self.pools, both, strict=True):
                    if any(w.info.id == f"w{number}" for w in pool.view.workers):
                        started = job(*each)
                        enter = pool.view.computing if what == "queue" else pool.view.decoding
                        stack.enter_context(enter(pool.view.get(f"w{number}"), started))
                self._running.append(both)
            case "done" if self._running:
                for stack in self._running.pop(rng.randrange(len(self._running))):
                    stack.close()
            case "time":
                passed_s = rng.choice([0.0, 0.1, 1.0, 20.0])
                for pool in self.pools:
                    pool.clock.now += passed_s
            case "suspect" | "leave" as what:
                for pool in self.pools:
                    for each_worker in pool.view.workers:
                        if each_worker.info.id == f"w{number}" and each_worker.info.epoch == epoch:
                            (pool.view.suspect if what == "suspect" else pool.view.leaves)(each_worker)
            case "store":
                owned = keys(rng.choice("ab"), rng.randrange(1, 6))
                for pool in self.pools:
                    pool.store(number, *owned)

    def _leases(self) -> list[Worker]:
        rng = self._rng
        states = [WorkerState.READY] * 8 + [WorkerState.DRAINING, WorkerState.STARTING]
        return [
            worker(
                number,
                rng.choice(list(Role)),
                {
                    "state": rng.choice(states),
                    "queued_tokens": rng.choice([0, 0, 50, 400]),
                    "running": rng.randrange(3),
                },
                epoch=rng.choice([1, 1, 1, 2]),
                sampler=rng.choice("ab"),
            )
            for number in range(self._num_workers)
            if rng.random() < 0.95
        ]


@pytest.mark.parametrize("seed", range(25))
async def test_a_pool_that_the_orders_hold_whole_gets_the_placements_of_a_walk_over_all(seed: int) -> None:
    rng = Random(seed)
    twins = Twins(LEAST_LOADED, rng)
    for _ in range(60):
        await twins.change()
        asked = prompt(*keys(rng.choice("ab"), rng.randrange(1, 7)))
        excluded = {f"w{rng.randrange(20)}" for _ in range(rng.choice([0, 0, 3]))}
        turn = rng.choice([(0, False), (-1, False)])
        placements: list[Placement | None] = []
        sets: list[set[str]] = []
        for pool in twins.pools:
            candidates = pool.view.candidates(asked, turn, excluded)
            sets.append({c.worker_id for c in candidates if c.takes_work or c.num_cached_tokens})
            placements.append(place(asked, candidates))
        assert sets[0] == sets[1]
        assert placements[0] == placements[1]
        rooms = [pool.view.with_room(120_000, excluded) for pool in twins.pools]
        assert rooms[0] == rooms[1]


@pytest.mark.parametrize("seed", range(10))
async def test_the_least_loaded_come_first_whatever_has_happened(seed: int) -> None:
    rng = Random(seed)
    trackers = [LoadTracker.of(worker(number, Role.DECODE), Residence()) for number in range(300)]
    orders, now = LoadOrders(), 0.0
    orders.adopt(trackers, now)
    jobs: list[Job] = []
    for step in range(300):
        now += rng.expovariate(10.0)
        for _ in range(rng.choice([1, 3, 40])):
            book = rng.choice(trackers)
            if rng.random() < 0.6:
                jobs.append(job(rng.expovariate(1.0), rng.choice([(0, False), (-1, False), (0, True)])))
                book.queue(jobs[-1], now)
                book.decode(jobs[-1], now)
            elif jobs:
                done = jobs.pop(rng.randrange(len(jobs)))
                for part in (done.queued_at, done.decoding_at):
                    if part is not None:
                        (part.computed if part is done.queued_at else part.finished)(done, now)
        if step == 150:
            trackers = trackers[50:]
            orders.adopt(trackers, now)
        turn = rng.choice([(0, False), (-1, False)])
        found = list(orders.least(turn, 7, now, lambda book: True, 5))
        assert len(found) == 10
        waits = [book.wait_s(turn, now) for book in found[:5]]
        assert waits == pytest.approx(sorted(book.wait_s(turn, now) for book in trackers)[:5])
        held = [book.candidate.num_kv_tokens for book in found[5:]]
        assert held == sorted(book.candidate.num_kv_tokens for book in trackers)[:5]


async def test_placements_in_a_large_pool_cost_what_those_among_all_do() -> None:
    rng = Random(5)
    few, walk = Pool(), Pool(few_workers=10**9)
    workers = [worker(number, load={"running": rng.randrange(4)}) for number in range(600)]
    for pool in (few, walk):
        await pool.view.update(workers)
    sessions = [(SEED, *keys(f"team {n % 9}", 6), *keys(f"session {n}", 20)) for n in range(60)]
    for number in range(600):
        session, length = sessions[rng.randrange(60)], rng.choice([1, 1, 7, 20])
        for pool in (few, walk):
            pool.store(number, *session[:length])
    for _ in range(1500):
        number, seconds, num_tokens = rng.randrange(600), rng.expovariate(2.0), rng.randrange(100, 4000)
        for pool in (few, walk):
            pool.queue(number, seconds)
            if number % 2:
                pool.decode(number, num_tokens)
    took_s: dict[Pool, list[float]] = {few: [], walk: []}
    for session in sessions:
        asked = prompt(*session, num_tokens=600)
        for pool, seconds_of in took_s.items():
            candidates = pool.view.candidates(asked, NORMAL)
            placement = place(asked, candidates)
            assert placement is not None
            seconds_of.append(placement.prediction.ttft_s + 128 * placement.prediction.step_s)
        assert len(few.view.candidates(asked, NORMAL)) <= MAX_HOLDERS + 3 * LEAST_LOADED
    assert fmean(took_s[few]) <= 1.01 * fmean(took_s[walk])


# -- few of many -------------------------------------------------------------------------------------------------------


async def test_few_of_many_are_considered_and_all_of_few() -> None:
    pool = await pool_of(FEW_WORKERS)
    assert len(pool.ids(prompt(SEED))) == FEW_WORKERS
    await pool.view.update([worker(number) for number in range(FEW_WORKERS + 1)])
    found = pool.found(prompt(SEED))
    assert LEAST_LOADED * 2 <= len(found) <= LEAST_LOADED * 3
    assert {c.role for c in found.values()} == set(Role)
    await pool.view.update([worker(number) for number in range(FEW_WORKERS)])
    assert len(pool.ids(prompt(SEED))) == FEW_WORKERS, "a pool that shrinks is considered whole again"


async def test_idle_workers_are_shared_among_sessions_and_a_session_keeps_its_own() -> None:
    pool = await pool_of(400)
    sessions = [prompt(SEED, b"%d" % number) for number in range(40)]
    before = [pool.ids(session) for session in sessions]
    assert len(set.union(*before)) > 300
    for number in range(0, 400, 9):
        pool.queue(number, 1.0)
    kept = [len(pool.ids(session) & ids) / len(ids) for session, ids in zip(sessions, before, strict=True)]
    assert fmean(kept) > 0.8


async def test_owners_of_the_prompt_are_considered_however_busy_they_are() -> None:
    pool = await pool_of(400)
    chat = (SEED, *keys("chat", 9))
    for number in range(400):
        pool.store(number, *(chat if number in (8, 9) else chat[:1]))
    for number in (8, 9):
        pool.queue(number, 100.0)
        pool.decode(number)
    found = pool.found(prompt(*chat))
    assert (found["w8"].num_cached_tokens, found["w9"].num_cached_tokens) == (160, 160)
    assert {c.num_cached_tokens for c in found.values()} == {16, 160}
    assert "w8" not in pool.ids(prompt(*chat), excluded={"w8"})
    placement = place(prompt(*chat), list(found.values()))
    assert placement is not None
    assert placement.source in ("", "w8", "w9")


async def test_draining_owners_are_sources_only() -> None:
    pool = await pool_of(400)
    chat = (SEED, *keys("chat", 9))
    pool.store(7, *chat)
    await pool.view.update([worker(n, load={"state": WorkerState.DRAINING} if n == 7 else {}) for n in range(400)])
    found = pool.found(prompt(*chat), excluded={"w7"})
    assert (found["w7"].takes_work, found["w7"].num_cached_tokens) == (False, 160)
    assert all(c.takes_work for c in found.values() if c.worker_id != "w7")


async def test_resume_points_count_in_a_large_pool_as_in_a_small_one() -> None:
    pool = await pool_of(400, resumes_anywhere=False)
    chat = keys("chat", 4)
    for number in range(400):
        pool.store(number, chat[1], *chat[3:] * (number == 5))
    found = pool.found(prompt(*chat, num_tokens=4 * BLOCK + 1))
    assert (found["w5"].num_cached_tokens, {c.num_cached_tokens for c in found.values()}) == (64, {32, 64})
    found = pool.found(prompt(*chat, num_tokens=4 * BLOCK))
    assert {c.num_cached_tokens for c in found.values()} == {32}, "the last token is computed"


async def test_suspects_and_those_who_leave_are_passed_over_among_many() -> None:
    pool = await pool_of(200)
    for number in range(200):
        if number not in (1, 2, 3, 4):
            pool.queue(number, 100.0)
    pool.view.suspect(pool.view.get("w1"))
    pool.view.leaves(pool.view.get("w2"))
    assert {"w3", "w4"} < pool.ids(prompt(SEED))
    assert not {"w1", "w2"} & pool.ids(prompt(SEED))
    assert not {"w1", "w2"} & pool.view.with_room(10, ())
    pool.clock.now += SUSPICION_S
    assert {"w1", "w2"} < pool.ids(prompt(SEED))


async def test_a_worker_that_changes_its_role_is_ordered_in_the_new_one() -> None:
    pool = await pool_of(200)
    for number in range(1, 200, 2):
        pool.decode(number)
    workers = [worker(number) for number in range(200)]
    workers[6] = worker(6, Role.DECODE)
    await pool.view.update(workers)
    found = pool.found(prompt(SEED))
    assert found["w6"].role is Role.DECODE, "it decodes nothing yet"


async def test_a_new_incarnation_takes_the_place_of_the_old_one() -> None:
    pool = await pool_of(200)
    for number in range(200):
        pool.queue(number, 10.0)
    assert pool.view.candidates(prompt(SEED), NORMAL)
    await pool.view.update([worker(number, epoch=2 if number == 6 else 1) for number in range(200)])
    found = pool.found(prompt(SEED))
    assert found["w6"].wait_s == 0.0
    await pool.view.update([worker(number) for number in range(200) if number != 6])
    assert "w6" not in pool.ids(prompt(SEED))


async def test_each_sampler_has_candidates() -> None:
    pool = Pool()
    await pool.view.update([worker(n, sampler="rare" if n in (30, 31) else "usual") for n in range(300)])
    for number in (30, 31):
        pool.queue(number, 50.0)
        pool.decode(number)
    groups = pool.view.alike(pool.view.candidates(prompt(SEED), NORMAL))
    assert [sorted(c.worker_id for c in groups[0]), len(groups[1])] == [["w30", "w31"], len(groups[1])]
    assert len(groups[1]) >= 2 * LEAST_LOADED


async def test_urgent_requests_find_the_shortest_queue_of_urgent_ones() -> None:
    pool = await pool_of(200)
    for number in range(200):
        pool.queue(number, 5.0, (-3, False) if number != 6 else (3, False))
        pool.queue(number, 1.0 if number != 6 else 90.0, (3, False))
    assert "w6" in pool.ids(prompt(SEED), turn=(-3, False))
    assert "w6" not in pool.ids(prompt(SEED), turn=(3, False))


async def test_requests_of_any_number_of_priorities_are_served() -> None:
    pool = await pool_of(200)
    for number in range(200):
        pool.queue(number, 5.0 if number != 6 else 1.0)
    for priority in range(3 * MAX_TURNS):
        assert "w6" in pool.ids(prompt(SEED), turn=(priority, False))
    assert pool.view._orders is not None
    group = pool.view._orders._groups[Role.PREFILL, ""]
    assert len(group.by_wait) == MAX_TURNS
    pool.clock.now += TURN_S + 1
    await pool.view.update([worker(number) for number in range(200)])
    assert not group.by_wait, "orders that nothing reads are dropped"


async def test_a_worker_that_takes_longer_than_predicted_does_not_keep_the_first_place() -> None:
    pool = await pool_of(200)
    for number in range(0, 80, 2):
        pool.queue(number, 1.0)
        pool.queue(number, 30.0)
    pool.clock.now += 60.0
    for number in range(80, 200, 2):
        pool.queue(number, 35.0)
    stuck = {f"w{number}" for number in range(80)}

    def least() -> set[str]:
        return {c.worker_id for c in pool.view.candidates(prompt(SEED), NORMAL) if c.role is Role.PREFILL}

    assert least() <= stuck, "30 s are left of them"
    pool.clock.now += 10.0
    assert not least() & stuck, "25 s are left of the others"


async def test_as_many_more_are_considered_as_are_doubted() -> None:
    pool = await pool_of(300)
    usual = pool.ids(prompt(SEED))
    assert usual < pool.ids(prompt(SEED), num_doubted=5)
    assert len(pool.ids(prompt(SEED), num_doubted=300)) == 300


async def test_wanted_workers_are_considered() -> None:
    pool = await pool_of(300)
    for number in (6, 7, 8):
        pool.queue(number, 60.0)
        pool.decode(number)
    assert not {"w6", "w7", "w8"} & pool.ids(prompt(SEED))
    assert {"w6", "w7"} < pool.ids(prompt(SEED), wanted=("w6", "w7", "gone"))
    assert {"w6", "w7"} & pool.ids(prompt(SEED), wanted=("w6", "w7"), excluded={"w7"}) == {"w6"}
    images = ImageCosts(total_s=900.0, saved_s={"w6": 900.0}, end=10**6)
    candidates = pool.view.candidates(prompt(SEED), NORMAL, wanted=images.saved_s)
    placement = place(prompt(SEED), candidates, images=images)
    assert placement is not None
    assert placement.computes == "w6"


async def test_workers_that_hold_an_adapter_are_considered() -> None:
    pool = Pool()
    held = {"adapters": (POET.digest,), "adapter_load_s": 2.0}
    workers = [worker(n, load=held if n in (6, 7) else {}, max_adapters=4) for n in range(300)]
    await pool.view.update(workers)
    for number in (6, 7):
        pool.queue(number, 0.5)
        pool.decode(number)
    asked = prompt(SEED)
    assert set(pool.view.with_adapter(POET, asked)) == {"w6", "w7"}
    candidates = pool.view.candidates(asked, NORMAL, wanted=pool.view.with_adapter(POET, asked))
    loads_s = pool.view.loads_s(POET, [c.worker_id for c in candidates])
    assert set(loads_s) == {c.worker_id for c in candidates} - {"w6", "w7"}
    pool.view.loads(pool.view.get("w11"), POET)
    assert set(pool.view.with_adapter(POET, asked)) == {"w6", "w7", "w11"}
    await pool.view.update(workers)
    assert set(pool.view.with_adapter(POET, asked)) == {"w6", "w7", "w11"}, "it may not have loaded it yet"
    assert pool.view.with_adapter(None, asked) == []
    await pool.view.update([worker(n, load=held, max_adapters=4) for n in range(300)])
    assert len(pool.view.with_adapter(POET, asked)) == MAX_HOLDERS
    assert pool.view.with_adapter(POET, asked) != pool.view.with_adapter(POET, prompt(b"other"))


async def test_room_for_an_answer_is_found_among_many() -> None:
    pool = Pool()
    full = BlockCounts(total=100, free=0, in_use=100)
    workers = [worker(n, load={"blocks": full, "running": 2} if n != 77 else {}) for n in range(300)]
    await pool.view.update(workers)
    assert pool.view.with_room(1000, ()) == {"w77"}
    assert pool.view.with_room(1000, {"w77"}) == set()


async def test_images_go_to_a_sample_of_many_workers_that_stays_the_same() -> None:
    pool = Pool()

    def leases(gone: int = -1) -> list[Worker]:
        return [worker(n, takes_images=n % 4 < 2) for n in range(300) if n != gone]

    async def sample(seed: int, role: Role = Role.PREFILL) -> list[str]:
        return [each.info.id for each in pool.view.for_images(role, seed)]

    await pool.view.update(leases())
    before = await sample(7)
    assert MAX_HOLDERS / 2 < len(before) <= MAX_HOLDERS
    assert all(int(name[1:]) % 4 == 0 for name in before), "those of the role that take images"
    assert before == await sample(7)
    assert set(before) != set(await sample(8))
    assert all(int(name[1:]) % 4 == 1 for name in await sample(7, Role.DECODE))
    pool.view.suspect(pool.view.get(before[0]))
    assert set(await sample(7)) == set(before[1:])
    await pool.view.update(leases(gone=int(before[1][1:])))
    assert len(set(await sample(7)) - set(before)) <= 1
    await pool.view.update([worker(n, takes_images=n % 2 == 1) for n in range(300)])
    assert all(int(name[1:]) % 2 for name in await sample(7)), "of the other role if there is none"
    await pool.view.update([worker(n) for n in range(300)])
    assert await sample(7) == []

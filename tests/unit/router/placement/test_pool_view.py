from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

import pytest

from baton.cluster import BlockCounts, ModelState, Role, Worker, WorkerLoad, WorkerState
from baton.costs import PRIOR
from baton.messages import SequenceSpec
from baton.tasks import cancel_and_wait
from kvstore.index import BlockEvent, Mirror, Op
from router.placement import Candidate, Job, Prompt, Turn, pool_view
from router.placement.pool_view import ADAPTER_LOAD_S, LEAVING_S, LOADING_S, SUSPICION_S, PoolView
from tests.support import builders
from tests.support.turns import counted_turns

COSTS = builders.step_costs(s_per_token=1e-3)
"""A token takes a millisecond."""
BLOCKS = BlockCounts(total=100, free=100)
LOAD = WorkerLoad(state=WorkerState.READY, blocks=BLOCKS, costs=COSTS)
NORMAL: Turn = (0, False)
PROMPT = Prompt(100, (b"k0", b"k1", b"k2", b"k3", b"k4", b"k5"))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def worker(
    worker_id: str,
    *,
    role: Role = Role.DECODE,
    epoch: int = 1,
    block_size: int = 16,
    max_model_len: int = 8192,
    **load: Any,
) -> Worker:
    """A ready worker.

    Args:
        load: of `WorkerLoad`.
    """
    info = builders.worker_info(worker_id, role, epoch=epoch, block_size=block_size, max_model_len=max_model_len)
    return Worker(info, replace(LOAD, **load))


def job(num_tokens: int, turn: Turn = NORMAL) -> Job:
    """A prompt of which each token takes a millisecond."""
    return Job(turn=turn, compute_s=num_tokens * COSTS.s_per_token, num_prompt_tokens=num_tokens, num_expected_tokens=0)


def sequence(num_prompt_tokens: int, max_tokens: int) -> SequenceSpec:
    return builders.sequence_spec(range(num_prompt_tokens), max_tokens=max_tokens)


def view(held: dict[str, int] | None = None) -> tuple[PoolView, Clock]:
    clock = Clock()
    return PoolView(lambda keys: held or {}, clock), clock


def ids(pools: PoolView, excluded: tuple[str, ...] = ()) -> list[str]:
    return [candidate.worker_id for candidate in pools.candidates(PROMPT, NORMAL, excluded) if candidate.takes_work]


def candidate(pools: PoolView, worker_id: str, turn: Turn = NORMAL) -> Candidate:
    (found,) = [c for c in pools.candidates(PROMPT, turn) if c.worker_id == worker_id]
    return found


def load_of(pools: PoolView, worker_id: str, turn: Turn = NORMAL) -> int:
    """Tokens that are computed before those of a newcomer."""
    wait_s = candidate(pools, worker_id, turn).wait_s
    assert wait_s == pools.wait_s(pools.get(worker_id), turn)
    return round(wait_s / COSTS.s_per_token)


def decoded_on(pools: PoolView, worker_id: str) -> int:
    return candidate(pools, worker_id).num_kv_tokens


async def test_only_ready_workers_that_are_not_excluded_take_work() -> None:
    pools, _ = view()
    states = {"a": WorkerState.READY, "b": WorkerState.STARTING, "c": WorkerState.DRAINING, "d": WorkerState.DEAD}
    await pools.update([worker(name, state=state) for name, state in states.items()] + [worker("e")])
    assert ids(pools) == ["a", "e"]
    assert ids(pools, ("a",)) == ["e"]
    assert [w.info.id for w in pools.workers] == ["a", "b", "c", "d", "e"]
    sources = [c.worker_id for c in pools.candidates(PROMPT, NORMAL) if not c.takes_work]
    assert sources == ["c"], "what it holds can be had until it is gone"


async def test_whoever_has_no_lease_is_gone() -> None:
    pools, _ = view()
    await pools.update([worker("a"), worker("b")])
    await pools.update([worker("b")])
    assert ids(pools) == ["b"]
    with pytest.raises(KeyError):
        pools.get("a")


async def test_is_ready_is_told_by_role() -> None:
    pools, _ = view()
    assert not pools.is_ready(Role.DECODE)
    await pools.update([worker("d"), worker("p", role=Role.PREFILL, state=WorkerState.STARTING)])
    assert pools.is_ready(Role.DECODE)
    assert not pools.is_ready(Role.PREFILL)
    pools.suspect(pools.get("d"))
    assert not pools.is_ready(Role.DECODE)


async def test_who_has_measured_nothing_costs_what_the_others_of_its_pool_do() -> None:
    pools, _ = view()
    new = worker("new", costs=PRIOR, queued_tokens=100)
    await pools.update([worker("old"), new, worker("p", role=Role.PREFILL, costs=PRIOR)])
    assert candidate(pools, "new").costs == COSTS
    assert load_of(pools, "new") == 100
    assert candidate(pools, "p").costs == COSTS, "in its pool nobody knows, in the other one somebody does"
    measured = replace(COSTS, s_per_token=5e-3)
    await pools.update([worker("old"), worker("older"), worker("new", costs=measured)])
    assert candidate(pools, "new").costs == measured


async def test_a_suspect_is_passed_over_for_a_while() -> None:
    pools, clock = view()
    await pools.update([worker("a"), worker("b")])
    pools.suspect(pools.get("a"))
    assert ids(pools) == ["b"]
    clock.now += SUSPICION_S - 0.01
    await pools.update([worker("a"), worker("b")])
    assert ids(pools) == ["b"], "a renewed lease does not clear it"
    clock.now += 0.01
    assert ids(pools) == ["a", "b"]
    await pools.update([worker("a"), worker("b")])
    assert ids(pools) == ["a", "b"]


async def test_a_suspect_is_passed_over_for_as_long_as_a_dead_worker_is_listed() -> None:
    clock = Clock()
    pools = PoolView(lambda keys: {}, clock, lease_s=3 * SUSPICION_S)
    await pools.update([worker("a"), worker("b")])
    pools.suspect(pools.get("a"))
    clock.now += 3 * SUSPICION_S - 0.01
    assert ids(pools) == ["b"]
    clock.now += 0.01
    assert ids(pools) == ["a", "b"]


async def test_a_new_incarnation_of_a_suspect_is_trusted() -> None:
    pools, _ = view()
    await pools.update([worker("a")])
    pools.suspect(pools.get("a"))
    await pools.update([worker("a", epoch=2)])
    assert ids(pools) == ["a"]
    pools.suspect(pools.get("a"))
    assert ids(pools) == [], "until it fails as well"


async def test_load_is_what_it_was_sent_or_what_it_says_whichever_is_more() -> None:
    pools, _ = view()
    await pools.update([worker("a", queued_tokens=50), worker("b")])
    assert load_of(pools, "a") == 50
    with pools.computing(pools.get("a"), job(40)):
        await pools.update([worker("a", queued_tokens=50), worker("b")])
        assert load_of(pools, "a") == 50
        with pools.computing(pools.get("a"), job(30)):
            await pools.update([worker("a", queued_tokens=10), worker("b")])
            assert load_of(pools, "a") == 70, "the booking outlives a renewal of the lease"
        assert load_of(pools, "a") == 40
        assert load_of(pools, "b") == 0
    assert load_of(pools, "a") == 0
    await pools.update([worker("a", queued_tokens=10), worker("b")])
    assert load_of(pools, "a") == 10


async def test_a_prompt_that_is_computed_before_its_block_is_left_counts_once() -> None:
    pools, _ = view()
    await pools.update([worker("a")])
    done = job(40)
    with pools.computing(pools.get("a"), job(30)):
        with pools.computing(pools.get("a"), done):
            assert load_of(pools, "a") == 70
            pools.computed(done)
            assert load_of(pools, "a") == 30
            pools.computed(done)
        assert load_of(pools, "a") == 30


async def test_a_wait_is_told_by_turn_and_gets_shorter_while_the_worker_computes() -> None:
    pools, clock = view()
    await pools.update([worker("a")])
    with pools.computing(pools.get("a"), job(400)), pools.computing(pools.get("a"), job(100, (-1, False))):
        assert load_of(pools, "a") == 500
        assert load_of(pools, "a", (-1, False)) == 100
        assert load_of(pools, "a", (-2, False)) == 0
        clock.now += 0.15
        assert load_of(pools, "a") == 350


async def test_what_a_worker_decodes_is_what_it_was_sent_or_the_blocks_that_it_uses() -> None:
    pools, _ = view()
    blocks = BlockCounts(total=10, free=6, cached=1, in_use=3)
    await pools.update(
        [worker(name, role=role, blocks=blocks, running=1) for name, role in (("d", Role.DECODE), ("p", Role.PREFILL))]
    )
    assert (decoded_on(pools, "d"), decoded_on(pools, "p")) == (48, 0)
    with pools.decoding(pools.get("d"), job(40)), pools.decoding(pools.get("d"), job(30)):
        assert (decoded_on(pools, "d"), load_of(pools, "d")) == (70, 0)
        assert candidate(pools, "d").num_decoding == 2
        with pools.computing(pools.get("d"), job(5)):
            assert (decoded_on(pools, "d"), load_of(pools, "d")) == (70, 5)
    assert decoded_on(pools, "d") == 48
    assert candidate(pools, "d").num_decoding == 1


async def test_a_sequence_that_has_left_tells_how_long_they_stay() -> None:
    pools, clock = view()
    await pools.update([worker("a"), worker("b")])
    with pools.decoding(pools.get("a"), job(40)):
        before = candidate(pools, "a").freed_tokens_per_s
        with pools.decoding(pools.get("b"), job(30)):
            clock.now += 100.0
        await pools.update([worker("a"), worker("b")])
        assert candidate(pools, "a").freed_tokens_per_s < before, "on whichever worker it was"


async def test_bookings_end_with_the_incarnation_they_were_made_on() -> None:
    pools, _ = view()
    await pools.update([worker("a")])
    with contextlib.ExitStack() as later:
        with pools.computing(pools.get("a"), job(40)), pools.decoding(pools.get("a"), job(40)):
            await pools.update([worker("a", epoch=2)])
            assert (load_of(pools, "a"), decoded_on(pools, "a")) == (0, 0)
            later.enter_context(pools.computing(pools.get("a"), job(5)))
            later.enter_context(pools.decoding(pools.get("a"), job(5)))
        seen = load_of(pools, "a"), decoded_on(pools, "a")
        assert seen == (5, 5), "the end of the old bookings takes nothing from the new incarnation"
    assert (load_of(pools, "a"), decoded_on(pools, "a")) == (0, 0)


async def test_a_lease_that_was_missing_once_changes_nothing() -> None:
    pools, _ = view()
    await pools.update([worker("a")])
    with pools.computing(pools.get("a"), job(40)), pools.decoding(pools.get("a"), job(40)):
        await pools.update([])
        await pools.update([worker("a")])
        assert (load_of(pools, "a"), decoded_on(pools, "a")) == (40, 40)
    assert (load_of(pools, "a"), decoded_on(pools, "a")) == (0, 0)


async def test_a_job_may_be_sent_to_a_worker_that_has_just_gone() -> None:
    pools, _ = view()
    await pools.update([worker("a")])
    gone = pools.get("a")
    await pools.update([])
    with pools.decoding(gone, job(40)), pools.computing(gone, job(40)):
        assert pools.candidates(PROMPT, NORMAL) == []


async def test_the_longest_sequence_is_what_every_worker_can_hold() -> None:
    pools, _ = view()
    assert pools.max_model_len() is None
    await pools.update([worker("a", max_model_len=4096), worker("b", max_model_len=2048), worker("c")])
    assert pools.max_model_len() == 2048
    await pools.update([worker("a", max_model_len=4096)])
    assert pools.max_model_len() == 4096


async def test_a_worker_that_holds_next_to_nothing_takes_what_fits_it_and_limits_nobody_else() -> None:
    """Regression: one lease with a `max_model_len` of 2 made every request too long."""
    pools, _ = view()
    for short in ("a", "b", "c"):
        lengths = {worker_id: 64 if worker_id == short else 2048 for worker_id in ("a", "b", "c")}
        await pools.update([worker(worker_id, max_model_len=length) for worker_id, length in lengths.items()])
        assert pools.max_model_len() == 2048
        assert pools.unable(sequence(40, 25)) == {short}
        assert pools.unable(sequence(40, 24)) == set()
    await pools.update([worker("a", max_model_len=2048), worker("b", max_model_len=64)])
    assert pools.max_model_len() == 2048
    assert pools.unable(sequence(2000, 48)) == {"b"}


async def test_roles_may_hold_sequences_of_very_different_lengths() -> None:
    """Every sequence has to fit both."""
    pools, _ = view()
    await pools.update([worker("p", role=Role.PREFILL, max_model_len=32768), worker("d", max_model_len=640)])
    assert pools.max_model_len() == 640
    assert pools.unable(sequence(600, 40)) == set()


async def test_a_prefill_worker_that_holds_next_to_nothing_is_judged_by_those_who_do_without_it() -> None:
    pools, _ = view()
    await pools.update([worker("p", role=Role.PREFILL, max_model_len=64), worker("d", max_model_len=8192)])
    assert pools.max_model_len() == 8192
    assert pools.unable(sequence(60, 40)) == {"p"}


async def test_nobody_is_thought_to_hold_more_than_the_model_takes() -> None:
    pools = PoolView(lambda keys: {}, lambda: 0.0, longest=4096)
    await pools.update([worker("a", max_model_len=2**31 - 1), worker("b", max_model_len=2048)])
    assert pools.max_model_len() == 2048
    assert {c.worker_id for c in pools.candidates(PROMPT, NORMAL)} == {"a", "b"}


async def test_the_block_size_is_the_workers() -> None:
    pools, _ = view()
    assert pools.block_size == 16
    await pools.update([worker("a", block_size=64)])
    assert pools.block_size == 64
    await pools.update([worker("a", block_size=16), worker("b", block_size=64), worker("c", block_size=64)])
    assert pools.block_size == 64
    await pools.update([])
    assert pools.block_size == 16


async def test_a_booking_ends_with_an_error_too() -> None:
    pools, _ = view()
    await pools.update([worker("a")])
    a = pools.get("a")
    with pytest.raises(RuntimeError), pools.decoding(a, job(40)), pools.computing(a, job(40)):
        raise RuntimeError
    assert (load_of(pools, "a"), decoded_on(pools, "a")) == (0, 0)


async def test_cached_tokens_are_counted_in_the_workers_blocks_and_capped() -> None:
    pools, _ = view({"a": 2, "b": 4, "gone": 6})
    await pools.update([worker("a"), worker("b", block_size=32), worker("c")])
    assert {c.worker_id: c.num_cached_tokens for c in pools.candidates(PROMPT, NORMAL)} == {"a": 32, "b": 100, "c": 0}


async def test_where_workers_resume_at_some_blocks_the_last_of_these_counts() -> None:
    """The last token is computed in any case, so the last block of a prompt of whole blocks is no use."""
    mirror = Mirror()
    keys = tuple(b"key %d" % number for number in range(8))
    for worker_id, owned in (("a", keys[3:4]), ("b", (keys[1], keys[5])), ("gone", keys[:1])):
        mirror.apply(BlockEvent(worker_id=worker_id, epoch=1, seq=1, op=Op.STORED, keys=owned))

    async def cached(num_tokens: int, *infos: Worker) -> dict[str, int]:
        pools = PoolView(mirror.lookup, Clock())
        await pools.update([replace(each, info=replace(each.info, resumes_anywhere=False)) for each in infos])
        prompt = Prompt(num_tokens, keys[: num_tokens // pools.block_size])
        return {c.worker_id: c.num_cached_tokens for c in pools.candidates(prompt, NORMAL)}

    assert await cached(128, worker("a"), worker("b"), worker("c")) == {"a": 64, "b": 96, "c": 0}
    assert await cached(97, worker("a"), worker("b")) == {"a": 64, "b": 96}
    assert await cached(96, worker("a"), worker("b")) == {"a": 64, "b": 32}
    assert await cached(128, worker("a", block_size=32), worker("b"), worker("c")) == {"a": 64, "b": 96, "c": 0}
    pools = PoolView(mirror.lookup, Clock())
    await pools.update([worker("a"), worker("b")])
    assert {c.num_cached_tokens for c in pools.candidates(Prompt(128, keys), NORMAL)} == {0}, "without a gap"


async def test_the_lookup_is_asked_for_the_prompts_keys() -> None:
    asked = []
    pools = PoolView(lambda keys: asked.append(keys) or {}, Clock())  # type: ignore[func-returns-value]
    pools.candidates(PROMPT, NORMAL)
    assert asked == [PROMPT.block_keys]


async def test_waiting_ends_with_the_next_update_or_in_time() -> None:
    pools, _ = view()
    await pools.wait_for_change(0.01)
    waiting = asyncio.create_task(pools.wait_for_change(30))
    await asyncio.sleep(0)
    assert not waiting.done()
    await pools.update([])
    async with asyncio.timeout(1):
        await waiting


# -- sleep -------------------------------------------------------------------------------------------------------------


async def test_a_model_without_workers_sleeps_wakes_or_is_down_as_its_controller_says() -> None:
    pools, clock = view()
    seen = [(pools.state, pools.sleeps)]
    for is_asleep, num_desired in ((True, 0), (True, 2), (False, 2), (True, 0)):
        pools.note_sleep(is_asleep=is_asleep, num_desired=num_desired, problem="no GPU", wake_s=4.0)
        seen.append((pools.state, pools.sleeps))
    assert seen == [
        (ModelState.DOWN, False),
        (ModelState.ASLEEP, True),
        (ModelState.WAKING, True),
        (ModelState.DOWN, False),
        (ModelState.ASLEEP, True),
    ]
    assert (pools.sleep.problem, pools.sleep.wake_s) == ("no GPU", 4.0)
    await pools.update([worker("p0", role=Role.PREFILL), worker("d0", state=WorkerState.STARTING)])
    assert (pools.state, pools.sleeps) == (ModelState.ASLEEP, True)
    await pools.update([ready := worker("d0")])
    assert (pools.state, pools.sleeps) == (ModelState.READY, False), "its controller has not noticed yet"
    pools.leaves(ready)
    assert (pools.state, pools.sleeps) == (ModelState.ASLEEP, True), "its last worker leaves, and says so to routers"
    clock.now += LEAVING_S
    assert (pools.state, pools.sleeps) == (ModelState.READY, False)
    await pools.update([worker("d0", state=WorkerState.DRAINING)])
    assert (pools.state, pools.sleeps) == (ModelState.ASLEEP, True)


async def test_waiting_ends_when_the_controller_announces_another_sleep() -> None:
    pools, _ = view()
    for num_desired, is_over in ((0, True), (0, False), (1, True)):
        waiting = asyncio.create_task(pools.wait_for_change(30))
        await asyncio.sleep(0)
        pools.note_sleep(is_asleep=True, num_desired=num_desired, problem="")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.done() is is_over
        await cancel_and_wait([waiting])


# -- adoption ----------------------------------------------------------------------------------------------------------


async def test_requests_are_placed_while_leases_are_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all of it is adopted, by the former leases."""
    monkeypatch.setattr(pool_view, "SLICE_S", 0.0)
    pools, _ = view()
    await pools.update(before := [worker(f"w{number:03}") for number in range(100)])
    seen = set[tuple[int, int, int]]()

    async def look() -> None:
        while True:
            found = pools.candidates(PROMPT, NORMAL)
            seen.add((len(found), len(pools.workers), sum(each.load.running for each in pools.workers)))
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    after = [replace(each, load=replace(each.load, running=1)) for each in before[:50]]
    _, num_turns = await counted_turns(pools.update([*after, *before[60:]]))
    assert num_turns >= 90
    await asyncio.sleep(0)
    looking.cancel()
    assert seen == {(100, 100, 0), (90, 90, 50)}
    _, num_turns = await counted_turns(pools.update([*after, *before[60:]]))
    assert [each.load.running for each in pools.workers] == [1] * 50 + [0] * 40


async def test_two_updates_at_a_time_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_view, "SLICE_S", 0.0)
    pools, _ = view()
    many, few = [worker(f"w{number}") for number in range(20)], [worker("w1")]
    await asyncio.gather(pools.update(many), pools.update(few))
    assert [each.info.id for each in pools.workers] == ["w1"]


async def test_get_gives_the_latest_lease() -> None:
    pools, _ = view()
    await pools.update([worker("a")])
    newer = worker("a", queued_tokens=9)
    await pools.update([newer])
    assert pools.get("a") == newer
    assert pools.is_trusted(newer)
    assert not pools.is_trusted(replace(newer, load=WorkerLoad(state=WorkerState.DRAINING)))


async def test_candidates_are_grouped_by_the_samplers_of_their_workers() -> None:
    pools, _ = view()
    named = [replace(w, info=replace(w.info, sampler=name)) for w, name in zip(map(worker, "vwx"), "bab", strict=True)]

    async def groups(workers: list[Worker], only: str | None = None) -> list[list[str]]:
        await pools.update(workers)
        return [[c.worker_id for c in group] for group in pools.alike(pools.candidates(PROMPT, NORMAL), only)]

    assert await groups([]) == [[]]
    assert await groups(named) == [["w"], ["v", "x"]]
    assert await groups(named, "b") == [["v", "x"]]
    assert await groups(named, "") == [[]]
    assert await groups(named[1:2]) == await groups(named[1:2], "a") == [["w"]]
    assert await groups(named[1:2], "b") == [[]]
    unnamed = worker("y")
    assert await groups([*named, unnamed]) == [["y"], ["w"], ["v", "x"]]
    assert await groups([*named, unnamed], "") == [["y"]]


async def test_a_worker_that_reports_no_costs_does_not_get_everything() -> None:
    pools, _ = view()
    free = builders.step_costs()
    honest = [worker(f"w{number}", role=Role.PREFILL) for number in range(3)]
    await pools.update([*honest, worker("liar", costs=free)])
    seconds = {each.worker_id: each.costs.prefill_s(1000, 0, 1000) for each in pools.candidates(PROMPT, NORMAL)}
    assert seconds["liar"] >= seconds["w0"] / 8 > 0
    await pools.update([worker("alone", costs=free)])
    assert candidate(pools, "alone").costs == free


# -- adapters ----------------------------------------------------------------------------------------------------------

POET = builders.registered_adapter("poet").adapter


def with_adapters(worker_id: str, *digests: str, epoch: int = 1, load_s: float = 0.0, most: int = 4) -> Worker:
    info = builders.worker_info(worker_id, epoch=epoch, max_adapters=most)
    return Worker(info, replace(LOAD, adapters=digests, adapter_load_s=load_s))


async def test_workers_that_do_not_hold_an_adapter_would_load_it() -> None:
    pools, _ = view()
    await pools.update([
        with_adapters("none", most=0),
        with_adapters("holds", POET.digest, "cd" * 32),
        with_adapters("other", "cd" * 32, load_s=0.25),
        with_adapters("new"),
    ])  # fmt: skip
    assert pools.loads_s(POET) == {"other": 0.25, "new": ADAPTER_LOAD_S}
    assert pools.without_adapters == {"none"}


async def test_a_worker_that_was_sent_a_request_for_an_adapter_counts_as_holding_it_for_a_while() -> None:
    pools, clock = view()
    worker = with_adapters("new")
    await pools.update([worker])
    pools.loads(worker, POET)
    assert pools.loads_s(POET) == {}
    assert pools.loads_s(builders.registered_adapter("prose", "cd" * 32).adapter) == {"new": ADAPTER_LOAD_S}
    clock.now += 0.9 * LOADING_S
    pools.loads(worker, POET)
    clock.now += 0.2 * LOADING_S
    assert pools.loads_s(POET) == {"new": ADAPTER_LOAD_S}, "its lease would list it by now"
    await pools.update([worker])
    pools.loads(worker, POET)
    assert pools.loads_s(POET) == {}, "the next request tries again"
    await pools.update([with_adapters("new", epoch=2)])
    assert pools.loads_s(POET) == {"new": ADAPTER_LOAD_S}, "a new process has loaded nothing"


async def test_what_is_believed_of_loads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.placement.pool_view.MAX_LOADING", 1)
    pools, _ = view()
    worker, prose = with_adapters("new"), builders.registered_adapter("prose", "cd" * 32).adapter
    await pools.update([worker])
    pools.loads(worker, POET)
    pools.loads(worker, prose)
    assert (pools.loads_s(POET), pools.loads_s(prose)) == ({}, {"new": ADAPTER_LOAD_S})

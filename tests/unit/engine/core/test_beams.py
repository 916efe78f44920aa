"""The rules of a beam search, and the group of sequences that computes it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import InvalidRequest, TransferRefused
from baton.hypotheses import NO_HYPOTHESES, Beam, Hypotheses
from baton.messages import SequenceSpec
from baton.sampling import EarlyStopping, FinishReason
from baton.scores import Candidates
from engine.core.beams import BeamSearch
from engine.core.engine import Engine
from engine.core.outputs import Admitted, Generated, Output, Preempted, Refused, Reserved
from engine.core.scheduler import SchedulerLimits
from engine.core.sequence import Purpose, Sequence, Status
from engine.testing import ArithmeticRunner, logits_of, modulus
from tests.support.builders import sequence_spec
from worker.calls import require_servable

VOCAB_SIZE = 97
NUM_BLOCKS = 64
END = 0


def search_of(**values: Any) -> BeamSearch:
    asked: dict[str, Any] = {
        "width": 2,
        "length_penalty": 1.0,
        "early_stopping": EarlyStopping.FALSE,
        "max_tokens": 10,
        "end_token_ids": frozenset({END}),
        "running": (Beam(),),
        "finished": (),
    }
    return BeamSearch(**asked | values)


def candidates(**logprobs: float) -> Candidates:
    return Candidates(tuple(int(name[1:]) for name in logprobs), tuple(logprobs.values()))


def beam(*token_ids: int, logprob: float, reason: FinishReason | None = None) -> Beam:
    return Beam(token_ids=token_ids, logprob=logprob, finish_reason=reason)


STOPPED = FinishReason.STOP


# -- the rules ---------------------------------------------------------------------------------------------------------


def test_the_likeliest_of_all_beams_go_on() -> None:
    search = search_of(running=(beam(7, logprob=-1.0), beam(8, logprob=-1.5)))
    after, parents = search.advance([candidates(t1=-0.1, t2=-3.0), candidates(t3=-0.2, t4=-0.3)])
    assert after.running == (beam(7, 1, logprob=-1.1), beam(8, 3, logprob=-1.7))
    assert parents == (0, 1)
    after, parents = search.advance([candidates(t1=-0.1, t2=-0.2), candidates(t3=-0.9)])
    assert [each.token_ids for each in after.running] == [(7, 1), (7, 2)]
    assert parents == (0, 0)
    assert not after.is_over


def test_what_ends_is_an_answer_only_among_the_first() -> None:
    after, parents = search_of().advance([candidates(t1=-0.1, t0=-0.2, t2=-0.3)])
    assert [each.token_ids for each in after.running] == [(1,), (2,)]
    assert parents == (0, 0)
    assert after.finished == (beam(END, logprob=-0.2, reason=STOPPED),)
    after, _ = search_of().advance([candidates(t1=-0.1, t2=-0.2, t0=-0.3)])
    assert not after.finished
    search = search_of(running=(beam(7, logprob=-1.0), beam(8, logprob=-1.2)))
    after, _ = search.advance([candidates(t0=-0.1, t1=-0.2), candidates(t0=-0.1, t3=-0.4)])
    assert [each.token_ids for each in after.running] == [(7, 1), (8, 3)]
    assert [each.token_ids for each in after.finished] == [(7, END)], "the third is none, although two do not go on yet"
    assert not after.is_over


@pytest.mark.parametrize(("penalty", "best"), [(0.0, (9, END)), (3.0, (7, 7, 7, END)), (-3.0, (9, END))])
def test_a_length_penalty_favours_long_answers(penalty: float, best: tuple[int, ...]) -> None:
    search = search_of(
        length_penalty=penalty,
        running=(beam(7, 7, 7, logprob=-2.0),),
        finished=(beam(9, END, logprob=-1.5, reason=STOPPED),),
    )
    after, _ = search.advance([candidates(t0=-0.1, t1=-5.0)])
    assert after.finished[0].token_ids == best
    assert len(after.finished) == 2


def test_only_as_many_answers_as_beams_are_kept() -> None:
    answers = beam(9, END, logprob=-0.5, reason=STOPPED), beam(8, END, logprob=-3.0, reason=STOPPED)
    search = search_of(length_penalty=0.0, running=(beam(7, logprob=-1.0),), finished=answers)
    after, _ = search.advance([candidates(t0=-0.5, t1=-0.6)])
    assert [each.token_ids for each in after.finished] == [(9, END), (7, END)]
    assert after.finished[1].logprob == -1.5


@pytest.mark.parametrize(
    ("early", "penalty", "logprob", "is_over"),
    [
        ("true", 1.0, -0.1, True),
        ("false", 1.0, -0.1, False),
        ("false", 1.0, -3.9, False),  # -4.0 / 2 tokens is better than -2.1
        ("false", 1.0, -4.3, True),
        ("never", 1.0, -4.3, False),  # with ten tokens it could still
        ("never", 1.0, -21.1, True),
        ("never", 0.0, -2.1, True),  # no length helps it
        ("never", -1.0, -0.9, False),  # and here length harms it
    ],
)
def test_a_search_with_all_its_answers_ends_by_its_rule(
    early: str, penalty: float, logprob: float, is_over: bool
) -> None:
    worst = -2.1 if penalty else -2.2
    answers = beam(5, logprob=-0.5, reason=STOPPED), beam(6, logprob=worst, reason=STOPPED)
    search = search_of(
        early_stopping=early, length_penalty=penalty, running=(beam(7, logprob=logprob),), finished=answers
    )
    after, _ = search.advance([candidates(t1=-0.1)])
    assert after.is_over is is_over


def test_a_search_goes_on_until_it_has_as_many_answers_as_beams() -> None:
    search = search_of(early_stopping="true", running=(beam(7, logprob=-50.0),))
    after, _ = search.advance([candidates(t0=-0.1, t1=-0.2)])
    assert len(after.finished) == 1
    assert not after.is_over


def test_a_search_ends_when_no_beam_is_left() -> None:
    search = search_of(max_tokens=2, running=(beam(7, logprob=-1.0), beam(8, logprob=-1.1)))
    after, parents = search.advance([candidates(t1=-0.1), candidates(t0=-0.1)])
    assert after.is_over
    assert parents == ()
    assert [(each.token_ids, each.finish_reason) for each in after.finished] == [
        ((7, 1), FinishReason.LENGTH),
        ((8, END), FinishReason.STOP),
    ]
    assert search_of().advance([Candidates((), ())]).search.is_over, "nothing is possible"


def test_what_all_beams_begin_with() -> None:
    assert search_of(running=(beam(1, 2, 3, logprob=0), beam(1, 2, 4, logprob=0))).hypotheses.shared_token_ids() == (
        1,
        2,
    )
    assert search_of(running=(beam(1, logprob=0), beam(2, logprob=0))).hypotheses.shared_token_ids() == ()
    assert search_of(running=(beam(1, 2, logprob=0),)).hypotheses.shared_token_ids() == (1, 2)


# -- the group ---------------------------------------------------------------------------------------------------------


def engine_of(
    num_blocks: int = NUM_BLOCKS, max_num_seqs: int = 12, *, budget: int = 40, with_state: bool = False
) -> Engine:
    runner = ArithmeticRunner(
        num_blocks=num_blocks, vocab_size=VOCAB_SIZE, max_num_seqs=max_num_seqs, with_state=with_state
    )
    return Engine(
        runner,
        SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, output_reservation=4),
    )


def spec_of(name: str, num_tokens: int, **sampling: Any) -> SequenceSpec:
    draw = random.Random(name)
    prompt = [draw.randrange(1, VOCAB_SIZE) for _ in range(num_tokens)]
    asked = {"max_tokens": 20, "beam_width": 4, "ignore_eos": False, **sampling}
    return sequence_spec(prompt, name, use_beam_search=True, **asked)


def expected(spec: SequenceSpec, *, with_state: bool = False) -> list[tuple[int, ...]]:
    """The answers, worked out without a cache."""
    search = BeamSearch.of(spec, frozenset({END}), 10_000)
    while not search.is_over:
        found = []
        for each in search.running:
            text = (*spec.token_ids, *each.token_ids)
            total = sum((position + 1) * token for position, token in enumerate(text)) + (
                sum(text) if with_state else 0
            )
            best = logits_of([total % modulus(VOCAB_SIZE)], VOCAB_SIZE).log_softmax(-1)[0].topk(8)
            found.append(Candidates(tuple(best.indices.tolist()), tuple(best.values.tolist())))
        search = search.advance(found).search
    return [each.token_ids for each in search.finished]


def run_step(engine: Engine, now: float = 0.0) -> list[Output]:
    step, outputs = engine.schedule(now)
    if step:
        outputs = outputs + engine.commit(step, engine.runner.execute(step), now)
    engine.check()
    return outputs


def run(engine: Engine, specs: list[SequenceSpec], every: int = 1) -> list[list[tuple[int, ...]]]:
    """The answers of searches of which one arrives every few steps."""
    waiting, keys, found = list(specs), list[int](), dict[int, list[tuple[int, ...]]]()
    for now in itertools.count():
        if waiting and now >= every * len(keys):
            keys.append(engine.add(waiting.pop(0), Purpose.GENERATE, float(now)).key)
        for output in run_step(engine, float(now)):
            assert not isinstance(output, Refused), output.error
            if isinstance(output, Generated) and output.finish_reason is not None:
                found[output.sequence_key] = [each.token_ids for each in output.beams]
        if len(found) == len(specs):
            assert engine.is_idle
            return [found[key] for key in keys]
    raise AssertionError


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_beams_compute_what_one_alone_would(width: int, with_state: bool) -> None:
    specs = [spec_of(f"a{n}", n, beam_width=width) for n in (1, 15, 16, 17, 70)]
    engine = engine_of(max_num_seqs=20, with_state=with_state)
    assert run(engine, specs) == [expected(spec, with_state=with_state) for spec in specs]


def test_a_prompt_is_computed_once_for_all_beams() -> None:
    engine, num_computed = engine_of(), 0
    engine.add(spec_of("once", 70, max_tokens=6, ignore_eos=True), Purpose.GENERATE, 0.0)
    while not engine.is_idle:
        step, _ = engine.schedule(0.0)
        num_computed += step.num_scheduled_tokens
        engine.commit(step, engine.runner.execute(step), 0.0)
    assert num_computed == 70 + 5 * 4


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 5])
def test_beams_that_do_not_fit_into_a_step_wait_for_each_other(budget: int, with_state: bool) -> None:
    engine, counts = engine_of(max_num_seqs=12, budget=budget, with_state=with_state), set[int]()
    others = [sequence_spec([n + 1], f"other-{n}", max_tokens=9 + 3 * n) for n in range(4)]
    spec = spec_of("group", 3)
    for each in (*others, spec):
        engine.add(each, Purpose.GENERATE, 0.0)
    found: list[tuple[int, ...]] = []
    while not engine.is_idle:
        step, _ = engine.schedule(0.0)
        counts.add(sum(part.sampling.use_beam_search and part.is_decoding for part in step.parts))
        assert 0 < step.num_scheduled_tokens <= budget
        for output in engine.commit(step, engine.runner.execute(step), 0.0):
            assert isinstance(output, Generated)
            found += [beam.token_ids for beam in output.beams]
        engine.check()
    assert found == expected(spec, with_state=with_state)
    assert max(counts) == min(budget, 4)
    assert counts & {1, 2, 3}


def test_a_group_takes_the_seats_of_all_its_beams() -> None:
    engine = engine_of(max_num_seqs=6)
    for spec in (spec_of("one", 5), spec_of("two", 5), sequence_spec([3], "plain", max_tokens=3)):
        engine.add(spec, Purpose.GENERATE, 0.0)
    began = []
    while not engine.is_idle:
        run_step(engine)
        names = dict.fromkeys(sequence.spec.request_id for sequence in engine.scheduler.running)
        began += [name for name in names if name not in began]
        assert not {"one", "two"} <= set(names), "the second search waits for the first"
    assert began == ["one", "two", "plain"], "nobody overtakes it"
    with pytest.raises(InvalidRequest, match="num_beams 7 is too large; this worker computes at most 6"):
        engine.add(spec_of("wide", 5, beam_width=7), Purpose.GENERATE, 0.0)


@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("num_blocks", [14, 17, 20])
def test_a_group_that_gave_way_goes_on_from_its_beams(num_blocks: int, with_state: bool) -> None:
    """No step is empty meanwhile: nothing would wake the engine."""
    specs = [spec_of(f"b{n}", n, max_tokens=40, ignore_eos=True, beam_width=3) for n in (5, 20, 33, 48)]
    specs += [sequence_spec([n], f"plain-{n}", max_tokens=30) for n in (3, 4)]
    engine = engine_of(num_blocks, with_state=with_state)
    searches = specs[:4]
    got = run_mixed(engine, specs)
    assert engine.load().preemptions > 2
    assert [got[spec.request_id] for spec in searches] == [expected(spec, with_state=with_state) for spec in searches]


@pytest.mark.parametrize("num_preempted", [1, 2, 4])
@pytest.mark.parametrize("prompt", range(10, 30, 2))
def test_a_search_that_is_preempted_again_and_again_never_stands_still(prompt: int, num_preempted: int) -> None:
    """Also where all that its beams begin with is in the cache."""
    engine = engine_of()
    spec = spec_of("again", prompt, ignore_eos=True, max_tokens=24)
    parent = engine.add(spec, Purpose.GENERATE, 0.0)
    found: list[tuple[int, ...]] = []
    for now in itertools.count():
        if now % 5 == 4:
            for each in parent.group[-num_preempted:]:
                engine.scheduler._preempt(each)
        step, _ = engine.schedule(0.0)
        assert step
        for output in engine.commit(step, engine.runner.execute(step), 0.0):
            assert isinstance(output, Generated)
            found += [each.token_ids for each in output.beams]
        engine.check()
        if found:
            break
    assert found == expected(spec)


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("prompt", range(10, 14))
def test_a_search_goes_on_in_another_engine_from_wherever_it_was(prompt: int, logprobs: int | None) -> None:
    spec = spec_of("moves", prompt, max_tokens=24, logprobs=logprobs)
    engine = engine_of()
    engine.add(spec, Purpose.GENERATE, 0.0)
    states, beams, counts = [engine.hypotheses(spec)], list[Beam](), list[int]()
    while not engine.is_idle:
        for output in run_step(engine):
            assert isinstance(output, Generated)
            beams += output.beams
            counts += [output.num_searched] * (not output.beams)
        states.append(engine.hypotheses(spec))
    assert states.pop() == NO_HYPOTHESES, "it is over"
    assert len(states) > 4
    for place, state in enumerate(states):
        moved = replace(
            spec, hypotheses=state, token_ids=(*spec.token_ids, *state.shared_token_ids()), request_id="moved"
        )
        require_servable(moved)
        engine, found, later, num_searched = engine_of(), list[Beam](), list[Hypotheses](), 0
        engine.add(moved, Purpose.GENERATE, 0.0)
        while not engine.is_idle:
            later.append(engine.hypotheses(moved))
            for output in run_step(engine):
                assert isinstance(output, Generated)
                found += output.beams
                num_searched += output.num_searched
        assert found == beams
        assert num_searched == sum(counts[place:]), "its start is no beam's next token"
        assert list(dict.fromkeys(later)) == list(dict.fromkeys(states[place:])), "it goes on from there"


@pytest.mark.parametrize("of_others", [{"cache_seed": b"another tenant's"}, {}])
def test_a_search_is_found_by_its_sequence_and_not_by_its_request(of_others: dict[str, Any]) -> None:
    """Clients choose ids: requests of two tenants may have the same one, and so may those of two routers."""
    engine = engine_of(max_num_seqs=12)
    specs = [spec_of("1", 20), replace(spec_of("1", 20), **of_others), replace(spec_of("2", 20), request_id="1")]
    for number, spec in enumerate(specs):
        engine.add(spec, Purpose.GENERATE, 0.0)
        for _ in range(2 + number):
            run_step(engine)
    alone = []
    for spec, num_steps in zip(specs, (9, 7, 4), strict=True):
        other = engine_of()
        other.add(spec, Purpose.GENERATE, 0.0)
        for _ in range(num_steps):
            run_step(other)
        alone.append(other.hypotheses(spec))
    assert [engine.hypotheses(spec) for spec in specs] == alone
    assert len({len(each.running[0].token_ids) for each in alone}) == 3
    assert engine.hypotheses(replace(specs[0])) == NO_HYPOTHESES, "an equal one is another call's"


@pytest.mark.parametrize("with_state", [False, True])
def test_a_search_stays_where_its_model_has_a_state(with_state: bool) -> None:
    engine, spec = engine_of(with_state=with_state), spec_of("stays", 20)
    engine.add(spec, Purpose.GENERATE, 0.0)
    for _ in range(8):
        run_step(engine)
    assert bool(engine.hypotheses(spec).running) is not with_state


@pytest.mark.parametrize("is_running", [True, False])
def test_a_beam_of_a_token_without_an_embedding_is_refused(is_running: bool) -> None:
    bad, good = Beam(token_ids=(VOCAB_SIZE,)), Beam(token_ids=(5,))
    state = Hypotheses(running=(good, bad)) if is_running else Hypotheses(running=(good,), finished=(bad,))
    with pytest.raises(InvalidRequest, match=f"token id {VOCAB_SIZE} is outside the model's vocabulary"):
        engine_of().add(replace(spec_of("bad", 5), hypotheses=state), Purpose.GENERATE, 0.0)


@pytest.mark.parametrize("with_state", [False, True])
def test_a_search_takes_all_seats_and_gives_back_what_it_reserved(with_state: bool) -> None:
    engine = engine_of(num_blocks=20, max_num_seqs=4, with_state=with_state)
    spec = replace(spec_of("all", 40, max_tokens=250, early_stopping="true"), num_expected_tokens=250)
    assert run(engine, [spec]) == [expected(spec, with_state=with_state)]
    assert engine.load().preemptions == 0


def run_mixed(engine: Engine, specs: list[SequenceSpec]) -> dict[str, list[tuple[int, ...]]]:
    names = {engine.add(spec, Purpose.GENERATE, float(i)).key: spec.request_id for i, spec in enumerate(specs)}
    found: dict[str, list[tuple[int, ...]]] = {}
    while not engine.is_idle:
        step, outputs = engine.schedule(0.0)
        assert step
        outputs += engine.commit(step, engine.runner.execute(step), 0.0)
        engine.check()
        for output in outputs:
            assert isinstance(output, Generated | Preempted), output
            if isinstance(output, Generated) and output.beams:
                found[names[output.sequence_key]] = [each.token_ids for each in output.beams]
    return found


def test_beams_that_do_not_fit_into_the_pool_are_computed_one_after_the_other() -> None:
    specs = [
        spec_of("large", 60, max_tokens=30, ignore_eos=True, beam_width=8),
        spec_of("small", 5, max_tokens=4, beam_width=2),
    ]
    assert run(engine_of(num_blocks=6), specs) == [expected(spec) for spec in specs]


@pytest.mark.parametrize(("priority", "arrived_s", "is_first"), [(1, 2.0, True), (0, 2.0, False)])
def test_beams_that_wait_for_others_give_way_only_to_what_comes_before_them(
    priority: int, arrived_s: float, is_first: bool
) -> None:
    """Also to what is no beam: else it would wait for them, and they for a beam behind it.

    Which beams wait, and when, depends on the processor's rounding of equal scores.
    """
    engine, spec = engine_of(num_blocks=8), spec_of("waits", 60, beam_width=3, ignore_eos=True, max_tokens=30)
    search = engine.add(spec, Purpose.GENERATE, 1.0)
    while not any(beam.waits_for_beams for beam in search.group):
        run_step(engine)
    other = sequence_spec([5] * 40, "other", max_tokens=1)
    engine.add(replace(other, priority=priority), Purpose.GENERATE, arrived_s)
    ends = []
    while not engine.is_idle:
        step, outputs = engine.schedule(0.0)
        assert step, "nothing would wake the engine"
        outputs += engine.commit(step, engine.runner.execute(step), 0.0)
        ends += [o for o in outputs if isinstance(o, Generated) and o.finish_reason is not None]
    assert [bool(end.beams) for end in ends] == [not is_first, is_first]
    assert [beam.token_ids for beam in ends[is_first].beams] == expected(spec)


def test_the_prompt_alone_is_computed_for_a_kv_transfer() -> None:
    engine = engine_of()
    held = engine.add(spec_of("sent", 20), Purpose.PREFILL, 0.0)
    outputs = run_step(engine)
    assert isinstance(outputs[0], Admitted)
    (generated,) = outputs[1:]
    assert isinstance(generated, Generated)
    assert (generated.token_ids, generated.finish_reason, generated.beams) == ((), None, ())
    assert generated.report is not None
    assert held.status is Status.HELD
    engine.end(held)
    assert engine.is_idle


def test_a_search_begins_after_a_kv_transfer_whatever_token_came_with_it() -> None:
    spec = spec_of("received", 33)
    source, engine = engine_of(), engine_of()
    sent = source.add(spec, Purpose.PREFILL, 0.0)
    received = engine.add(spec, Purpose.RECEIVE, 0.0)
    run_step(source)
    (reserved,) = run_step(engine)
    assert isinstance(reserved, Reserved)
    for layer in range(2):
        theirs, ours = source.runner.caches[0].layer(layer), engine.runner.caches[0].layer(layer)
        for a, b in zip(sent.block_ids[0], reserved.block_ids[0], strict=False):
            ours.view(NUM_BLOCKS, -1)[b] = theirs.view(NUM_BLOCKS, -1)[a]
    assert engine.insert(received, 7, 0.0) is None
    outputs = [output for _ in range(40) for output in run_step(engine)]
    assert [each.token_ids for o in outputs if isinstance(o, Generated) for each in o.beams] == expected(spec)
    with pytest.raises(TransferRefused, match="state"):
        engine_of(with_state=True).add(spec, Purpose.RECEIVE, 0.0)


def test_the_first_output_comes_with_the_prompt() -> None:
    engine = engine_of()
    sequence = engine.add(spec_of("reported", 60), Purpose.GENERATE, 0.0)
    assert run_step(engine, 1.0) == []
    (first,) = run_step(engine, 2.0)
    assert isinstance(first, Generated)
    assert first.report is not None
    assert not first.token_ids
    assert sequence.first_token_s == 2.0
    rest = [output for now in range(40) for output in run_step(engine, float(now)) if isinstance(output, Generated)]
    assert {output.report for output in rest} == {None}
    assert [output.token_ids for output in rest] == [()] * len(rest)
    width = sequence.spec.sampling.num_beams
    *going_on, last = rest
    assert [first.num_searched, *(output.num_searched for output in going_on)] == [1, *[width] * len(going_on)]
    assert (last.num_searched, bool(last.beams)) == (0, True)


@pytest.mark.parametrize("budget", [3, 40])
def test_a_step_that_fails_ends_the_search_once(budget: int) -> None:
    """Also the beams for which it had no room."""
    engine = engine_of(budget=budget)
    sequence = engine.add(spec_of("failing", 5), Purpose.GENERATE, 0.0)
    other = engine.add(sequence_spec([5], "other"), Purpose.GENERATE, 0.0)
    for _ in range(4):
        run_step(engine)
    step, _ = engine.schedule(0.0)
    assert len(step.parts) == min(budget, 5)
    assert [each for each in engine.abandon(step) if each is not other] == [sequence]
    engine.check()
    engine.end(other)
    assert engine.is_idle


def test_a_beam_whose_structure_fails_ends_the_search() -> None:
    engine = engine_of()
    sequence = engine.add(spec_of("structured", 5), Purpose.GENERATE, 0.0)
    for _ in range(4):
        run_step(engine)
    step, _ = engine.schedule(0.0)
    output = dataclasses.replace(engine.runner.execute(step), failures={1: "too complex"})
    (refused,) = engine.commit(step, output, 0.0)
    assert isinstance(refused, Refused)
    assert refused.sequence_key == sequence.key
    engine.check()
    assert engine.is_idle


def test_what_a_step_uses_is_given_away_at_its_commit() -> None:
    engine = engine_of()
    sequence = engine.add(spec_of("cancelled", 5), Purpose.GENERATE, 0.0)
    for _ in range(4):
        run_step(engine)
    step, _ = engine.schedule(0.0)
    num_used = engine.blocks.in_use
    engine.end(sequence)
    assert engine.blocks.in_use == num_used > 0
    assert engine.commit(step, engine.runner.execute(step), 0.0) == []
    assert engine.is_idle
    assert engine.blocks.in_use == 0


def test_random_cancels_leave_nothing_behind() -> None:
    draw = random.Random(11)
    engine = engine_of(24)
    running: list[Sequence] = []
    num_cancelled = 0
    for number in range(2500):
        if len(running) < 5:
            spec = spec_of(f"c{number}", draw.randrange(1, 60), beam_width=draw.randrange(1, 6), max_tokens=30)
            if draw.random() < 0.3:
                spec = sequence_spec(spec.token_ids, f"p{number}", max_tokens=9)
            running.append(engine.add(spec, Purpose.GENERATE, float(number)))
        step, _ = engine.schedule(float(number))
        if draw.random() < 0.4:  # while the step is computed
            engine.end(running.pop(draw.randrange(len(running))))
            num_cancelled += 1
        if step:
            engine.commit(step, engine.runner.execute(step), float(number))
        running = [each for each in running if any(beam.status is not Status.FINISHED for beam in each.group)]
        if running and draw.random() < 0.2:  # between two steps
            engine.end(running.pop(draw.randrange(len(running))))
            num_cancelled += 1
        engine.check()
    assert num_cancelled > 1000
    assert engine.load().preemptions > 10
    for sequence in running:
        engine.end(sequence)
    assert engine.is_idle
    assert engine.blocks.in_use == 0


def test_a_search_is_that_of_its_sequence() -> None:
    spec = spec_of(
        "of", 10, beam_width=3, length_penalty=2.0, early_stopping="never", stop_token_ids=(5,), max_tokens=50
    )
    search = BeamSearch.of(spec, frozenset({END}), 40)
    assert (search.width, search.length_penalty, search.early_stopping) == (3, 2.0, "never")
    assert search.end_token_ids == {END, 5}
    assert search.max_tokens == 30, "what the context leaves"
    assert BeamSearch.of(spec, frozenset({END}), 100).max_tokens == 50
    unending = spec_of("unending", 10, ignore_eos=True)
    assert not BeamSearch.of(unending, frozenset({END}), 40).end_token_ids
    assert math.isclose(search.score(beam(1, 2, logprob=-8.0)), -2.0)

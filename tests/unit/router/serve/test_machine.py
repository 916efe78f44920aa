"""The state machine of a choice: scenarios as text, and every order of up to two failures in every state.

A scenario has one event a line, and after the arrow what the machine did then: its state, the instructions, and how the
next event comes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from baton.cluster import Role
from baton.errors import (
    BatonError,
    ImagesMissing,
    InvalidRequest,
    LostInStep,
    Overloaded,
    TransferCancelled,
    TransferError,
    WorkerDraining,
    WorkerFailed,
)
from baton.hypotheses import NO_HYPOTHESES, Beam, Hypotheses
from baton.messages import Fetched, FirstToken, Migrate, NewTokens, PrefillReport, Transferred
from baton.sampling import FinishReason
from router.placement import Mode, Placement
from router.serve.machine import (
    Answered,
    Await,
    Begun,
    CallFailed,
    ChoiceMachine,
    Emit,
    End,
    Event,
    Failing,
    FindPlace,
    GiveUp,
    Instruction,
    KeepOldCall,
    LeaderBegun,
    LeaveCalls,
    NoRoom,
    OpenDecode,
    OpenPrefill,
    Placed,
    PrepareMove,
    Refused,
    Source,
    State,
    Stays,
    Step,
    TimeUp,
    WorkerLeaves,
)
from tests.support.builders import worker
from tests.unit.router.serve.scripted_workers import SPEC, ticket

MAX_ATTEMPTS = 3
WORKERS = {name: worker(name, Role.PREFILL if name[0] == "p" else Role.DECODE) for name in ("p0", "d0", "d1")}
ERRORS: dict[str, BatonError] = {
    "dies": WorkerFailed("it is gone"),
    "drains": WorkerDraining("it leaves"),
    "loses its device": LostInStep("lost"),
    "cancels the transfer": TransferCancelled("cancelled"),
    "fails to transfer": TransferError("no peer"),
    "is full": Overloaded("its queue is full"),
    "rejects it": InvalidRequest("too odd"),
    "lacks images": ImagesMissing("none"),
    "cannot pull": WorkerFailed("it is gone"),
}
RUNNING = Hypotheses(running=(object(),))  # type: ignore[arg-type]


def event_of(line: str) -> Event:
    """An event from its words. Tokens are numbers; a full stop after the last one ends the answer."""
    first, *words = line.split()
    rest = " ".join(words)
    match first:
        case "begun":
            return Begun(
                MAX_ATTEMPTS,
                num_beams=2 if "search" in words else 0,
                follows="follows" in words,
                has_images="images" in words,
            )
        case "leader":
            return LeaderBegun()
        case "beams":
            beams = (Beam(token_ids=(4,), finish_reason=FinishReason.STOP),) * int(rest)
            return NewTokens(token_ids=(), finish_reason=FinishReason.STOP, beams=beams, num_searched=1)
        case "placed":
            mode = Mode.AGGREGATED if len(words) == 1 else Mode.DISAGGREGATED
            return Placed(Placement(mode=mode, decode_worker=words[-1], prefill_worker="".join(words[:-1])))
        case "ticket":
            return ticket(SPEC)
        case "first":
            number = int(rest.rstrip(".")) if rest.rstrip(".") != "none" else None
            return FirstToken(number, FinishReason.LENGTH if rest.endswith(".") else None, PrefillReport())
        case "tokens":
            numbers = tuple(int(word.rstrip(".")) for word in words)
            return NewTokens(token_ids=numbers, finish_reason=FinishReason.LENGTH if rest.endswith(".") else None)
        case "searched":
            return NewTokens(token_ids=(), finish_reason=None, num_searched=int(rest))
        case "transferred":
            return Transferred(1, 1, 0.0, 0.0)
        case "migrate":
            return Migrate(RUNNING if "search" in words else NO_HYPOTHESES)
        case "pulled":
            return Fetched(num_tokens=3)
        case "none":
            return NoRoom()
        case "stays":
            return Stays()
        case "time":
            return TimeUp()
        case "refused":
            return Refused(Overloaded("no first token"))
        case "answered":
            return Answered()
    source = Source.PREFILL if first[0] == "p" else Source.MIGRATION if rest == "cannot pull" else Source.DECODE
    return CallFailed(source, WORKERS[first], ERRORS[rest])


def in_words(instruction: Instruction) -> str:
    match instruction:
        case OpenDecode(await_kv):
            return "open decode for kv" if await_kv else "open decode"
        case Emit(tokens):
            stop = "." if tokens.finish_reason else ""
            return f"emit {' '.join(map(str, tokens.token_ids))}{stop}"
        case WorkerLeaves(leaving):
            return f"{leaving.info.id if leaving else 'the decode worker'} leaves"
        case PrepareMove(unable, waits):
            return "prepare move" + (" after a wait" if waits else "") + "".join(f", not to {each}" for each in unable)
        case Failing(failing, _, is_last):
            return f"{failing.info.id} failed{' at last' if is_last else ''}"
    words = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in type(instruction).__name__)
    return words.strip()


def trace(machine: ChoiceMachine, step: Step) -> str:
    match step.then:
        case Await(sources, timeout_s):
            then = f"await {' '.join(sources)}" + (f" for {timeout_s:g} s" if timeout_s else "")
        case FindPlace(is_move):
            then = "take the next worker" if is_move else "find place"
        case GiveUp(error):
            then = f"give up: {error}"
        case End():
            then = "end"
    done = ", ".join(map(in_words, step.instructions))
    return f"{machine.state}: {done}{'; ' if done else ''}{then}"


SCENARIOS = {
    "one worker": """
        begun                    -> placing: find place
        placed d0                -> computing: open decode; await decode
        tokens 4                 -> decoding: has kv, computed, emit 4; await decode
        tokens 5 6               -> decoding: emit 5 6; await decode
        tokens 7.                -> ended: emit 7., leave calls; end
    """,
    "two workers, with a report before the second token": """
        begun                    -> placing: find place
        placed p0 d0             -> reserving: open decode for kv; await decode
        ticket                   -> prefilling: open prefill; await prefill decode
        first 4                  -> transferring: computed, emit 4; await decode prefill
        transferred              -> transferring: note transfer; await decode
        tokens 5                 -> decoding: has kv, emit 5; await decode
        tokens 6.                -> ended: emit 6., leave calls; end
    """,
    "a report that comes later, or after the last token": """
        begun                    -> placing: find place
        placed p0 d0             -> reserving: open decode for kv; await decode
        ticket                   -> prefilling: open prefill; await prefill decode
        first 4                  -> transferring: computed, emit 4; await decode prefill
        tokens 5                 -> decoding: has kv, emit 5; await decode prefill
        tokens 6.                -> reporting: await prefill for 1 s
        transferred              -> ended: note transfer, emit 6., leave calls; end
    """,
    "a prefill worker that dies, or hangs, when the decode worker has the KV": """
        begun                    -> placing: find place
        placed p0 d0             -> reserving: open decode for kv; await decode
        ticket                   -> prefilling: open prefill; await prefill decode
        first 4                  -> transferring: computed, emit 4; await decode prefill
        tokens 5                 -> decoding: has kv, emit 5; await decode prefill
        p0 dies                  -> decoding: await decode
        tokens 6.                -> ended: emit 6., leave calls; end
    """,
    "the report does not come": """
        begun                    -> placing: find place
        placed p0 d0             -> reserving: open decode for kv; await decode
        ticket                   -> prefilling: open prefill; await prefill decode
        first 4                  -> transferring: computed, emit 4; await decode prefill
        tokens 5.                -> reporting: has kv; await prefill for 1 s
        time                     -> ended: emit 5., leave calls; end
    """,
    "the first token is the last": """
        begun                    -> placing: find place
        placed p0 d0             -> reserving: open decode for kv; await decode
        ticket                   -> prefilling: open prefill; await prefill decode
        d0 cancels the transfer  -> prefilling: await prefill for 1 s
        first 4.                 -> ended: computed, emit 4., leave calls; end
    """,
    "the transfer is cancelled, and the first token is not the last": """
        begun                    -> placing: find place
        placed p0 d0             -> reserving: open decode for kv; await decode
        ticket                   -> prefilling: open prefill; await prefill decode
        d0 cancels the transfer  -> prefilling: await prefill for 1 s
        first 4                  -> placing: computed, emit 4, leave calls, go back, d0 failed; find place
    """,
    "the transfer is cancelled, and no first token comes": """
        begun                    -> placing: find place
        placed p0 d0             -> reserving: open decode for kv; await decode
        ticket                   -> prefilling: open prefill; await prefill decode
        d0 cancels the transfer  -> prefilling: await prefill for 1 s
        time                     -> placing: leave calls, go back, d0 failed; find place
    """,
    "an engine that draws no token with a prompt": """
        begun                    -> placing: find place
        placed p0 d0             -> reserving: open decode for kv; await decode
        ticket                   -> prefilling: open prefill; await prefill decode
        first none               -> transferring: computed; await decode prefill
        tokens 4 5               -> decoding: has kv, emit 4 5; await decode prefill
    """,
    "tokens overtake the first one": """
        begun                    -> placing: find place
        placed p0 d0             -> reserving: open decode for kv; await decode
        ticket                   -> prefilling: open prefill; await prefill decode
        tokens 5                 -> prefilling: await prefill
        first 4                  -> decoding: computed, emit 4, has kv, emit 5; await decode prefill
    """,
    "a transfer fails": """
        begun                    -> placing: find place
        placed p0 d0             -> reserving: open decode for kv; await decode
        ticket                   -> prefilling: open prefill; await prefill decode
        first 4                  -> transferring: computed, emit 4; await decode prefill
        p0 fails to transfer     -> placing: leave calls, go back, p0 failed; find place
        placed d1                -> computing: open decode; await decode
        tokens 5.                -> ended: has kv, computed, emit 5., leave calls; end
    """,
    "a decode worker dies, three times": """
        begun                    -> placing: find place
        placed d0                -> computing: open decode; await decode
        d0 dies                  -> placing: leave calls, go back, d0 failed; find place
        placed d1                -> computing: open decode; await decode
        tokens 4                 -> decoding: has kv, computed, emit 4; await decode
        d1 dies                  -> placing: leave calls, go back, d1 failed; find place
        placed d0                -> computing: open decode; await decode
        d0 dies                  -> ended: leave calls, go back, d0 failed at last; give up: 3 placements failed: \
d0 (decode): it is gone; d1 (decode): it is gone; d0 (decode): it is gone
    """,
    "two devices are lost in its steps": """
        begun                    -> placing: find place
        placed d0                -> computing: open decode; await decode
        d0 loses its device      -> placing: leave calls, go back, d0 failed; find place
        placed d1                -> computing: open decode; await decode
        d1 loses its device      -> ended: leave calls, go back, d1 failed at last; give up: 2 placements failed: \
d0 (decode): lost; d1 (decode): lost
    """,
    "a worker leaves before it has computed anything": """
        begun                    -> placing: find place
        placed p0 d0             -> reserving: open decode for kv; await decode
        migrate                  -> placing: leave calls, the decode worker leaves; find place
        placed d1                -> computing: open decode; await decode
        d1 drains                -> placing: leave calls, d1 leaves; find place
        placed d0                -> computing: open decode; await decode
        migrate                  -> placing: leave calls, the decode worker leaves; find place
    """,
    "a worker leaves while it decodes": """
        begun                    -> placing: find place
        placed d0                -> computing: open decode; await decode
        tokens 4                 -> decoding: has kv, computed, emit 4; await decode
        migrate                  -> decoding: leaves, prepare move; await decode migration
        tokens 5                 -> decoding: emit 5; await decode migration
        pulled                   -> placing: note pull, keep old call, leave calls, go back; take the next worker
        placed d0 d1             -> reserving: open decode for kv; await decode
        ticket                   -> prefilling: open prefill; await prefill decode
        first 6                  -> transferring: computed, emit 6; await decode prefill
        tokens 7.                -> reporting: has kv; await prefill for 1 s
        time                     -> ended: emit 7., leave calls; end
    """,
    "a worker wants to leave, and stays": """
        begun                    -> placing: find place
        placed d0                -> computing: open decode; await decode
        tokens 4                 -> decoding: has kv, computed, emit 4; await decode
        migrate                  -> decoding: leaves, prepare move; await decode migration
        migrate                  -> decoding: leaves; await decode migration
        stays                    -> decoding: await decode
        migrate                  -> decoding: leaves, prepare move; await decode migration
        tokens 5.                -> ended: emit 5., leave calls; end
    """,
    "no worker has room for a migration, and then one cannot pull": """
        begun                    -> placing: find place
        placed d0                -> computing: open decode; await decode
        tokens 4                 -> decoding: has kv, computed, emit 4; await decode
        migrate                  -> decoding: leaves, prepare move; await decode migration
        none                     -> decoding: prepare move after a wait; await decode migration
        d1 cannot pull           -> decoding: note pull, prepare move, not to d1; await decode migration
        none                     -> decoding: prepare move after a wait; await decode migration
        d0 cannot pull           -> decoding: note pull, prepare move, not to d0; await decode migration
        pulled                   -> placing: note pull, keep old call, leave calls, go back; take the next worker
    """,
    "the worker dies while another one pulls": """
        begun                    -> placing: find place
        placed d0                -> computing: open decode; await decode
        tokens 4                 -> decoding: has kv, computed, emit 4; await decode
        migrate                  -> decoding: leaves, prepare move; await decode migration
        d0 dies                  -> placing: leave calls, go back, d0 failed; find place
    """,
    "a beam search migrates with its state, or not at all": """
        begun search             -> placing: find place
        placed d0                -> computing: open decode; await decode
        tokens 4                 -> decoding: has kv, computed, emit 4; await decode
        migrate                  -> decoding: await decode
        migrate search           -> decoding: leaves, reach, prepare move; await decode migration
        migrate search           -> decoding: leaves, reach; await decode migration
        pulled                   -> placing: note pull, keep old call, leave calls, go back; take the next worker
    """,
    "a beam search that finds what the client asks for": """
        begun search             -> placing: find place
        placed d0                -> computing: open decode; await decode
        beams 2                  -> ended: has kv, computed, emit ., leave calls; end
    """,
    "a beam search that finds too few answers": """
        begun search             -> placing: find place
        placed d0                -> computing: open decode; await decode
        beams 1                  -> ended: has kv, computed, emit ., leave calls; give up: n is 2, but the beam search \
found only 1 answers that the request allows; lower n
    """,
    "a choice follows another one that computes the prompt": """
        begun follows            -> following: await leader
        leader                   -> placing: find place
        placed d0                -> computing: open decode; await decode
    """,
    "a client leaves while a choice waits for another one": """
        begun follows            -> following: await leader
        answered                 -> ended: leave calls; end
    """,
    "the first tokens of a beam search, which no client gets yet": """
        begun search             -> placing: find place
        placed d0                -> computing: open decode; await decode
        searched 3               -> decoding: has kv, computed, emit ; await decode
    """,
    "failures do not add up over a long answer": """
        begun                    -> placing: find place
        placed d0                -> computing: open decode; await decode
        d0 dies                  -> placing: leave calls, go back, d0 failed; find place
        placed d0                -> computing: open decode; await decode
        d0 dies                  -> placing: leave calls, go back, d0 failed; find place
        placed d0                -> computing: open decode; await decode
        tokens 0 1 2 3 4 5 6 7   -> decoding: has kv, computed, emit 0 1 2 3 4 5 6 7; await decode
        tokens 8 9 0 1 2 3 4 5   -> decoding: emit 8 9 0 1 2 3 4 5; await decode
        d0 dies                  -> placing: leave calls, go back, d0 failed; find place
    """,
    "a worker lacks the images, twice": """
        begun images             -> placing: find place
        placed d0                -> computing: open decode; await decode
        d0 lacks images          -> placing: leave calls, go back, lacks images; find place
        placed d0                -> computing: open decode; await decode
        d0 lacks images          -> placing: leave calls, go back, d0 failed; find place
    """,
    "a request that no worker takes": """
        begun                    -> placing: find place
        placed d0                -> computing: open decode; await decode
        d0 rejects it            -> ended: leave calls; give up: too odd
    """,
    "the deadline of the first token": """
        begun                    -> placing: find place
        placed p0 d0             -> reserving: open decode for kv; await decode
        refused                  -> ended: leave calls; give up: no first token
    """,
    "a stop string ends the answer": """
        begun                    -> placing: find place
        placed d0                -> computing: open decode; await decode
        tokens 4 5               -> decoding: has kv, computed, emit 4 5; await decode
        answered                 -> ended: leave calls; end
    """,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_happens_to_a_choice(name: str) -> None:
    machine = ChoiceMachine()
    lines = [line.split("->", 1) for line in SCENARIOS[name].strip().splitlines()]
    for event, expected in lines:
        assert trace(machine, machine.on(event_of(event))) == expected.strip(), event


# -- every order of up to two failures ---------------------------------------------------------------------------------

NUM_TOKENS, MAX_FAULTS = 4, 2


@dataclass(slots=True)
class Explored:
    """One way of a choice, and what the driver and the workers hold on it."""

    machine: ChoiceMachine = field(default_factory=ChoiceMachine)
    step: Step = field(default_factory=lambda: Step((), End()))
    num_faults: int = 0
    emitted: tuple[int, ...] = ()
    is_disaggregated: bool = False
    calls: frozenset[Source] = frozenset()
    """Open calls of the attempt."""
    num_old_calls: int = 0
    """Calls that outlive their attempts, on workers that leave."""
    is_moving: bool = False
    is_over: bool = False
    history: tuple[str, ...] = ()

    def after(self, event: Event, *, is_fault: bool = False) -> Explored:
        """The way one event further, with what must hold everywhere."""
        new = copy.copy(self)
        new.machine = replace(self.machine)
        new.num_faults += is_fault
        is_of_a_move = isinstance(event, CallFailed) and event.source is Source.MIGRATION
        new.is_moving &= not (isinstance(event, Fetched | Stays | NoRoom) or is_of_a_move)
        new.step = new.machine.on(event)
        new.history += (f"{type(event).__name__} -> {trace(new.machine, new.step)}",)
        for instruction in new.step.instructions:
            new._carry_out(instruction)
        match new.step.then:
            case Await(sources):
                wanted = {source for source in sources if source not in (Source.MIGRATION, Source.LEADER)}
                assert wanted <= new.calls, f"it waits for a call that is not open: {new.history}"
                awaits_move = new.is_moving and new.machine.state is State.DECODING
                assert (Source.MIGRATION in sources) == awaits_move, new.history
            case FindPlace():
                assert not new.calls, f"it is placed while it holds workers: {new.history}"
            case End() | GiveUp():
                new.is_over = True
                assert not new.calls, f"a reservation is left: {new.history}"
                assert new.machine.state is State.ENDED, new.history
        return new

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case OpenDecode():
                assert not self.calls, self.history
                self.calls |= {Source.DECODE}
            case OpenPrefill():
                assert self.calls == {Source.DECODE}, self.history
                self.calls |= {Source.PREFILL}
            case KeepOldCall():
                self.calls -= {Source.DECODE}
                self.num_old_calls += 1
            case PrepareMove():
                assert not self.is_moving, self.history
                self.is_moving = True
            case LeaveCalls():
                self.calls, self.is_moving = frozenset(), False
            case Emit(tokens):
                assert Source.DECODE in self.calls, f"tokens of nobody: {self.history}"
                self.emitted += tokens.token_ids
                assert self.emitted == tuple(range(len(self.emitted))), f"a token twice, or lost: {self.history}"

    def next_ways(self) -> Iterator[Explored]:
        """Every way that may follow."""
        match self.step.then:
            case FindPlace(is_move):
                for mode in (Mode.DISAGGREGATED,) if is_move else Mode:
                    new = self.after(Placed(Placement(mode=mode, decode_worker="d0", prefill_worker="p0")))
                    new.is_disaggregated = mode is Mode.DISAGGREGATED
                    yield new
            case Await(sources, timeout_s):
                if timeout_s is not None:
                    yield self.after(TimeUp())
                for source in sources:
                    for event, is_fault in self._events_of(source):
                        if self.num_faults + is_fault <= MAX_FAULTS:
                            yield self.after(event, is_fault=is_fault)
                if self.num_faults < MAX_FAULTS:
                    yield self.after(Answered(), is_fault=True)  # the client has left
                    if self.machine.state in (State.COMPUTING, State.RESERVING, State.PREFILLING):
                        yield self.after(Refused(Overloaded("late, or preempted")), is_fault=True)

    def _events_of(self, source: Source) -> Iterator[tuple[Event, bool]]:
        state, name = self.machine.state, "p0" if source is Source.PREFILL else "d0"
        if source is Source.LEADER:
            yield LeaderBegun(), False
            return
        if source is Source.MIGRATION:
            yield Fetched(num_tokens=1), False
            yield Stays(), False
            yield NoRoom(), False
            yield CallFailed(source, WORKERS["d1"], WorkerFailed("gone")), True
            return
        for error in (WorkerFailed("gone"), TransferError("no peer"), TransferCancelled("cancelled")):
            yield CallFailed(source, WORKERS[name], error), True
        if source is Source.PREFILL:
            if state is State.PREFILLING:
                token = len(self.emitted)
                yield FirstToken(token, self._finish(token), PrefillReport()), False
            else:
                yield Transferred(1, 1, 0.0, 0.0), False
            return
        yield CallFailed(source, WORKERS[name], WorkerDraining("it leaves")), True
        yield Migrate(), True
        if state is State.RESERVING:
            yield ticket(SPEC), False
        elif state is not State.PREFILLING:
            token = len(self.emitted)
            yield NewTokens(token_ids=(token,), finish_reason=self._finish(token)), False

    @staticmethod
    def _finish(token: int) -> FinishReason | None:
        return FinishReason.LENGTH if token == NUM_TOKENS - 1 else None

    def key(self) -> object:
        """What decides everything that may follow."""
        return (
            repr(replace(self.machine, _failures=(), avoid=type(self.machine.avoid)(), num_attempts=0)),
            len(self.machine._failures),
            repr(self.step.then),
            self.num_faults,
            self.emitted,
            self.calls,
            self.is_moving,
        )


def test_in_every_order_of_two_failures_nothing_is_lost_twice_or_left() -> None:
    """In every state: a worker dies, leaves, fails to transfer; the deadline, a preemption, the client leaves."""
    ways = [Explored().after(Begun(MAX_ATTEMPTS, follows=follows)) for follows in (False, True)]
    seen, ends = {way.key() for way in ways}, list[Explored]()
    states_of_faults: dict[str, set[State]] = {}
    while ways:
        way = ways.pop()
        followers = list(way.next_ways())
        assert followers, f"it is stuck: {way.history}"
        for new in followers:
            if new.num_faults > way.num_faults:
                states_of_faults.setdefault(new.history[-1].split()[0], set()).add(way.machine.state)
            if new.is_over:
                ends.append(new)
            elif (key := new.key()) not in seen:
                seen.add(key)
                ways.append(new)
    waiting = set(State) - {State.PLACING, State.ENDED}
    assert states_of_faults["CallFailed"] == waiting - {State.FOLLOWING}
    assert states_of_faults["Answered"] == waiting
    assert states_of_faults["Migrate"] == waiting - {State.REPORTING, State.FOLLOWING}
    assert states_of_faults["Refused"] == {State.COMPUTING, State.RESERVING, State.PREFILLING}
    for end in ends:
        was_ended = any(word in end.history[-1] for word in ("Answered", "Refused"))
        assert was_ended or end.emitted == tuple(range(NUM_TOKENS)), f"a choice is lost: {end.history}"
    print(f"{len(seen)} states, {len(ends)} ends")


def test_the_explorer_sees_a_machine_that_leaves_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    on = ChoiceMachine.on

    def forgetful(machine: ChoiceMachine, event: Event) -> Step:
        step = on(machine, event)
        if isinstance(event, Migrate):
            return step._replace(instructions=tuple(i for i in step.instructions if not isinstance(i, LeaveCalls)))
        return step

    monkeypatch.setattr(ChoiceMachine, "on", forgetful)
    with pytest.raises(AssertionError, match="it is placed while it holds workers"):
        test_in_every_order_of_two_failures_nothing_is_lost_twice_or_left()


def test_the_worker_of_a_failure_is_avoided_and_images_are_carried() -> None:
    machine = ChoiceMachine()
    for line in ("begun images", "placed d0", "d0 dies"):
        machine.on(event_of(line))
    assert machine.carries_images
    assert machine.num_attempts == 1
    machine.on(event_of("placed d1"))
    machine.on(event_of("d1 is full"))
    assert machine.avoid.refused == {"d1"}


def test_nothing_is_pulled_from_a_worker_that_has_failed_to_transfer() -> None:
    machine = ChoiceMachine()
    for line in ("begun", "placed p0 d0", "ticket", "first 4", "p0 fails to transfer"):
        machine.on(event_of(line))
    assert machine.avoid.no_sources == {"", "p0"}
    assert machine.avoid.doubted == {"d0"}

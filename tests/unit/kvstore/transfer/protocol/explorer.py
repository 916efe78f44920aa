"""Every way in which KV transfers can go: the real `ReceiveState` and `SendState` in a small model of the world.

    request --reserve, release--> ReceiveState <--control messages, a queue a direction--> SendState <--offer, finish,
                                     ^                                                        |              abort
                                     '---- thread <---- chunks, first in first out ---- thread

A world is a tuple of plain values. `explore` visits every world that can follow from the first one, depth first, and
raises `Violation`, with the way that leads there, as soon as one of these does not hold:

- a chunk is gathered only out of pinned blocks, and written only into blocks that its reservation holds until it is in;
- where the ledger says committed, each block holds the chunk that the plan puts there, of this very reservation, and
  those into which no chunk goes are as they were;
- a state leaves only once everything is computed;
- blocks come back once a reservation, pins are dropped once a transfer, each side tells one outcome;
- the sender says committed only where the ledger has;
- every run ends, which is to say that no world comes after itself; and where it ends, all blocks are back, all pins
  dropped, both books empty;
- where nothing went wrong, nothing waits for a timeout;
- where nothing went wrong but lost, doubled, late messages or doubled chunks, everything is committed on both sides;
- the machines' own `check`.

The machines are deterministic, so each step of theirs is computed once and then looked up: worlds differ mostly in what
surrounds them. Times in a machine are kept relative to now, which is always 0.
"""

from __future__ import annotations

import operator
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Generic, TypeVar

from baton.errors import TransferError, text_of
from baton.messages import Abort, AbortAck, Commit, CommitAck, Grant, Nack, Offer
from kvstore.transfer.protocol.machine import Send, TransferCommitted
from kvstore.transfer.protocol.receive_state import Free, ReceiveState
from kvstore.transfer.protocol.send_state import SendState

RESEND_S, ANSWER_S, LEASE_S = 1.0, 4.0, 4.0
ERROR = TransferError("on purpose")
OLDEST = {"sent_at": -ANSWER_S, "asked_at": -ANSWER_S, "expires_at": 0.0}
"""Fields that are times, and where it makes no difference any more how long ago they are."""

Message = tuple[str, int]
"""Kind and generation: the rest follows from these."""
KINDS = {
    Offer: "offer",
    Commit: "commit",
    Abort: "abort",
    Grant: "on_grant",
    CommitAck: "on_commit_ack",
    Nack: "on_nack",
    AbortAck: "on_abort_ack",
}
"""Named as the method that takes it."""

TODO, WAITING, SETTLED, RELEASING, DONE = range(5)
"""Phases of a request on the receiver."""
NO_OUTCOME, COMMITTED, FAILED = range(3)
BROKEN, SENDER_KNOWS, RECEIVER_KNOWS = 1, 2, 4
"""Flags of a session."""
DEAD = -1
MAX_STATES = 10_000
"""Of a machine in one scenario: some thousands are met."""

M = TypeVar("M", ReceiveState, SendState)


class Violation(AssertionError):
    """Something that must never happen, and the steps that lead to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What there is to transfer, and how much may go wrong in one run.

    Generations are 1, 2, ... in the order of the transfers, whose reservations are made in this order.
    """

    name: str
    num_chunks: tuple[tuple[int | None, ...], ...]
    """By transfer and session; None: the session has no part in it. A chunk is a block."""
    num_blocks: int
    """Of the receiver."""
    num_held: int = 0
    """Blocks of each reservation into which no chunk goes: the receiver has them, or they are before a window."""
    states_from: tuple[int, ...] = ()
    """Sessions whose last chunk is a state, which is ready once everything is computed."""
    num_faults: int = 0
    """Messages or chunks lost, doubled, late, corrupt; a session or a side lost; time that passes too early."""
    num_cancels: int = 0
    """Requests that give up, senders that do."""

    def __str__(self) -> str:
        return f"{self.name}, {self.num_faults} faults, {self.num_cancels} cancels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    num_worlds: int
    num_steps: int
    num_ends: int
    num_ledgers: int
    num_offers: int
    """Distinct states of each machine."""
    seconds: float


# -- the machines, with their steps remembered ---------------------------------------------------------------------


class Book(Generic[M]):
    """All states of one machine that have been met, by number; 0 is the first."""

    def __init__(self, machine: M) -> None:
        self._pickled: list[bytes] = []
        self._numbers: dict[Any, int] = {}
        self._steps: dict[tuple[Any, ...], tuple[int, Any]] = {}
        self._number(machine)

    def __len__(self) -> int:
        return len(self._pickled)

    def machine(self, number: int) -> M:
        machine: M = pickle.loads(self._pickled[number])
        return machine

    def step(self, number: int, event: str, *args: Any) -> tuple[int, Any]:
        """The state that follows, and what the event brings: instructions as plain tuples, or a plain answer."""
        key = (number, event, *args)
        known = self._steps.get(key)
        if known is None:
            machine = self.machine(number)
            brought = getattr(machine, event)(*args)
            machine.check()
            if isinstance(brought, list):
                brought = tuple(self._plain(instruction) for instruction in brought)
            known = self._steps[key] = self._number(machine), brought
        return known

    def elapse(self, number: int, seconds: float) -> int:
        """The state after a while in which nobody told the machine anything."""
        key = (number, seconds)
        known = self._steps.get(key)
        if known is None:
            machine = self.machine(number)
            for entry in machine._by_generation.values():
                for name in OLDEST.keys() & {field.name for field in fields(entry)}:
                    setattr(entry, name, max(OLDEST[name], getattr(entry, name) - seconds))
            known = self._steps[key] = self._number(machine), None
        return known[0]

    def _number(self, machine: M) -> int:
        canonical = _canonical({name: v for name, v in vars(machine).items() if not name.startswith("num_")})
        number = self._numbers.setdefault(canonical, len(self._pickled))
        if number == len(self._pickled):
            assert number < MAX_STATES, "the machine has no end of states"
            self._pickled.append(pickle.dumps(machine))
        return number

    def _plain(self, instruction: Any) -> tuple[Any, ...]:
        match instruction:
            case Send(Offer() | Commit() | Abort() as message):
                assert instruction.connection == 0
                return "tell", self._plain_message(message)
            case Send():
                return "tell", instruction.connection, self._plain_message(instruction.message)
            case TransferCommitted(first_token=token) if token is not None:
                assert token == first_token(instruction.generation)
            case Free():
                return "Free", instruction.generation, instruction.block_ids
        return type(instruction).__name__, instruction.generation

    def _plain_message(self, message: Any) -> Message:
        assert message.transfer_id == transfer_id(message.generation)
        assert not isinstance(message, Commit) or message.first_token == first_token(message.generation)
        return KINDS[type(message)], message.generation


def transfer_id(generation: int) -> str:
    return f"transfer-{generation}"


def first_token(generation: int) -> int:
    return 100 + generation


def _canonical(value: Any) -> Any:
    """Hashable, and equal where no method can tell the difference."""
    if isinstance(value, dict):
        return tuple((key, _canonical(v)) for key, v in value.items())
    if isinstance(value, tuple):
        return tuple(_canonical(v) for v in value)
    if isinstance(value, set):
        return tuple(sorted(value))
    if isinstance(value, BaseException):
        return "error"
    if is_dataclass(value) and not isinstance(value, Enum):
        return tuple(_canonical(getattr(value, field.name)) for field in fields(value))
    return value


# -- the world -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class World:
    """Between two steps. Tuples of values by session, by transfer or by block; every value is immutable."""

    ledger: int
    """Number of its state in its book, or DEAD."""
    offers: tuple[int, ...]
    """By session, likewise."""
    to_receiver: tuple[tuple[Message, ...], ...]
    to_sender: tuple[tuple[Message, ...], ...]
    link: tuple[tuple[tuple[int, int, bool], ...], ...]
    """By session: chunks under way, as generation, seq, intact."""
    outbounds: tuple[tuple[tuple[int, int], ...], ...]
    """By session: granted transfers with chunks to gather, and the next seq."""
    gathering: tuple[int, ...]
    """By session: the generation that its lane reads, or 0."""
    scattering: tuple[tuple[int, int] | None, ...]
    """By session: the generation and seq that its lane writes."""
    session: tuple[int, ...]
    phase: tuple[int, ...]
    received: tuple[int, ...]
    """By transfer: the outcome that the ledger told."""
    finished: tuple[bool, ...]
    """By transfer: the engine has computed everything."""
    pinned: tuple[tuple[bool, ...], ...]
    """By transfer and session."""
    sent: tuple[tuple[int, ...], ...]
    """By transfer and session: the outcome that the offers told."""
    holder: tuple[int, ...]
    """By block: the generation that has it, or 0."""
    content: tuple[tuple[int, int, int] | None, ...]
    """By block: generation, session and seq of the chunk that it holds, if it is a chunk's."""
    faults: int
    """Still to happen, at most."""
    cancels: int
    benign: bool
    """Nothing has happened that a KV transfer does not survive."""


Key = tuple[Any, ...]
Way = tuple[str, int] | tuple[str, int, int]
_key_of = operator.attrgetter(*(field.name for field in fields(World)))


def put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


def without(values: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return values[:index] + values[index + 1 :]


class Model:
    """The steps of a scenario's worlds, with machines of the classes given."""

    def __init__(self, scenario: Scenario, ledger: type[ReceiveState], offers: type[SendState]) -> None:
        self.scenario = scenario
        self.ledger = Book(ledger())
        self.offers = Book(offers(RESEND_S, ANSWER_S))
        self._sessions = range(len(scenario.num_chunks[0]))
        self._transfers = range(len(scenario.num_chunks))
        self._same: dict[Any, Any] = {}
        self.num_ends = 0
        self.way: Way = ("start", 0)
        """The step that is being taken."""

    def first(self) -> Key:
        num_sessions, num_transfers = len(self._sessions), len(self._transfers)
        none = ((),) * num_sessions
        parts = tuple((False,) * num_sessions for _ in self._transfers)
        outcomes = tuple((NO_OUTCOME,) * num_sessions for _ in self._transfers)
        world = World(
            ledger=0,
            offers=(0,) * num_sessions,
            to_receiver=none,
            to_sender=none,
            link=none,
            outbounds=none,
            gathering=(0,) * num_sessions,
            scattering=(None,) * num_sessions,
            session=(0,) * num_sessions,
            phase=(TODO,) * num_transfers,
            received=(NO_OUTCOME,) * num_transfers,
            finished=(False,) * num_transfers,
            pinned=parts,
            sent=outcomes,
            holder=(0,) * self.scenario.num_blocks,
            content=(None,) * self.scenario.num_blocks,
            faults=self.scenario.num_faults,
            cancels=self.scenario.num_cancels,
            benign=True,
        )
        return _key_of(world)

    def steps(self, key: Key) -> Iterator[tuple[Way, Key]]:
        """All that can happen next. None where the run is over; then its end is checked."""
        at_rest = True
        for way in self._ordinary(World(*key)):
            at_rest = False
            yield self._take(key, way)
        if at_rest:
            step = self._take(key, ("time", 1))
            if step[1] == key:
                self.num_ends += 1
                self.check_end(World(*key))
            else:
                assert not self._is_spotless(World(*key)), "nothing went wrong, and yet something waits for a timeout"
                yield step
        for way in self._accidents(World(*key), at_rest):
            yield self._take(key, way)

    # -- what can happen ---------------------------------------------------------------------------------------------

    def _ordinary(self, world: World) -> Iterator[Way]:
        """What happens sooner or later in any run."""
        receiver_lives, sender_lives = world.ledger != DEAD, world.offers[0] != DEAD
        for t in self._transfers:
            phase = world.phase[t]
            if receiver_lives and phase == TODO and self._can_reserve(world, t):
                yield "reserve", t
            if phase == SETTLED:
                yield "release", t
            if not sender_lives:
                continue
            unsettled = [s for s in self._parts(t) if world.pinned[t][s] and world.sent[t][s] == NO_OUTCOME]
            if unsettled and not world.finished[t]:
                yield "finish", t
            if unsettled and FAILED in world.sent[t]:
                for s in unsettled:
                    yield "give up", t, s
        for s in self._sessions:
            if world.to_receiver[s]:
                yield "to receiver", s, 0
            if world.to_sender[s]:
                yield "to sender", s, 0
            if world.gathering[s]:
                yield "gather ends", s
            else:
                for index, (generation, seq) in enumerate(world.outbounds[s]):
                    if world.finished[generation - 1] or not self._is_state(generation - 1, s, seq):
                        yield "gather begins", s, index
            if world.scattering[s] is not None:
                yield "scatter ends", s
            elif world.link[s]:
                yield "chunk arrives", s, 0
            if world.session[s] & BROKEN:
                if sender_lives and not world.session[s] & SENDER_KNOWS:
                    yield "sender loses", s
                if receiver_lives and not world.session[s] & RECEIVER_KNOWS:
                    yield "receiver loses", s

    def _accidents(self, world: World, at_rest: bool) -> Iterator[Way]:
        """What happens as often in a run as the scenario allows."""
        if world.cancels:
            for t in self._transfers:
                if world.phase[t] == WAITING:
                    yield "cancel", t
                for s in self._parts(t):
                    if world.offers[s] != DEAD and world.pinned[t][s] and world.sent[t][s] == NO_OUTCOME:
                        yield "abort", t, s
        if not world.faults:
            return
        for t in self._transfers:
            if world.ledger != DEAD and world.phase[t] == TODO and self._can_reserve(world, t):
                yield "ticket lost", t
        for s in self._sessions:
            for name, queue in (("receiver", world.to_receiver[s]), ("sender", world.to_sender[s])):
                if queue:
                    yield f"message to {name} lost", s
                    yield f"message to {name} doubled", s
                for index in range(1, len(queue)):
                    yield f"late to {name}", s, index
            if world.link[s]:
                yield "chunk lost", s
                yield "chunk corrupted", s
                if world.scattering[s] is None:
                    yield "chunk doubled", s
            if not world.session[s] & BROKEN:
                yield "session breaks", s
        if world.ledger != DEAD:
            yield "receiver dies", 0
        if world.offers[0] != DEAD:
            yield "sender dies", 0
        if not at_rest:
            yield "time early", 1
        yield "time jumps", 4

    def _is_spotless(self, world: World) -> bool:
        return (world.faults, world.cancels) == (self.scenario.num_faults, self.scenario.num_cancels)

    def _can_reserve(self, world: World, t: int) -> bool:
        return (t == 0 or world.phase[t - 1] != TODO) and world.holder.count(0) >= self._num_blocks(t)

    def _num_blocks(self, t: int) -> int:
        return self.scenario.num_held + sum(num or 0 for num in self.scenario.num_chunks[t])

    def _is_state(self, t: int, s: int, seq: int) -> bool:
        return s in self.scenario.states_from and seq + 1 == self.scenario.num_chunks[t][s]

    def _parts(self, t: int) -> list[int]:
        return [s for s in self._sessions if self.scenario.num_chunks[t][s] is not None]

    # -- what it does ------------------------------------------------------------------------------------------------

    def _take(self, key: Key, way: Way) -> tuple[Way, Key]:
        self.way = way
        world = World(*key)
        index, other = way[1], way[-1]
        match way[0]:
            case "reserve":
                self._reserve(world, index, offered=True)
            case "release":
                self._release(world, index)
            case "finish":
                world.finished = put(world.finished, index, True)
                for s in self._parts(index):
                    self._of_offers(world, s, "finish", index + 1, first_token(index + 1), 0.0)
            case "give up":
                self._of_offers(world, other, "abort", index + 1, ERROR, 0.0)
            case "to receiver":
                self._to_receiver(world, index, other, keep=False)
            case "to sender":
                self._to_sender(world, index, other, keep=False)
            case "gather begins":
                self._gather_begins(world, index, other)
            case "gather ends":
                self._gather_ends(world, index)
            case "chunk arrives":
                self._chunk_arrives(world, index, keep=False)
            case "scatter ends":
                self._scatter_ends(world, index)
            case "sender loses":
                world.session = put(world.session, index, world.session[index] | SENDER_KNOWS)
                world.outbounds = put(world.outbounds, index, ())
                self._of_offers(world, index, "lost", ERROR)
            case "receiver loses":
                world.session = put(world.session, index, world.session[index] | RECEIVER_KNOWS)
                self._of_ledger(world, "lost", index, ERROR)
            case "time":
                self._time(world, float(index), pinged=True)
            case accident:
                self._accident(world, accident, index, other)
        return way, _key_of(world)

    def _accident(self, world: World, accident: str, index: int, other: int) -> None:
        if accident in ("cancel", "abort"):
            world.cancels -= 1
        else:
            world.faults -= 1
        harmless = ("message to", "late to", "chunk doubled", "time early")
        world.benign = world.benign and accident.startswith(harmless)
        match accident:
            case "cancel":
                self._release(world, index)
            case "abort":
                self._of_offers(world, other, "abort", index + 1, ERROR, 0.0)
            case "ticket lost":
                self._reserve(world, index, offered=False)
            case "message to receiver lost":
                world.to_receiver = put(world.to_receiver, index, world.to_receiver[index][1:])
            case "message to sender lost":
                world.to_sender = put(world.to_sender, index, world.to_sender[index][1:])
            case "message to receiver doubled":
                self._to_receiver(world, index, 0, keep=True)
            case "message to sender doubled":
                self._to_sender(world, index, 0, keep=True)
            case "late to receiver":
                self._to_receiver(world, index, other, keep=False)
            case "late to sender":
                self._to_sender(world, index, other, keep=False)
            case "chunk lost":
                world.link = put(world.link, index, world.link[index][1:])
            case "chunk corrupted":
                (generation, seq, _), *rest = world.link[index]
                world.link = put(world.link, index, ((generation, seq, False), *rest))
            case "chunk doubled":
                self._chunk_arrives(world, index, keep=True)
            case "session breaks":
                self._break(world, index)
            case "receiver dies":
                world.ledger = DEAD
                world.holder = (0,) * len(world.holder)
                world.content = (None,) * len(world.content)
                world.scattering = (None,) * len(world.scattering)
                world.phase = (DONE,) * len(world.phase)
                self._break(world, *self._sessions)
            case "sender dies":
                world.offers = (DEAD,) * len(world.offers)
                world.outbounds = ((),) * len(world.outbounds)
                world.gathering = (0,) * len(world.gathering)
                world.pinned = tuple((False,) * len(parts) for parts in world.pinned)
                self._break(world, *self._sessions)
            case "time early":
                self._time(world, float(index), pinged=True)
            case "time jumps":
                self._time(world, float(index), pinged=False)
            case _:
                raise AssertionError(accident)

    def _break(self, world: World, *sessions: int) -> None:
        for s in sessions:
            world.session = put(world.session, s, world.session[s] | BROKEN)
            world.to_receiver = put(world.to_receiver, s, ())
            world.to_sender = put(world.to_sender, s, ())
            world.link = put(world.link, s, ())

    def _reserve(self, world: World, t: int, offered: bool) -> None:
        blocks = tuple(b for b, holder in enumerate(world.holder) if not holder)[: self._num_blocks(t)]
        world.ledger, generation = self.ledger.step(world.ledger, "reserve", transfer_id(t + 1), blocks, LEASE_S)
        assert generation == t + 1
        world.phase = put(world.phase, t, WAITING)
        for block in blocks:
            world.holder = put(world.holder, block, generation)
            world.content = put(world.content, block, None)
        if not offered:
            return
        for s in self._parts(t):
            if world.offers[s] == DEAD:
                continue
            if world.session[s] & SENDER_KNOWS:
                world.sent = put(world.sent, t, put(world.sent[t], s, FAILED))
                continue
            world.pinned = put(world.pinned, t, put(world.pinned[t], s, True))
            offer = Offer(
                transfer_id=transfer_id(generation),
                generation=generation,
                plan_digest=b"",
                num_chunks=self.scenario.num_chunks[t][s] or 0,
                wire_dtype="",
                num_tokens=16,
                chunk_bytes=1024,
            )
            self._of_offers(world, s, "offer", offer, 0.0)

    def _release(self, world: World, t: int) -> None:
        world.phase = put(world.phase, t, RELEASING)
        for _ in range(2):  # again does nothing
            self._of_ledger(world, "release", t + 1)

    def _to_receiver(self, world: World, s: int, index: int, keep: bool) -> None:
        kind, generation = world.to_receiver[s][index]
        if not keep:
            world.to_receiver = put(world.to_receiver, s, without(world.to_receiver[s], index))
        ids = (s, transfer_id(generation), generation)
        if kind == "offer":
            parts = self._parts(generation - 1)
            self._of_ledger(world, "offer", *ids, self.scenario.num_chunks[generation - 1][s], len(parts))
        elif kind == "commit":
            self._of_ledger(world, "commit", *ids, first_token(generation))
        else:
            self._of_ledger(world, "abort", *ids, ERROR)

    def _to_sender(self, world: World, s: int, index: int, keep: bool) -> None:
        kind, generation = world.to_sender[s][index]
        if not keep:
            world.to_sender = put(world.to_sender, s, without(world.to_sender[s], index))
        extra = {"on_grant": (0.0,), "on_nack": (text_of(ERROR),)}.get(kind, ())
        self._of_offers(world, s, kind, transfer_id(generation), generation, *extra)

    def _time(self, world: World, seconds: float, pinged: bool) -> None:
        if world.ledger != DEAD:
            world.ledger = self.ledger.elapse(world.ledger, seconds)
            for s in self._sessions:
                if pinged and world.offers[s] != DEAD and not world.session[s] & BROKEN:
                    world.ledger, _ = self.ledger.step(world.ledger, "renew", s, LEASE_S)
            self._of_ledger(world, "expire", 0.0)
        for s in self._sessions:
            if world.offers[s] != DEAD:
                world.offers = put(world.offers, s, self.offers.elapse(world.offers[s], seconds))
                self._of_offers(world, s, "tick", 0.0)

    # -- the lanes ---------------------------------------------------------------------------------------------------

    def _gather_begins(self, world: World, s: int, index: int) -> None:
        generation, _ = world.outbounds[s][index]
        number, allowed = self.offers.step(world.offers[s], "gather_begins", generation)
        world.offers = put(world.offers, s, number)
        if allowed:
            assert world.pinned[generation - 1][s], "a gather reads blocks that are not pinned"
            world.gathering = put(world.gathering, s, generation)
        else:
            world.outbounds = put(world.outbounds, s, without(world.outbounds[s], index))

    def _gather_ends(self, world: World, s: int) -> None:
        generation = world.gathering[s]
        world.gathering = put(world.gathering, s, 0)
        if not world.session[s] & SENDER_KNOWS:
            seq = dict(world.outbounds[s])[generation]
            rest = tuple(outbound for outbound in world.outbounds[s] if outbound[0] != generation)
            if seq + 1 < (self.scenario.num_chunks[generation - 1][s] or 0):
                rest += ((generation, seq + 1),)
            world.outbounds = put(world.outbounds, s, rest)
            if not world.session[s] & BROKEN:
                world.link = put(world.link, s, (*world.link[s], (generation, seq, True)))
        self._of_offers(world, s, "gather_ends", generation, 0.0)

    def _chunk_arrives(self, world: World, s: int, keep: bool) -> None:
        generation, seq, intact = world.link[s][0]
        if not keep:
            world.link = put(world.link, s, world.link[s][1:])
        if not intact:
            self._of_ledger(world, "fail", transfer_id(generation), generation, ERROR)
            return
        world.ledger, allowed = self.ledger.step(world.ledger, "scatter_begins", s, generation, seq)
        if allowed:
            self._block(world, generation, s, seq)
            world.scattering = put(world.scattering, s, (generation, seq))

    def _scatter_ends(self, world: World, s: int) -> None:
        writing = world.scattering[s]
        assert writing is not None
        generation, seq = writing
        world.scattering = put(world.scattering, s, None)
        block = self._block(world, generation, s, seq)
        world.content = put(world.content, block, (generation, s, seq))
        self._of_ledger(world, "scatter_ends", s, generation)

    def _block(self, world: World, generation: int, s: int, seq: int) -> int:
        """Where a chunk belongs, in the blocks that the reservation still holds."""
        held = [block for block, holder in enumerate(world.holder) if holder == generation]
        assert len(held) == self._num_blocks(generation - 1), "a scatter writes into blocks that are somebody else's"
        before = sum(num or 0 for num in self.scenario.num_chunks[generation - 1][:s])
        return held[self.scenario.num_held + before + seq]

    # -- what the machines decide ------------------------------------------------------------------------------------

    def _of_ledger(self, world: World, event: str, *args: Any) -> None:
        world.ledger, instructions = self.ledger.step(world.ledger, event, *args)
        for kind, generation, *rest in instructions:
            t = generation - 1
            match kind:
                case "tell":
                    s, message = generation, rest[0]
                    if not world.session[s] & BROKEN:
                        world.to_sender = put(world.to_sender, s, (*world.to_sender[s], message))
                case "TransferCommitted":
                    for s in self._parts(t):
                        for seq in range(self.scenario.num_chunks[t][s] or 0):
                            block = self._block(world, generation, s, seq)
                            assert world.content[block] == (generation, s, seq), f"block {block} is not what was sent"
                            assert not self._is_state(t, s, seq) or world.finished[t], "a state has come too early"
                    blocks = [block for block, holder in enumerate(world.holder) if holder == generation]
                    is_same = all(world.content[block] is None for block in blocks[: self.scenario.num_held])
                    assert is_same, "a block was written for which there is no chunk"
                    self._settled(world, t, COMMITTED)
                case "TransferFailed":
                    self._settled(world, t, FAILED)
                case "Free":
                    held = tuple(block for block, holder in enumerate(world.holder) if holder == generation)
                    assert world.phase[t] == RELEASING, f"{generation} is freed again, or before its request lets go"
                    assert rest[0] == held, f"{generation} had {held}, and {rest[0]} are freed"
                    assert all(w is None or w[0] != generation for w in world.scattering), "freed under a scatter"
                    world.phase = put(world.phase, t, DONE)
                    for block in held:
                        world.holder = put(world.holder, block, 0)
                        world.content = put(world.content, block, None)

    def _settled(self, world: World, t: int, outcome: int) -> None:
        assert world.received[t] == NO_OUTCOME, f"the ledger tells a second outcome of {t + 1}"
        assert world.phase[t] in (WAITING, RELEASING)
        world.received = put(world.received, t, outcome)
        if world.phase[t] == WAITING:
            world.phase = put(world.phase, t, SETTLED)

    def _of_offers(self, world: World, s: int, event: str, *args: Any) -> None:
        number, instructions = self.offers.step(world.offers[s], event, *args)
        world.offers = put(world.offers, s, number)
        for kind, generation in instructions:
            if kind == "tell":
                if not world.session[s] & BROKEN:
                    world.to_receiver = put(world.to_receiver, s, (*world.to_receiver[s], generation))
                continue
            t = generation - 1
            match kind:
                case "Granted":
                    assert generation not in dict(world.outbounds[s]), f"{generation} is granted again"
                    if self.scenario.num_chunks[t][s]:
                        world.outbounds = put(world.outbounds, s, (*world.outbounds[s], (generation, 0)))
                case "Unpin":
                    assert world.pinned[t][s], f"{generation} is unpinned again"
                    assert world.gathering[s] != generation, "unpinned under a gather"
                    assert world.sent[t][s] != NO_OUTCOME, f"{generation} is unpinned before its end"
                    world.pinned = put(world.pinned, t, put(world.pinned[t], s, False))
                case "TransferCommitted" | "TransferFailed":
                    assert world.sent[t][s] == NO_OUTCOME, f"the offers tell a second outcome of {generation}"
                    outcome = COMMITTED if kind == "TransferCommitted" else FAILED
                    if outcome == COMMITTED:
                        assert world.received[t] == COMMITTED, "only the sender believes that it is committed"
                    world.sent = put(world.sent, t, put(world.sent[t], s, outcome))

    def check_end(self, world: World) -> None:
        """Nothing can happen any more, however long one waits."""
        assert not any(world.holder), "blocks are lost"
        assert set(world.phase) == {DONE}, "a request waits for ever"
        assert not any(any(parts) for parts in world.pinned), "pins are left"
        if world.ledger != DEAD:
            ledger = self.ledger.machine(world.ledger)
            assert len(ledger) == 0, "the ledger is not empty"
        for number in world.offers:
            if number != DEAD:
                assert len(self.offers.machine(number)) == 0, "the offers are not empty"
        if world.benign:
            assert set(world.received) == {COMMITTED}, "a transfer failed with no reason"
            for t in self._transfers:
                assert all(world.sent[t][s] == COMMITTED for s in self._parts(t)), "a sender failed with no reason"

    def compact(self, key: Key) -> Key:
        """The same, of values that other worlds have too."""
        same = self._same
        return tuple([same.setdefault(value, value) for value in key])


# -- the search ----------------------------------------------------------------------------------------------------


def explore(
    scenario: Scenario, ledger: type[ReceiveState] = ReceiveState, offers: type[SendState] = SendState
) -> Explored:
    """Visits every world of a scenario.

    Raises:
        Violation: a property does not hold.
    """
    began = time.perf_counter()
    model = Model(scenario, ledger, offers)
    first = model.first()
    is_behind: dict[Key, bool] = {first: False}
    """Worlds that were met: whether all that follows from one has been visited."""
    path: list[tuple[Way, Key, Iterator[tuple[Way, Key]]]] = [(("start", 0), first, model.steps(first))]
    num_steps = 0
    try:
        while path:
            _, key, steps = path[-1]
            for way, after in steps:
                num_steps += 1
                behind = is_behind.get(after)
                if behind is None:
                    after = model.compact(after)
                    is_behind[after] = False
                    path.append((way, after, model.steps(after)))
                    break
                assert behind, "a run goes round in circles"
            else:
                is_behind[key] = True
                path.pop()
    except Exception as error:
        ways = [*(way for way, _, _ in path), model.way]
        steps_taken = "; ".join(" ".join(map(str, way)) for way in ways)
        raise Violation(f"{scenario}: {error!r} after: {steps_taken}") from error
    seconds = time.perf_counter() - began
    return Explored(
        num_worlds=len(is_behind),
        num_steps=num_steps,
        num_ends=model.num_ends,
        num_ledgers=len(model.ledger),
        num_offers=len(model.offers),
        seconds=seconds,
    )


def with_budget(scenario: Scenario, num_faults: int, num_cancels: int) -> Scenario:
    return replace(scenario, num_faults=num_faults, num_cancels=num_cancels)

"""Turns on a GPU: who goes when, in one process and between several, with threads for lanes and no GPU."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from baton.errors import TransferError, TransferTimeout
from kvstore.transfer.transport.nccl_turns import DeviceTurns, Direction, OpeningLimits, TransportTurns, Words

LONG_S = 20.0
"""Nothing here takes so long unless somebody waits in a circle."""
LONG = OpeningLimits(LONG_S, LONG_S)


AGREED = Words(lambda _: None, lambda _: "next")
"""A peer that always has what it needs."""


def nothing() -> None:
    pass


class Holder:
    """A link in a thread of its own, with a turn until it is let go."""

    def __init__(self, traffic: DeviceTurns, direction: Direction, timeout_s: float = LONG_S) -> None:
        self.link = traffic.join()
        self.got_it = threading.Event()
        self.let_go = threading.Event()
        turn = self.link.sending if direction is Direction.SEND else self.link.receiving
        self.done = in_thread(self._hold, turn(nothing, nothing, nothing, timeout_s))

    def _hold(self, turn: contextlib.AbstractContextManager[None]) -> None:
        with turn:
            self.got_it.set()
            assert self.let_go.wait(LONG_S)

    @property
    def waits(self) -> bool:
        return not self.got_it.wait(0.05)


def in_thread(job: Callable[..., None], *args: object) -> Future[None]:
    done: Future[None] = Future()

    def run() -> None:
        try:
            job(*args)
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def end(*holders: Holder) -> None:
    for holder in holders:
        holder.let_go.set()
        holder.done.result(LONG_S)


@pytest.mark.parametrize("direction", list(Direction))
def test_turns_come_in_the_order_in_which_they_were_asked_for(direction: Direction) -> None:
    traffic = DeviceTurns()
    holders = []
    for _ in range(4):
        holders.append(Holder(traffic, direction))
        assert holders[-1].waits == (len(holders) > 1)
    for first, second in zip(holders, [*holders[1:], None], strict=True):
        assert second is None or second.waits
        end(first)
        assert second is None or second.got_it.wait(LONG_S)


def test_sending_and_receiving_and_other_gpus_do_not_wait_for_each_other() -> None:
    traffic = DeviceTurns()
    holders = [Holder(traffic, Direction.SEND), Holder(traffic, Direction.RECEIVE)]
    holders.append(Holder(DeviceTurns(), Direction.SEND))
    assert all(holder.got_it.wait(LONG_S) for holder in holders)
    end(*holders)


def test_a_turn_that_does_not_come_in_time_is_a_timeout_and_is_not_kept() -> None:
    traffic = DeviceTurns()
    first = Holder(traffic, Direction.SEND)
    assert first.got_it.wait(LONG_S)
    second = Holder(traffic, Direction.SEND, timeout_s=0.2)
    assert second.waits
    third = Holder(traffic, Direction.SEND)
    with pytest.raises(TransferTimeout, match=r"sending lock for 0\.2 s"):
        second.done.result(LONG_S)
    end(first)
    assert third.got_it.wait(LONG_S)
    end(third)


def test_an_aborted_transport_gives_its_turn_back_once() -> None:
    """Leaving its turn afterwards must not end that of the next one."""
    traffic = DeviceTurns()
    aborted = Holder(traffic, Direction.RECEIVE)
    assert aborted.got_it.wait(LONG_S)
    second = Holder(traffic, Direction.RECEIVE)
    assert second.waits
    third = Holder(traffic, Direction.RECEIVE)
    assert third.waits
    aborted.link.abort()
    aborted.link.abort()
    assert second.got_it.wait(LONG_S)
    end(aborted)
    assert third.waits
    end(second)
    assert third.got_it.wait(LONG_S)
    end(third)


def test_an_aborted_transport_waits_no_longer_and_never_goes_again() -> None:
    traffic = DeviceTurns()
    first = Holder(traffic, Direction.RECEIVE)
    assert first.got_it.wait(LONG_S)
    waiting = Holder(traffic, Direction.RECEIVE)
    assert waiting.waits
    waiting.link.abort()
    with pytest.raises(TransferError, match="aborted while it waited"):
        waiting.done.result(LONG_S)
    with pytest.raises(TransferError, match="was aborted"), waiting.link.receiving(nothing, nothing, nothing, 1.0):
        pass
    end(first)


def test_a_stall_is_counted_and_ends_the_turn() -> None:
    traffic = DeviceTurns()
    stalled = Holder(traffic, Direction.SEND)
    assert stalled.got_it.wait(LONG_S)
    next_one = Holder(traffic, Direction.SEND)
    assert next_one.waits
    stalled.link.stall()
    assert next_one.got_it.wait(LONG_S)
    assert traffic.num_stalled == 1
    end(stalled, next_one)


def test_nobody_has_a_turn_while_waiting_for_the_other_side_to_be_ready() -> None:
    """A sender that does not come, or a receiver without a slot, costs nobody else a turn."""
    traffic = DeviceTurns()
    never = threading.Event()
    asked = [threading.Event() for _ in range(3)]

    def hear(number: int) -> None:
        asked[number].set()
        never.wait(LONG_S)

    def hear_a_word(_: float) -> str:
        hear(2)
        return "next"

    def enter(turn: contextlib.AbstractContextManager[None]) -> None:
        with turn:
            pass

    done = [
        in_thread(enter, traffic.join().sending(nothing, lambda: hear(0), nothing, LONG_S)),
        in_thread(enter, traffic.join().receiving(lambda: hear(1), nothing, nothing, LONG_S)),
        in_thread(enter, traffic.join().opening(False, Words(lambda _: None, hear_a_word), LONG)),
    ]
    assert all(event.wait(LONG_S) for event in asked)
    others = [Holder(traffic, direction) for direction in Direction]
    assert all(other.got_it.wait(LONG_S) for other in others)
    end(*others)
    never.set()
    for job in done:
        job.result(LONG_S)


def test_an_opening_waits_for_what_is_on_the_gpu_and_lets_nothing_new_begin() -> None:
    traffic = DeviceTurns()
    before = [Holder(traffic, direction) for direction in Direction]
    assert all(holder.got_it.wait(LONG_S) for holder in before)
    opened, let_go = threading.Event(), threading.Event()

    def open_pair() -> None:
        with traffic.join().opening(True, AGREED, LONG):
            opened.set()
            assert let_go.wait(LONG_S)

    opening = in_thread(open_pair)
    assert not opened.wait(0.05)
    sending = Holder(traffic, Direction.SEND)
    assert sending.waits
    end(before[1])
    assert not opened.wait(0.05), "a send is still on the GPU"
    receiving = Holder(traffic, Direction.RECEIVE)
    assert receiving.got_it.wait(LONG_S), "nothing is kept for an opening that still waits"
    end(before[0])
    assert not opened.wait(0.05), "a receive is still on the GPU"
    later = Holder(traffic, Direction.RECEIVE)
    assert later.waits
    end(receiving)
    assert opened.wait(LONG_S)
    assert later.waits
    assert sending.waits
    let_go.set()
    opening.result(LONG_S)
    assert later.got_it.wait(LONG_S)
    assert sending.got_it.wait(LONG_S)
    end(later, sending)


@pytest.mark.parametrize("direction", list(Direction))
def test_a_transfer_does_not_count_the_time_of_an_opening_and_reports_that_it_is_held_up(direction: Direction) -> None:
    """Until it has reported so many times, more time has passed than its limit is."""
    traffic = DeviceTurns()
    opened, let_go, transfer = threading.Event(), threading.Event(), traffic.join()
    num_reports = 0

    def open_pair() -> None:
        with traffic.join().opening(True, AGREED, LONG):
            opened.set()
            assert let_go.wait(LONG_S)

    def held_up() -> None:
        nonlocal num_reports
        num_reports += 1
        if num_reports == 20:
            let_go.set()

    opening = in_thread(open_pair)
    assert opened.wait(LONG_S)
    turn = transfer.sending if direction is Direction.SEND else transfer.receiving
    with turn(nothing, nothing, held_up, 0.1):
        opening.result(LONG_S)
    assert num_reports >= 20


def test_an_opening_whose_peer_does_not_answer_gives_its_turns_back_and_tries_again() -> None:
    traffic = DeviceTurns()
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def hear(limit_s: float) -> str:
        try:
            return answers.get(timeout=limit_s)
        except queue.Empty:
            raise TransferTimeout("nothing was heard") from None

    def open_pair() -> None:
        with traffic.join().opening(True, Words(said.put, hear), OpeningLimits(LONG_S, 0.2)):
            pass

    def say(*words: str) -> None:
        for word in words:
            assert said.get(timeout=LONG_S) == "next"
            answers.put(word)

    opening = in_thread(open_pair)
    say("next")
    assert said.get(timeout=LONG_S) == "next", "it has both turns, and its peer is silent"
    transfers = [Holder(traffic, direction) for direction in Direction]
    assert all(transfer.got_it.wait(LONG_S) for transfer in transfers)
    answers.put("next")
    assert said.get(timeout=LONG_S) == "back", "its peer, which has its own by now, must not wait for it"
    end(*transfers)
    say("back", "next", "next")
    assert said.get(timeout=LONG_S) == "next"
    opening.result(LONG_S)


def test_an_opening_that_is_second_waits_for_its_turns_briefly_and_without_one() -> None:
    traffic = DeviceTurns()
    sending = Holder(traffic, Direction.SEND)
    assert sending.got_it.wait(LONG_S)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    heard = ["next", "next", "next", "next"]

    def open_pair() -> None:
        words = Words(said.put, lambda _: heard.pop())
        with traffic.join().opening(False, words, OpeningLimits(LONG_S, 0.2)):
            pass

    opening = in_thread(open_pair)
    assert said.get(timeout=LONG_S) == "back", "a send is on the GPU"
    end(sending)
    opening.result(LONG_S)
    assert [said.get(timeout=LONG_S) for _ in range(2)] == ["next", "next"]
    assert heard == []


@dataclass
class Gpu:
    """One process with one GPU; counts what is on it."""

    traffic: DeviceTurns = field(default_factory=DeviceTurns)
    lock: threading.Lock = field(default_factory=threading.Lock)
    on_it: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))

    @contextlib.contextmanager
    def busy(self, *directions: Direction) -> Iterator[None]:
        with self.lock:
            for direction in directions:
                assert self.on_it[direction] == 0, f"two at a time in the {direction.value} direction"
                self.on_it[direction] += 1
        yield
        with self.lock:
            for direction in directions:
                self.on_it[direction] -= 1


class FakeLink:
    """A pair between two GPUs, a thread at either end. A transfer moves when both halves are there, as on NCCL."""

    def __init__(self, source: Gpu, target: Gpu, timeout_s: float = LONG_S) -> None:
        self.source, self.target = source, target
        self.sender, self.receiver = source.traffic.join(), target.traffic.join()
        self._to_sender: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._to_receiver: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._bytes = threading.Barrier(2)
        self._timeout_s = timeout_s

    def run_sender(self, num_openings: int, num_chunks: int) -> None:
        words = self._words(self._to_receiver, self._to_sender)
        for _ in range(num_openings):
            self._open(self.sender, self.source, self.source.traffic.id < self.target.traffic.id, words)
            for _ in range(num_chunks):
                with self.sender.sending(*self._signals(words), self._timeout_s), self.source.busy(Direction.SEND):
                    self._bytes.wait(self._timeout_s)

    def run_receiver(self, num_openings: int, num_chunks: int) -> None:
        words = self._words(self._to_sender, self._to_receiver)
        tell, hear, held_up = self._signals(words)
        for _ in range(num_openings):
            self._open(self.receiver, self.target, self.target.traffic.id < self.source.traffic.id, words)
            for _ in range(num_chunks):
                with (
                    self.receiver.receiving(hear, tell, held_up, self._timeout_s),
                    self.target.busy(Direction.RECEIVE),
                ):
                    self._bytes.wait(self._timeout_s)

    def _open(self, turns: TransportTurns, gpu: Gpu, first: bool, words: Words) -> None:
        limits = OpeningLimits(self._timeout_s, self._timeout_s)
        with turns.opening(first, words, limits), gpu.busy(*Direction):
            self._bytes.wait(self._timeout_s)

    def _signals(self, words: Words) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
        """The signal of a transfer, the wait for the peer's, and what an opening that holds it up makes it say."""

        def hear() -> None:
            while words.hear(self._timeout_s) == "later":
                pass

        return lambda: words.say("now"), hear, lambda: words.say("later")

    @staticmethod
    def _words(outgoing: queue.SimpleQueue[str], incoming: queue.SimpleQueue[str]) -> Words:
        def hear(limit_s: float) -> str:
            try:
                return incoming.get(timeout=limit_s)
            except queue.Empty:
                raise TransferTimeout("nothing was heard") from None

        return Words(outgoing.put, hear)


def run_all(links: list[FakeLink], num_openings: int, num_chunks: int) -> None:
    with ThreadPoolExecutor(2 * len(links)) as lanes:
        ends = [
            lanes.submit(run, num_openings, num_chunks)
            for link in links
            for run in (link.run_sender, link.run_receiver)
        ]
        for done in ends:
            done.result(2 * LONG_S)


def test_senders_and_receivers_that_all_need_each_other_do_not_wait_in_a_circle() -> None:
    """Two senders and two receivers, every pair of them, and some the other way round; every chunk crosses."""
    a, b, c, d = (Gpu() for _ in range(4))
    ends = [(a, c), (a, d), (b, c), (b, d), (c, a), (d, a), (d, b), (a, b), (b, a)]
    run_all([FakeLink(source, target) for source, target in ends], num_openings=1, num_chunks=40)


def test_pairs_are_opened_in_rings_while_others_transfer() -> None:
    """Every GPU opens pairs with its two neighbours, each of which has other pairs to open and chunks on the way."""
    gpus = [Gpu() for _ in range(4)]
    ring = [(gpu, gpus[number - 1]) for number, gpu in enumerate(gpus)]
    links = [FakeLink(*ends) for ends in ring] + [FakeLink(target, source) for source, target in ring]
    run_all(links, num_openings=15, num_chunks=2)


def test_a_receive_whose_sender_has_died_holds_up_the_others_until_it_is_given_up_and_no_longer() -> None:
    gpu = Gpu()
    bereft = Holder(gpu.traffic, Direction.RECEIVE)
    assert bereft.got_it.wait(LONG_S)
    others = in_thread(run_all, [FakeLink(Gpu(), gpu), FakeLink(gpu, Gpu())], 1, 5)
    with pytest.raises(TimeoutError):
        others.result(0.1)
    bereft.link.stall()
    others.result(LONG_S)
    end(bereft)

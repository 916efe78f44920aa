"""Router replicas: one dies in the middle of many streams, and each goes on elsewhere, byte for byte."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import pytest

from baton import wire
from baton.api import GenerateRequest, Text, TokenIds
from baton.blocks import cache_seed, content_id
from baton.cluster import Role
from baton.config import RouterConfig, TransferConfig
from baton.sampling import FinishReason
from deploy.operator.client import Client
from kvstore.index import RedisConnection, Seal
from kvstore.leases import RecordEnd, RecordEntry, RecordKey, RecordPart, RedisRecords
from router.admission.tenants import DEFAULT_TENANT
from router.answer.writer import REPLAY_TOKENS
from router.request.resume import digest_of
from tests.chaos.asks import MANY_BYTES, expected, greedy, of_split_character, seeded
from tests.chaos.fleet import Fleet, RouterProcess, running_fleet
from tests.support.asking import prompt_of
from tests.support.builders import sequence_spec
from tests.support.listener import REQUEST_IDS, Listener
from tests.support.waiting import wait_until

pytestmark = pytest.mark.first

ROUTER = RouterConfig(mode="auto", cache_secret="shared", max_in_flight=2048)
TRANSFER = TransferConfig(op_timeout_s=3.0, ping_s=0.5)
STEP_MS = 4.0
LEASE_S = 15.0
"""No worker dies here, and none shall count as gone on a machine that stands still for some seconds."""


def unseeded(prompt: list[int], num_tokens: int, n: int = 1) -> GenerateRequest:
    request = seeded(prompt, num_tokens, 0, n)
    return replace(request, sampling={name: value for name, value in request.sampling.items() if name != "seed"})


def stopped_by(request: GenerateRequest, text: str, begin: float, num_characters: int) -> GenerateRequest:
    """With a stop string of several tokens."""
    at = int(begin * len(text))
    return replace(request, sampling={**request.sampling, "stop": (text[at : at + num_characters], "\0nowhere")})


KILLING = {
    "test_a_killed_router_loses_no_stream",
    "test_what_a_router_noted_is_what_another_goes_on_from",
    "test_a_client_of_ours_does_not_notice",
}


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A router for each test that kills one, the first that is alive, and two that stay."""
    num_killed = sum(getattr(item, "originalname", "") in KILLING for item in request.session.items)
    settings: dict[str, Any] = {"num_routers": num_killed + 2, "step_ms": STEP_MS, "lease_s": LEASE_S}
    with running_fleet(TRANSFER, ROUTER, **settings) as fleet:
        fleet.wait_for(*(fleet.add(role) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)))
        yield fleet


def alive(fleet: Fleet) -> list[RouterProcess]:
    return [router for router in fleet.routers if router.process.poll() is None]


def kill(router: RouterProcess) -> None:
    router.process.kill()
    router.process.wait(60)


def requests_of_every_kind(fleet: Fleet) -> list[GenerateRequest]:
    text = Listener(seeded(prompt_of(3, 30), 150, 5)).listen(fleet.routers[-1]).choices[0].text
    kinds = [
        greedy(prompt_of(1, 200), 150),
        of_split_character(150),
        seeded(prompt_of(2, 30), 150, 11, n=3),
        unseeded(prompt_of(4, 30), 150),
        unseeded(prompt_of(5, 500), 120, n=2),
        replace(unseeded([1], 150), prompt=Text(MANY_BYTES)),
        stopped_by(seeded(prompt_of(3, 30), 150, 5), text, 0.9, 12),
        greedy(prompt_of(6, 40), 8),
    ]
    return [replace(kind, request_id=next(REQUEST_IDS)) for kind in kinds * 2]


@pytest.mark.parametrize(
    "has_redis",
    [pytest.param(True, id="with a record"), pytest.param(False, id="without Redis", marks=pytest.mark.chaos)],
)
def test_a_killed_router_loses_no_stream(fleet: Fleet, has_redis: bool) -> None:
    requests = requests_of_every_kind(fleet)
    victim, survivor = alive(fleet)[0], fleet.routers[-1]
    with ThreadPoolExecutor(len(requests)) as pool:
        undisturbed = list(pool.map(lambda request: Listener(request).listen(survivor), requests))
        listeners = [Listener(request) for request in requests]
        begun = threading.Semaphore(0)

        def heard() -> bool:
            begun.release()
            return False

        def listen(listener: Listener) -> Listener:
            try:
                return listener.listen(victim, heard)
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            return listener.listen(survivor)

        if not has_redis:
            fleet.redis.kill()
        listening = [pool.submit(listen, listener) for listener in listeners]
        for _ in range(25 * len(requests)):
            assert begun.acquire(timeout=60)
        kill(victim)
        for task in listening:
            task.result()
    if not has_redis:
        fleet.redis.start()
    for listener, whole in zip(listeners, undisturbed, strict=True):
        listener.same_as(whole)
    assert sum(listener.num_streams == 2 for listener in listeners) > len(listeners) / 2
    for request, whole in zip(requests, undisturbed, strict=True):
        if isinstance(request.prompt, TokenIds) and "seed" in request.sampling and "stop" not in request.sampling:
            assert [heard.token_ids for heard in whole.choices] == expected(request)
    drawn = [
        heard.token_ids
        for request, whole in zip(requests, undisturbed, strict=True)
        if request.sampling["temperature"] and "seed" not in request.sampling
        for heard in whole.choices
    ]
    assert len(set(drawn)) == len(drawn) == 8, "without a seed, every id and every choice has draws of its own"


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_it_goes_on_from_every_token(fleet: Fleet, is_elsewhere: bool) -> None:
    """A client hangs up after each token, and asks the same router at once, or one that has never heard of it."""
    request, whole = stopped_request(fleet)
    first, second = fleet.routers[-2:]
    for count in range(whole.num_tokens + 1):
        listener = Listener(request)
        if count:
            listener.listen(first, lambda: listener.num_tokens >= count)  # noqa: B023
        listener.num_streams = 1  # with no token too, it says that it continues
        listener.listen(second if is_elsewhere else first)
        listener.same_as(whole)


@pytest.mark.chaos
def test_it_goes_on_from_every_token_whatever_was_noted(fleet: Fleet) -> None:
    """What the dead router has noted is behind what the client has, or ahead of it, or all there is."""
    request, whole = stopped_request(fleet)
    tokens = whole.choices[0].token_ids
    after = (7, 8, 9)  # the engine's, which the stop string cuts off
    counts = itertools.product(range(len(tokens) + 1), (0, 1, 5, len(tokens) - 1, len(tokens), len(tokens) + 3))
    for num_heard, num_noted in counts:
        noted = (*tokens, *after)[:num_noted]
        listener = Listener(replace(request, request_id=next(REQUEST_IDS)))
        if num_heard:
            listener.listen(fleet.routers[-2], lambda: listener.num_tokens >= num_heard)  # noqa: B023
        note(fleet, listener.request, noted)
        listener.num_streams = 1
        timing = listener.listen(fleet.routers[-1]).timing
        listener.same_as(whole)
        assert timing is not None
        assert bool(timing.decode_worker) == (num_noted < len(tokens)), "a worker was asked for what is known"


def stopped_request(fleet: Fleet) -> tuple[GenerateRequest, Listener]:
    """Begins with a character of two tokens, ends with a stop string of several; and its whole answer."""
    request = of_split_character(40)
    sampling = {**request.sampling, "top_k": 0, "top_p": 1.0, "seed": 5}  # all set: the model has defaults
    request = replace(request, sampling=sampling)
    text = Listener(request).listen(fleet.routers[-1]).choices[0].text
    request = stopped_by(request, text, 0.4, 8)
    whole = Listener(request).listen(fleet.routers[-1])
    assert whole.choices[0].finish_reason is FinishReason.STOP
    assert 8 < whole.num_tokens < 35
    return replace(request, request_id=next(REQUEST_IDS)), whole


def digest_in(fleet: Fleet, request: GenerateRequest) -> bytes:
    """The digest under which routers of this fleet note the request."""
    assert isinstance(request.prompt, TokenIds)
    sampling = request.sampling
    spec = sequence_spec(
        request.prompt.ids,
        max_tokens=sampling["max_tokens"],
        temperature=sampling["temperature"],
        top_k=sampling["top_k"],
        top_p=sampling["top_p"],
        seed=sampling["seed"],
        ignore_eos=True,
        cache_seed=cache_seed(
            content_id(fleet.config.model.revision), ROUTER.cache_secret.encode(), DEFAULT_TENANT.scope
        ),
    )
    return digest_of(content_id(fleet.config.model.revision), spec)


def record_key(request: GenerateRequest) -> RecordKey:
    return RecordKey(DEFAULT_TENANT.id, request.request_id)


T = TypeVar("T")


def with_records(fleet: Fleet, work: Callable[[RedisRecords], Coroutine[None, None, T]]) -> T:
    """Does something with the records that routers share."""

    async def run() -> T:
        seal = Seal(ROUTER.cache_secret)
        records = RedisRecords(RedisConnection(fleet.redis.url), content_id(fleet.config.model.revision), seal=seal)
        try:
            return await work(records)
        finally:
            await records.close()

    return asyncio.run(run())


def note(fleet: Fleet, request: GenerateRequest, token_ids: tuple[int, ...]) -> None:
    """As a router that has died since."""
    entry = RecordEntry(
        record_key(request),
        digest_in(fleet, request),
        b"the dead",
        [RecordPart(choice_index=0, start=0, token_ids=token_ids)] if token_ids else [],
    )
    with_records(
        fleet, lambda records: records.write([entry] if entry.parts else [], [RecordEnd(entry.key, entry.digest)])
    )


def num_noted(fleet: Fleet, request: GenerateRequest) -> int:
    """Tokens of the request's choices that stand in Redis."""
    noted = with_records(fleet, lambda records: records.read(record_key(request), digest_in(fleet, request)))
    return sum(len(choice.token_ids) for choice in noted.values())


@pytest.mark.parametrize("num_heard", [0, pytest.param(100, marks=pytest.mark.chaos)])
@pytest.mark.chaos
def test_the_same_router_goes_on_with_what_it_has(fleet: Fleet, num_heard: int) -> None:
    """The client has lost its connection, and the router has not noticed. The new stream brings at once all that the
    old one has generated, also what no record in Redis can have yet.
    """
    router = fleet.routers[-1]
    request = replace(seeded(prompt_of(8, 40), 1200, 3, n=2), request_id=next(REQUEST_IDS))
    whole = Listener(request).listen(router)
    old, new = Listener(request), Listener(request)
    ended: list[grpc.RpcError] = []

    def keep() -> bool:
        if num_heard and old.num_tokens <= num_heard:
            new.choices = [replace(heard) for heard in old.choices]
        return False

    def listen() -> None:
        try:
            old.listen(router, keep)
        except grpc.RpcError as error:
            ended.append(error)

    listening = threading.Thread(target=listen)
    listening.start()
    wait_until(lambda: old.num_tokens >= 300 or not listening.is_alive())
    new.num_streams = 1
    num_at_once: list[int] = []

    def catches_up() -> bool:
        num_at_once.append(new.num_tokens)
        return False

    new.listen(router, catches_up)
    listening.join(60)
    new.same_as(whole)
    (error,) = ended
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "has taken" in (error.details() or "")
    num_messages = next(number for number, num_tokens in enumerate(num_at_once, 1) if num_tokens >= old.num_tokens)
    assert num_messages <= sum(len(heard.token_ids) // REPLAY_TOKENS + 2 for heard in old.choices), (
        "some of it was generated again, and each token came by itself"
    )
    status = router.client.status()
    assert all(w["self_check"] == "ok" for w in status["workers"])


def test_without_resume_from_an_id_in_flight_is_refused(fleet: Fleet) -> None:
    router = fleet.routers[-1]
    listener = Listener(greedy(prompt_of(9, 20), 7000))

    def refused_too() -> bool:
        with pytest.raises(grpc.RpcError) as caught:
            Listener(listener.request).listen(router)
        assert "is in flight" in (caught.value.details() or "")
        return True

    listener.listen(router, refused_too)


@pytest.mark.parametrize(
    ("resume_from", "changes", "part_of_message"),
    [
        ({0: 1}, {"request_id": ""}, "request_id; set it to the one"),
        ({1: 0}, {}, "resume_from names choice 1, but sampling.n is 1"),
        ({0: 9}, {}, "resume_from names 9 tokens of choice 0, but an answer of this request has 0 to 8"),
        ({0: 2**32 - 1}, {"sampling": {"temperature": 0.0}}, "an answer of this request has 0 to"),
        ({0: 7}, {"sampling": {"temperature": 0.0, "max_tokens": 8, "stop_token_ids": "second"}}, "choice 0 by 5"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    fleet: Fleet, resume_from: dict[int, int], changes: dict[str, object], part_of_message: str
) -> None:
    router = fleet.routers[-1]
    request = replace(greedy(prompt_of(10, 20), 8), request_id=next(REQUEST_IDS), resume_from=resume_from)
    request = replace(request, **changes)  # type: ignore[arg-type]
    if request.sampling.get("stop_token_ids"):
        second = expected(greedy(prompt_of(10, 20), 8))[0][1]
        request = replace(request, sampling={**request.sampling, "stop_token_ids": (second,)})
    with pytest.raises(grpc.RpcError) as caught:
        list(router.inference.Generate(wire.generate_request(request), timeout=30))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert part_of_message in (caught.value.details() or "")


@pytest.mark.chaos
def test_what_a_router_noted_is_what_another_goes_on_from(fleet: Fleet) -> None:
    """A client that has lost everything hears at once what was noted before the router died."""
    victim, survivor = alive(fleet)[0], fleet.routers[-1]
    request = replace(seeded(prompt_of(11, 20), 1600, 4, n=2), request_id=next(REQUEST_IDS))
    # Under another name: what the survivor has noted may not have been forgotten yet.
    whole = Listener(replace(request, request_id=next(REQUEST_IDS))).listen(survivor)
    listener = Listener(request)

    with ThreadPoolExecutor(1) as pool:
        listening = pool.submit(listener.listen, victim)
        try:
            # However late Redis answers, the router dies when enough is noted.
            wait_until(lambda: listening.done() or num_noted(fleet, request) > 1000)
            assert not listening.done(), listening.exception()
        finally:
            kill(victim)
        assert isinstance(listening.exception(), grpc.RpcError), "it ended before the router died"
    num_messages = 0
    heard_before = listener.num_tokens
    fresh = Listener(request)
    fresh.num_streams = 1

    def hears() -> bool:
        nonlocal num_messages
        num_messages += 1
        return fresh.num_tokens > 1000

    fresh.listen(survivor, hears)
    assert num_messages < 300, "it was generated again, and each token came by itself"
    listener.listen(survivor)
    listener.same_as(whole)
    assert heard_before < listener.num_tokens


def test_a_client_of_ours_does_not_notice(fleet: Fleet) -> None:
    """Several addresses: the first router dies under it, the second stops; the third brings it to its end."""
    survivor = fleet.routers[-1]
    request = replace(seeded(prompt_of(12, 20), 400, 4, n=2), request_id=next(REQUEST_IDS))
    whole = Listener(replace(request, request_id=next(REQUEST_IDS))).listen(survivor)
    victims = alive(fleet)[:1]
    client = Client(",".join(["127.0.0.1:1", *(router.grpc for router in [*victims, survivor])]))
    heard = Listener(request)
    for chunk in client.generate(request):
        choice = heard.choices[chunk.choice_index]
        assert choice.finish_reason is None
        choice.token_ids += chunk.token_ids
        choice.text += chunk.text
        choice.finish_reason = chunk.finish_reason
        heard.num_completion_tokens = chunk.usage.completion_tokens if chunk.usage else None
        if victims and heard.num_tokens > 200:
            kill(victims.pop())
    client.close()
    heard.same_as(whole)


@pytest.mark.chaos
def test_routers_behind_one_address_stop_and_die_one_after_the_other() -> None:
    """One stops as an operator asks it to and then breaks off, one is killed: clients hear unbroken streams."""
    num_clients = 12
    with running_fleet(TRANSFER, ROUTER, num_routers=3, step_ms=STEP_MS, shares_address=True) as fleet:
        fleet.wait_for(*(fleet.add(role) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)))
        assert len({router.grpc for router in fleet.routers}) == 1
        requests = [seeded(prompt_of(100 + i, 20), 1600, i) for i in range(num_clients)]
        begun = threading.Semaphore(0)
        failures: list[str] = []
        answers: dict[int, tuple[int, ...]] = {}

        def listen(index: int) -> None:
            client = Client(fleet.routers[-1].grpc)
            tokens: tuple[int, ...] = ()
            try:
                for chunk in client.generate(requests[index]):
                    tokens += chunk.token_ids
                    begun.release()
            except Exception as error:  # whatever a client may see is a failure
                failures.append(f"{type(error).__name__}: {error}")
            finally:
                client.close()
            answers[index] = tokens

        threads = [threading.Thread(target=listen, args=(index,)) for index in range(num_clients)]
        for thread in threads:
            thread.start()
        for _ in range(30 * num_clients):
            assert begun.acquire(timeout=60)
        stopping, victim, _ = fleet.routers
        stopping.process.send_signal(signal.SIGTERM)
        stopping.process.wait(30)
        kill(victim)
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert failures == []
        for index, request in enumerate(requests):
            assert answers[index] == expected(request)[0]


def test_met_and_missed_are_counted(fleet: Fleet) -> None:
    router = fleet.routers[-1]

    def counts() -> tuple[int, int, int]:
        (me,) = [r for r in router.client.status()["routers"] if r["grpc"] == router.grpc]
        return me["met"], me["missed"], me["rejected"]

    def num_recorded() -> int:
        """What the router has recorded so far, as it says itself; clients that left are in neither count."""
        samples = [(name, value) for name, value in router.metrics() if name.startswith("baton_requests_slo_total")]
        return sum(int(value) for name, value in samples if 'outcome="cancelled"' not in name)

    # A router reads its own entry back from Redis.
    wait_until(lambda: sum(counts()) == num_recorded(), seen=lambda: (counts(), num_recorded()))
    before = counts()
    Listener(replace(greedy(prompt_of(13, 20), 5), itl_ms=600_000)).listen(router)
    Listener(replace(greedy(prompt_of(14, 20), 5), itl_ms=0.001)).listen(router)
    Listener(greedy(prompt_of(15, 20), 7000)).listen(router, lambda: True)
    Listener(greedy(prompt_of(16, 20), 5)).listen(router)  # counted after the one that hung up
    wait_until(lambda: sum(counts()) >= sum(before) + 3, seen=lambda: (before, counts()))
    assert [now - was for now, was in zip(counts(), before, strict=True)] == [2, 1, 0]

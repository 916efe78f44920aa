"""Requests of a model that sleeps: who is held, who is refused, who wakes it, and in which order they go on."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api import Chat, Text, TokenIds
from baton.chat import ChatMessage
from baton.cluster import Role
from baton.config import RouterConfig
from baton.errors import InvalidRequest, ModelWaking, NoController, NoWorker, RouterStopping, error_of
from baton.tasks import cancel_and_wait
from router.admission import Limiter
from router.admission.tenants import DEFAULT_TENANT, Tenant
from router.placement.pool_view import PoolView
from router.serve import HeldRequests, Holding, Waker, prompt_bytes
from router.serve.holding import BATCH
from router.serve.waking import USUAL_WAKE_S
from tests.support import builders
from tests.support.waiting import until
from tests.unit.router.placement.test_pool_view import Clock

A, B = Tenant(id="a"), Tenant(id="b")
CONFIG = RouterConfig(wake_wait_s=20.0, worker_wait_s=5.0)


class Model:
    """A model that sleeps, as one router sees it, and its held requests. A served request holds its slot until `done`.

    Attributes:
        wakes: when its controller was asked.
        failure: what the controller answers; None: it wakes the model.
        served: ids of the requests that went on, in order.
    """

    def __init__(self, config: RouterConfig = CONFIG, held: HeldRequests | None = None, num_slots: int = 512) -> None:
        self.clock = Clock()
        self.pools = PoolView(lambda keys: {}, self.clock)
        self.held = held or HeldRequests(config, Limiter(num_slots))
        self.limiter = self.held.limiter
        self.wakes: list[float] = []
        self.failure: Exception | None = None
        self.waker = Waker(self.pools, self._wake, config, self.clock)
        self.holding = Holding(pools=self.pools, held=self.held, waker=self.waker, config=config, clock=self.clock)
        self.served: list[str] = []
        self.done = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []
        self.pools.note_sleep(is_asleep=True, num_desired=0, problem="")

    async def _wake(self) -> None:
        self.wakes.append(self.clock.now)
        if self.failure is not None:
            raise self.failure

    async def serve(
        self, request_id: str, tenant: Tenant = DEFAULT_TENANT, *, priority: int = 0, num: int = 1, num_bytes: int = 10
    ) -> None:
        """Serve one request, from its arrival to its end."""
        claim = builders.claim(tenant=tenant, priority=priority, arrived_s=self.clock.now)
        release = await self.holding.until_awake(request_id, num, claim, num_bytes)
        assert release.claim.was_held
        assert release.event.at_s == release.claim.arrived_s == self.clock.now
        with release.slot:
            self.served.append(request_id)
            await self.done.wait()

    def ask(
        self, request_id: str, tenant: Tenant = DEFAULT_TENANT, *, priority: int = 0, num: int = 1, num_bytes: int = 10
    ) -> asyncio.Task[None]:
        """Have a request arrive."""
        served = self.serve(request_id, tenant, priority=priority, num=num, num_bytes=num_bytes)
        self.tasks.append(asyncio.create_task(served))
        return self.tasks[-1]

    async def poll(self, after_s: float = 0.0, *, is_awake: bool = False) -> None:
        """The registry reads the leases."""
        self.clock.now += after_s
        await self.pools.update([builders.worker("d0", Role.DECODE)] if is_awake else [])
        await settled()

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.holding.num_held, self.held.num_held, self.held.num_bytes, self.limiter.num_in_flight


@asynccontextmanager
async def asleep(
    config: RouterConfig = CONFIG, *, held: HeldRequests | None = None, num_slots: int = 512
) -> AsyncIterator[Model]:
    """A model that sleeps, for 20 s at most."""
    model = Model(config, held, num_slots)
    try:
        async with asyncio.timeout(20):
            yield model
    finally:
        await cancel_and_wait(model.tasks)
        await model.waker.close()


async def settled() -> None:
    """Let every task run until it waits for something else."""
    for _ in range(10):
        await asyncio.sleep(0)


# -- release -----------------------------------------------------------------------------------------------------------


async def test_two_hundred_held_requests_go_on_when_the_model_wakes() -> None:
    """In the order of their priority, then of their arrival."""
    async with asleep() as model:
        for number in range(200):
            model.ask(f"{number}", priority=-(number % 3))
        await settled()
        assert model.counts == (200, 200, 2000, 0)
        assert not model.served
        await model.poll(is_awake=True)
        await until(lambda: len(model.served) == 200)
        assert model.served == sorted(map(str, range(200)), key=lambda each: (int(each) % 3, int(each)))
        assert model.counts == (0, 0, 0, 200)
        model.done.set()
        await asyncio.gather(*model.tasks)
        assert model.counts == (0, 0, 0, 0)


async def test_more_requests_than_the_router_may_serve_at_a_time_all_go_on() -> None:
    """As slots become free. Requests that arrive meanwhile do not take them."""
    async with asleep(num_slots=3) as model:
        for number in range(50):
            model.ask(f"{number}")
        await settled()
        await model.poll(is_awake=True)
        assert (model.served, model.limiter.num_in_flight) == (["0", "1", "2"], 3)
        model.done.set()
        await asyncio.gather(*model.tasks)
        assert model.served == [str(number) for number in range(50)]
        assert model.counts == (0, 0, 0, 0)
        assert not model.limiter.is_crowded, "nobody was refused"


async def test_a_request_that_needs_several_slots_is_not_overtaken_by_its_tenants_smaller_ones() -> None:
    async with asleep(num_slots=3) as model:
        for number, num in enumerate((1, 3, 1)):
            model.ask(f"{number}", num=num)
        await settled()
        await model.poll(is_awake=True)
        assert model.served == ["0"]
        model.done.set()
        await asyncio.gather(*model.tasks)
        assert model.served == ["0", "1", "2"]


async def test_a_tenant_that_has_its_share_does_not_keep_others_from_their_slots() -> None:
    async with asleep(num_slots=10) as model:
        for number in range(12):
            model.ask(f"a{number}", A)
        model.ask("b", B)
        await settled()
        with model.limiter.slot("other", 1, Tenant(id="c")):
            await model.poll(is_awake=True)
            assert "b" in model.served
            assert 5 <= len(model.served) <= 9


async def test_held_requests_are_released_in_batches() -> None:
    """So that other tasks run in between."""
    async with asleep() as model:
        for number in range(BATCH * 3):
            model.ask(f"{number}")
        await settled()
        await model.pools.update([builders.worker("d0", Role.DECODE)])
        numbers = [model.limiter.num_in_flight]
        while numbers[-1] < BATCH * 3:
            await asyncio.sleep(0)
            numbers.append(model.limiter.num_in_flight)
        assert {after - before for before, after in itertools.pairwise(numbers)} <= {0, BATCH}


async def test_a_released_request_counts_its_objective_from_its_release() -> None:
    async with asleep() as model:
        claim = builders.claim(arrived_s=model.clock.now)
        waiting = asyncio.create_task(model.holding.until_awake("r", 2, claim, 10))
        await settled()
        await model.poll(41.5, is_awake=True)
        release = await waiting
        assert (release.claim.arrived_s, release.claim.was_held) == (model.clock.now, True)
        assert (release.event.at_s, release.event.held_s) == (model.clock.now, 41.5)
        assert model.limiter.num_in_flight == 2, "its slots are its own from its release on"
        with release.slot:
            assert model.limiter.num_in_flight == 2
        assert model.limiter.num_in_flight == 0


async def test_of_two_held_requests_with_one_id_the_second_is_refused_when_the_first_goes_on() -> None:
    async with asleep() as model:
        model.ask("same")
        second = model.ask("same")
        await settled()
        await model.poll(is_awake=True)
        with pytest.raises(InvalidRequest, match="request_id 'same' is in flight"):
            await second
        assert (model.served, model.counts) == (["same"], (0, 0, 0, 1))


async def test_more_choices_than_there_are_slots_are_refused_at_once() -> None:
    async with asleep(num_slots=4) as model:
        with pytest.raises(InvalidRequest, match=r"sampling\.n must be at most 4"):
            await model.serve("r", num=5)
        assert model.counts == (0, 0, 0, 0)
        assert not model.wakes


async def test_a_router_that_stops_holds_nothing() -> None:
    async with asleep() as model:
        requests = [model.ask("0", A), model.ask("1", B)]
        await settled()
        assert model.holding.num_held == 2
        model.holding.stop()
        for each in requests:
            with pytest.raises(RouterStopping):
                await each
        assert (model.served, model.counts) == ([], (0, 0, 0, 0))


# -- who is held -------------------------------------------------------------------------------------------------------


async def test_a_cancelled_request_frees_its_place_at_once() -> None:
    async with asleep() as model:
        first, second = model.ask("0"), model.ask("1")
        await settled()
        assert model.counts == (2, 2, 20, 0)
        await cancel_and_wait([first])
        assert model.counts == (1, 1, 10, 0)
        await model.pools.update([builders.worker("d0", Role.DECODE)])
        await asyncio.sleep(0)
        assert model.counts == (0, 0, 0, 1), "it has its slot, and has not noticed yet"
        await cancel_and_wait([second])
        assert model.counts == (0, 0, 0, 0)
        assert not model.served


async def test_a_request_beyond_the_places_is_told_to_come_back_when_the_model_is_awake() -> None:
    async with asleep(RouterConfig(max_held=2)) as model:
        model.ask("0", A)
        model.ask("1", B)
        await settled()
        model.pools.note_sleep(is_asleep=True, num_desired=1, problem="", wake_s=40.0)
        for elapsed_s, left_s in ((0.0, 40.0), (10.0, 30.0), (29.5, 1.0), (60.0, 1.0)):
            model.clock.now += elapsed_s
            with pytest.raises(ModelWaking, match="try again later") as refusal:
                await model.serve("2", B)
            assert refusal.value.retry_after_s == left_s
        assert refusal.value.http == 503
        assert isinstance(refusal.value, NoWorker)
        assert model.counts == (2, 2, 20, 0)


async def test_a_model_that_was_never_woken_is_assumed_to_wake_in_a_usual_time() -> None:
    async with asleep(RouterConfig(held_bytes=100)) as model:
        with pytest.raises(ModelWaking) as refusal:
            await model.serve("large", num_bytes=51)
        assert refusal.value.retry_after_s == USUAL_WAKE_S
        await settled()
        assert len(model.wakes) == 1, "it is woken for a request that cannot be held, too"


def test_the_time_to_come_back_crosses_processes() -> None:
    error = error_of("ModelWaking", "full", 7.0)
    assert isinstance(error, ModelWaking)
    assert error.retry_after_s == 7.0


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [(RouterConfig(max_held=4), 10), (RouterConfig(held_bytes=80), 20)],
    ids=["number", "bytes"],
)
async def test_a_tenant_has_at_most_half_of_the_places(config: RouterConfig, num_bytes: int) -> None:
    """Of all models together."""
    held = HeldRequests(config, Limiter(10))
    async with asleep(config, held=held) as model, asleep(config, held=held) as other:
        model.ask("a0", A, num_bytes=num_bytes)
        other.ask("a1", A, num_bytes=num_bytes)
        await settled()
        with pytest.raises(ModelWaking):
            await model.serve("a2", A, num_bytes=num_bytes)
        for number in range(2):
            model.ask(f"b{number}", B, num_bytes=num_bytes)
        await settled()
        assert (model.holding.num_held, other.holding.num_held, held.num_held) == (3, 1, 4)
        with pytest.raises(ModelWaking):
            await model.serve("c", Tenant(id="c"), num_bytes=num_bytes)
        await other.poll(is_awake=True)
        assert (other.served, held.num_held) == (["a1"], 3)


async def test_a_single_place_is_not_halved() -> None:
    async with asleep(RouterConfig(max_held=1)) as model:
        model.ask("0")
        await settled()
        assert model.holding.num_held == 1


def test_the_size_of_a_prompt_is_that_of_its_texts_tokens_and_images() -> None:
    assert prompt_bytes(TokenIds(tuple(range(1000)))) == 36_000
    assert prompt_bytes(Text("x" * 5000)) == sys.getsizeof("x" * 5000)
    image, tool = b"i" * 10_000, "t" * 3000
    message = ChatMessage(role="user", content="c" * 2000, parts=("c" * 2000, image))
    size = prompt_bytes(Chat(messages=(message,), documents=({"title": [tool]},)))
    assert 17_000 < size < 18_000


# -- waking ------------------------------------------------------------------------------------------------------------


async def test_the_controller_is_asked_at_once_and_then_once_a_second_however_many_wait() -> None:
    async with asleep() as model:
        for number in range(100):
            model.ask(f"{number}")
        await settled()
        assert model.wakes == [model.clock.now]
        began_s = model.clock.now
        for _ in range(20):
            await model.poll(0.25)
        assert [asked_s - began_s for asked_s in model.wakes] == [0, 1, 2, 3, 4, 5]
        await model.poll(0.5, is_awake=True)
        await model.poll(5.0, is_awake=True)
        assert len(model.wakes) == 6, "it is awake"


async def test_two_routers_ask_independently() -> None:
    """The controller wakes the model once."""
    async with asleep() as one, asleep() as other:
        one.ask("0")
        other.ask("0")
        await settled()
        assert (len(one.wakes), len(other.wakes)) == (1, 1)


async def test_nobody_is_asked_when_nobody_waits_any_more() -> None:
    async with asleep() as model:
        await cancel_and_wait([model.ask("0")])
        await settled()
        num_asked = len(model.wakes)
        await model.poll(10.0)
        assert len(model.wakes) == num_asked


async def test_a_controller_that_does_not_answer_is_not_asked_twice_at_a_time() -> None:
    async with asleep() as model:
        asked: list[float] = []

        async def wake() -> None:
            asked.append(model.clock.now)
            await asyncio.Event().wait()

        waker = Waker(model.pools, wake, CONFIG, model.clock)
        waker.ask()
        await settled()
        model.clock.now += 3.0
        waker.ask()
        await settled()
        assert len(asked) == 1
        await waker.close()
        waker.ask()
        await settled()
        assert len(asked) == 2
        await waker.close()


async def test_a_failed_wake_is_logged_once_per_kind_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async with asleep() as model:
        model.failure = NoController("the controller does not answer")
        with caplog.at_level(logging.WARNING, "router.serve.waking"):
            model.ask("0")
            await settled()
            for failure in (model.failure, OSError("broken"), model.failure, OSError("broken")):
                model.failure = failure
                await model.poll(1.0)
        assert [record.getMessage() for record in caplog.records] == [
            "the model is not woken yet: NoController: the controller does not answer",
            "the model is not woken yet: OSError: broken",
        ]
        assert len(model.wakes) == 5
        await model.poll(1.0, is_awake=True)
        assert model.served == ["0"]


@pytest.mark.parametrize(
    ("failure", "problem", "reason"),
    [
        (
            NoController("no controller is known"),
            "",
            "the router cannot ask its controller to wake it: no controller is known",
        ),
        (NoController("no controller is known"), "2 workers wait for a GPU", "2 workers wait for a GPU"),
        (None, "", "no decode worker became ready"),
    ],
)
async def test_a_model_that_does_not_wake_in_time_is_refused_with_the_reason(
    failure: Exception | None, problem: str, reason: str
) -> None:
    async with asleep(RouterConfig(wake_wait_s=0.1)) as model:
        model.failure = failure
        model.pools.note_sleep(is_asleep=True, num_desired=1, problem=problem)
        with pytest.raises(NoWorker, match=rf"was not awake within 0\.1 s: {reason}; `baton status`") as refusal:
            await model.serve("0")
        assert not isinstance(refusal.value, ModelWaking)
        assert model.counts == (0, 0, 0, 0)


async def test_a_controller_that_was_reached_later_is_not_the_reason() -> None:
    async with asleep(RouterConfig(wake_wait_s=0.3)) as model:
        model.failure = NoController("no controller is known")
        waiting = model.ask("0")
        await settled()
        model.failure = None
        await model.poll(1.0)
        with pytest.raises(NoWorker, match="no decode worker became ready"):
            await waiting


async def test_the_reason_of_an_earlier_sleep_is_forgotten() -> None:
    async with asleep(RouterConfig(wake_wait_s=0.1)) as model:
        model.failure = NoController("no controller is known")
        model.ask("0")
        await settled()
        await model.poll(2.0, is_awake=True)
        model.failure = None
        await model.poll(100.0)
        with pytest.raises(NoWorker, match="no decode worker became ready"):
            await model.serve("1")
        assert model.waker.left_s == USUAL_WAKE_S


async def test_a_request_that_waits_for_a_slot_of_a_model_that_is_awake_is_not_refused() -> None:
    """However long it was held."""
    async with asleep(RouterConfig(wake_wait_s=0.05), num_slots=1) as model:
        model.ask("0")
        model.ask("1")
        await settled()
        await model.poll(is_awake=True)
        await asyncio.sleep(0.15)
        assert (model.served, model.holding.num_held) == (["0"], 1)
        model.done.set()
        await asyncio.gather(*model.tasks)
        assert model.served == ["0", "1"]


async def test_requests_of_a_model_that_is_down_are_refused_after_a_worker_was_waited_for() -> None:
    """Its controller has stopped to announce a sleep, or its worker died at once."""
    async with asleep() as model:
        waiting = model.ask("0")
        await settled()
        model.pools.note_sleep(is_asleep=False, num_desired=1, problem="")
        await model.poll(4.9)
        assert not waiting.done()
        model.pools.note_sleep(is_asleep=True, num_desired=1, problem="")
        await model.poll(4.9)
        model.pools.note_sleep(is_asleep=False, num_desired=1, problem="")
        await model.poll(4.9)
        assert not waiting.done(), "it slept in between"
        await model.poll(0.1)
        with pytest.raises(NoWorker, match="no worker became ready within 5 s after the model's sleep ended"):
            await waiting
        assert model.counts == (0, 0, 0, 0)


async def test_a_worker_that_dies_after_the_wake_does_not_lose_the_requests_that_wait_for_slots() -> None:
    async with asleep(num_slots=1) as model:
        model.ask("0")
        model.ask("1")
        await settled()
        await model.poll(is_awake=True)
        await model.poll()
        model.done.set()
        await settled()
        assert (model.served, model.holding.num_held) == (["0"], 1), "it is not released to a model without workers"
        await model.poll(3.0, is_awake=True)
        assert model.served == ["0", "1"]


# -- whatever happens --------------------------------------------------------------------------------------------------

DEEDS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from([A, B]), st.integers(1, 3), st.integers(0, 40)),
    st.tuples(st.just("leave"), st.integers(0, 50)),
    st.tuples(st.just("poll"), st.floats(0.0, 4.0), st.booleans()),
    st.tuples(st.just("sleep"), st.booleans(), st.integers(0, 1)),
    st.tuples(st.just("end")),
    st.tuples(st.just("pause")),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(DEEDS, max_size=40))
def test_whatever_happens_places_and_slots_are_within_their_limits_and_return(deeds: list[tuple[object, ...]]) -> None:
    async def play() -> None:
        config = RouterConfig(max_held=6, held_bytes=200, worker_wait_s=5.0)
        async with asleep(config, num_slots=4) as model:
            for number, deed in enumerate(deeds):
                match deed:
                    case ("ask", Tenant() as tenant, int(num), int(num_bytes)):
                        model.ask(f"{number}", tenant, num=num, num_bytes=num_bytes)
                    case ("leave", int(index)) if model.tasks:
                        model.tasks[index % len(model.tasks)].cancel()
                    case ("poll", float(after_s), bool(is_awake)):
                        await model.poll(after_s, is_awake=is_awake)
                    case ("sleep", bool(is_asleep), int(num_desired)):
                        model.pools.note_sleep(is_asleep=is_asleep, num_desired=num_desired, problem="")
                    case ("end",):
                        model.done.set()
                        model.done = asyncio.Event()
                    case ("pause",):
                        await asyncio.sleep(0)
                assert model.holding.num_held == model.held.num_held <= 6
                assert 0 <= model.held.num_bytes <= 200
                assert 0 <= model.limiter.num_in_flight <= 4
            model.done.set()
            await model.poll(is_awake=True)
            await until(lambda: model.holding.num_held == 0)
            await settled()
            for task in model.tasks:
                assert task.done()
                assert task.cancelled() or isinstance(task.exception(), NoWorker | None)
            assert model.counts == (0, 0, 0, 0)

    asyncio.run(play())

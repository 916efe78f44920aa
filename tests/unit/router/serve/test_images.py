"""Who looks at a request's images, what is remembered of them, and to whom their bytes travel again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import pytest
from opentelemetry.context import Context

from baton import wire
from baton.cluster import Role
from baton.config import RouterConfig
from baton.errors import (
    BatonError,
    ImagesMissing,
    InvalidRequest,
    NoWorker,
    Overloaded,
    Unsupported,
    WorkerFailed,
)
from baton.messages import (
    DecodeRequest,
    Event,
    FirstToken,
    NewTokens,
    PrefillReport,
    PrefillRequest,
    SeenImage,
    SequenceSpec,
    Transferred,
)
from baton.rpc import RpcServer
from baton.sampling import FinishReason
from baton.telemetry.instruments import Instruments
from baton.v1 import worker_pb2_grpc
from kvstore.index import Mirror
from router.admission.tenants import Tenant
from router.placement import Job
from router.placement.pool_view import HintTracker, PoolView
from router.prompt import with_images
from router.serve import ImageLooker, RequestImages
from router.serve.choice import Choice, ChoiceGroup
from router.serve.driver import ChoiceDriver
from router.serve.images import MAX_HOLDERS, SeenBook, Sighting
from router.serve.worker_client import WorkerCallError, WorkerClient
from tests.support import builders
from tests.support.eyes import picture
from tests.support.waiting import until
from tests.unit.router.serve.scripted_workers import BLOCK, ticket
from worker.calls import CallServicer, max_message_bytes

CAT, DOG = picture("cat", 8), picture("dog", 8)
TENANT, OTHER = Tenant(id="a"), Tenant(id="b")
HOLE = 7


def seen_of(image: bytes) -> SeenImage:
    return SeenImage(digest=blake2b(image, digest_size=16).digest(), grid=(1, len(image)), token_ids=(HOLE,) * 40)


@dataclass
class Eyes:
    """A worker at an address of its own, that holds the images that it gets.

    Attributes:
        looked, got: images of its calls: of those that asked it to look, and of those that carried images.
        refusal: what it answers to all that it is asked to look at.
    """

    worker_id: str
    looked: list[tuple[bytes, ...]] = field(default_factory=list)
    got: list[tuple[bytes, ...]] = field(default_factory=list)
    held: set[bytes] = field(default_factory=set)
    seeds: list[bytes] = field(default_factory=list)
    """Cache seeds of the calls that asked it to look."""
    refusal: BatonError | None = None
    see: Callable[[bytes], SeenImage] = seen_of
    look_s: float = 0.0
    """How long it takes to look."""
    num_missing: int = 0
    """How often it says that it lacks an image, whatever it got."""

    async def look(self, images: Sequence[bytes], cache_seed: bytes) -> tuple[SeenImage, ...]:
        self.looked.append(tuple(images))
        self.seeds.append(cache_seed)
        await asyncio.sleep(self.look_s)
        if self.refusal is not None:
            raise self.refusal
        self.held |= {seen_of(image).digest for image in images}
        return tuple(map(self.see, images))

    def _take(self, spec: SequenceSpec, images: tuple[bytes, ...]) -> None:
        self.got.append(images)
        self.held |= {seen_of(image).digest for image in images}
        if self.num_missing or not self.held >= {image.digest for image in spec.images}:
            self.num_missing = max(0, self.num_missing - 1)
            raise ImagesMissing

    async def prefill(self, request: PrefillRequest, _: Context) -> AsyncGenerator[Event]:
        self._take(request.sequence, request.images)
        yield FirstToken(token_id=5, finish_reason=None, report=PrefillReport())
        yield Transferred(0, 0, 0.0, 0.0)

    async def decode(self, request: DecodeRequest, _: Context) -> AsyncGenerator[Event]:
        if request.await_kv:
            assert not request.images
            yield ticket(request.sequence)
        else:
            self._take(request.sequence, request.images)
        yield NewTokens(token_ids=(6,), finish_reason=FinishReason.LENGTH, report=PrefillReport())


class Bench:
    """A router's part that deals with images, and its workers."""

    def __init__(self, client: WorkerClient, config: RouterConfig) -> None:
        self.num_cached: dict[str, int] = {}
        self.pools = PoolView(lambda keys: dict(self.num_cached), lambda: 0.0)
        waker = builders.waker(self.pools, config)
        self.looker = ImageLooker(pools=self.pools, client=client, config=config, waker=waker)
        instruments = Instruments(builders.cluster_status)
        self.driver = ChoiceDriver(
            pools=self.pools,
            client=client,
            hints=HintTracker(Mirror(), instruments),
            config=config,
            instruments=instruments,
            waker=waker,
        )
        self.addresses: dict[str, str] = {}
        self.servers: dict[str, RpcServer] = {}

    async def lease(self, *eyes: Eyes, blind: Sequence[str] = (), epoch: int = 1, **more: Any) -> None:
        """These are all workers that there are: those with a p are prefill workers."""
        workers = []
        for each in eyes:
            role = Role.PREFILL if each.worker_id.startswith("p") else Role.DECODE
            info: dict[str, Any] = {"address": self.addresses[each.worker_id], "block_size": BLOCK}
            info |= {"known_fields": wire.KNOWN_FIELDS, "takes_images": each.worker_id not in blind}
            info |= {"image_placeholder": HOLE, "epoch": epoch, **more}
            workers.append(builders.worker(each.worker_id, role, **info))
        await self.pools.update(workers)

    async def look(self, *images: bytes, tenant: Tenant = TENANT) -> RequestImages:
        return await self.looker.look(images, tenant, tenant.scope.encode())

    async def answer(self, images: RequestImages, num_text: int = 32, **more: Any) -> tuple[list[int], Choice]:
        prompt = [1] * num_text + [x for _ in images.seen for x in (HOLE, 2)]
        token_ids, placed = with_images(prompt, HOLE, images.seen)
        spec = replace(builders.sequence_spec(token_ids, max_tokens=2, **more), images=placed)
        group = ChoiceGroup.begin(spec, builders.claim(), Context(), 1, {}, images=images)
        found: list[int] = []
        async with contextlib.aclosing(self.driver.run(group)) as messages:
            async for _, message in messages:
                found += message.token_ids
        return found, group.choices[0]


@contextlib.asynccontextmanager
async def bench_of(
    *eyes: Eyes, mode: str = "auto", leased: bool = True, wake_wait_s: float = 300.0
) -> AsyncIterator[Bench]:
    client = WorkerClient()
    bench = Bench(client, RouterConfig(mode=mode, worker_wait_s=0.3, wake_wait_s=wake_wait_s))
    try:
        for each in eyes:
            rpc = bench.servers[each.worker_id] = RpcServer(("baton.v1.WorkerCalls",))
            servicer = CallServicer(prefill=each.prefill, decode=each.decode, look=each.look)
            worker_pb2_grpc.add_WorkerCallsServicer_to_server(servicer, rpc.server)
            bench.addresses[each.worker_id] = f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}"
            await rpc.start()
        if leased:
            await bench.lease(*eyes)
        yield bench
    finally:
        await client.close()
        for rpc in bench.servers.values():
            await rpc.stop(0)


def workers(*names: str) -> list[Eyes]:
    return [Eyes(name) for name in names]


# -- who looks ---------------------------------------------------------------------------------------------------------


async def test_a_repeated_image_is_looked_at_once_per_cache_scope() -> None:
    p, d = workers("p", "d")
    async with bench_of(p, d) as bench:
        assert await bench.looker.placeholder() == HOLE
        for _ in range(2):
            images = await bench.look(CAT, DOG, CAT)
            assert images.seen == (seen_of(CAT), seen_of(DOG), seen_of(CAT))
        assert p.looked == [(CAT, DOG)]
        await bench.look(CAT, tenant=Tenant(id="c", cache_scope="a"))
        assert len(p.looked) == 1
        await bench.look(CAT, tenant=OTHER)
        assert p.looked == [(CAT, DOG), (CAT,)]
        assert p.seeds == [b"a", b"b"]
        assert not d.looked


async def test_prefill_workers_look_unless_there_is_none_that_can() -> None:
    p, d = workers("p", "d")
    async with bench_of(p, d, mode="aggregated") as bench:
        await bench.look(CAT)
        assert (p.looked, d.looked) == ([], [(CAT,)])
    p, d = workers("p", "d")
    async with bench_of(p, d) as bench:
        await bench.lease(p, d, blind=("p",))
        await bench.look(CAT)
        assert (p.looked, d.looked) == ([], [(CAT,)])


async def test_a_chats_turns_are_looked_at_by_one_worker_and_other_chats_by_others() -> None:
    eyes = workers("p0", "p1", "p2", "d")
    async with bench_of(*eyes) as bench:
        for number in range(24):
            first = picture(f"first {number}", 8)
            before = [len(each.looked) for each in eyes]
            await bench.look(first)
            await bench.look(first, picture(f"second {number}", 8))
            assert sorted(len(each.looked) - n for each, n in zip(eyes, before, strict=True)) == [0, 0, 0, 2]
        assert all(len(each.looked) >= 6 for each in eyes[:3])


async def test_who_is_much_busier_than_the_others_is_passed_over() -> None:
    eyes = workers("p0", "p1", "d")
    async with bench_of(*eyes) as bench:
        await bench.look(CAT)
        busy, idle = sorted(eyes[:2], key=lambda each: -len(each.looked))
        job = Job(turn=(0, False), compute_s=1000.0, num_prompt_tokens=10, num_expected_tokens=1)
        with bench.pools.computing(bench.pools.get(busy.worker_id), job):
            await bench.look(CAT, tenant=OTHER)
        assert (len(busy.looked), len(idle.looked)) == (1, 1)


async def test_when_a_worker_fails_another_one_looks() -> None:
    eyes = workers("p0", "p1", "d")
    async with bench_of(*eyes) as bench:
        await bench.look(CAT)
        first, second = sorted(eyes[:2], key=lambda each: -len(each.looked))
        first.refusal = WorkerFailed("gone")
        await bench.look(CAT, tenant=OTHER)
        assert (len(first.looked), len(second.looked)) == (2, 1)
        await bench.look(CAT, tenant=Tenant(id="c"))  # who failed is not asked again at once
        assert (len(first.looked), len(second.looked)) == (2, 2)


async def test_images_that_take_too_long_are_no_failure_of_their_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.serve.images.LOOK_TIMEOUT_S", 0.3)
    eyes = workers("p0", "p1", "d")
    for each in eyes:
        each.look_s = 30.0
    async with bench_of(*eyes) as bench:
        for _ in range(2):
            with pytest.raises(Overloaded, match="the images were not decoded in time"):
                await asyncio.wait_for(bench.look(CAT), 10.0)
        assert sorted(len(each.looked) for each in eyes) == [0, 0, 2], "no other worker is asked"
        assert all(bench.pools.is_trusted(worker) for worker in bench.pools.workers)
        monkeypatch.undo()
        for each in eyes:
            each.look_s = 0.0
        assert (await bench.look(CAT)).seen == (seen_of(CAT),)


@pytest.mark.parametrize("refusal", [Overloaded("full"), WorkerFailed("gone")])
async def test_when_all_workers_fail_the_client_gets_the_reason(refusal: BatonError) -> None:
    eyes = workers("p0", "p1", "d")
    for each in eyes:
        each.refusal = refusal
    async with bench_of(*eyes) as bench:
        with pytest.raises(type(refusal), match=str(refusal)):
            await bench.look(CAT)
        assert [len(each.looked) for each in eyes[:2]] == [1, 1]


@pytest.mark.parametrize("refusal", [InvalidRequest("it is broken"), Unsupported("no animations")])
async def test_a_refusal_reaches_the_client_and_nobody_else_is_asked(refusal: BatonError) -> None:
    eyes = workers("p0", "p1", "d")
    for each in eyes:
        each.refusal = refusal
    async with bench_of(*eyes) as bench:
        with pytest.raises(type(refusal), match=str(refusal)) as caught:
            await bench.look(CAT)
        assert caught.value.param == "messages"  # type: ignore[attr-defined]
        assert sum(len(each.looked) for each in eyes) == 1


@pytest.mark.parametrize(
    "answer",
    [
        SeenImage(digest=b"short", grid=(1,), token_ids=(1,)),
        SeenImage(digest=b"d" * 16, grid=(1, 2, 3, 4), token_ids=(1,)),
        SeenImage(digest=b"d" * 16, grid=(1,), token_ids=()),
    ],
)
async def test_an_answer_that_cannot_be_is_a_failure_of_its_worker(answer: SeenImage) -> None:
    (p,) = workers("p")
    p.see = lambda image: answer
    async with bench_of(p) as bench:
        with pytest.raises(WorkerFailed, match="no valid answer about images"):
            await bench.look(CAT)


async def test_a_worker_answers_about_images_as_long_as_a_requests_may_be_and_no_others() -> None:
    (p,) = workers("p")
    rpc = RpcServer(("baton.v1.WorkerCalls",), max_message_bytes=max_message_bytes(4096, takes_images=True))
    worker_pb2_grpc.add_WorkerCallsServicer_to_server(CallServicer(look=p.look), rpc.server)
    client, address = WorkerClient(), f"127.0.0.1:{rpc.bind('127.0.0.1', 0)}"
    await rpc.start()
    try:
        worker = builders.worker("p", address=address)
        image = picture("long", 3 * 2**20)
        assert await client.look(worker, [image], b"seed") == (seen_of(image),)
        for images in ([image, picture("more", 2**15)], [b""] * 65):
            with pytest.raises(WorkerCallError):
                await client.look(worker, images, b"seed")
        assert p.looked == [(image,)]
    finally:
        await client.close()
        await rpc.stop(0)
    assert max_message_bytes(4096) < len(image)


async def test_a_worker_without_eyes_says_so() -> None:
    with pytest.raises(Unsupported, match="this worker takes no images"):
        await CallServicer().Look(wire.look_request([CAT], b"seed"), None)  # type: ignore[arg-type]


async def test_images_of_a_model_that_sleeps_wait_until_it_is_awake() -> None:
    """Longer than for a worker of a model that is awake."""
    p, d = workers("p", "d")
    async with bench_of(p, d, leased=False) as bench:
        bench.pools.note_sleep(is_asleep=True, num_desired=0, problem="")
        placeholder = asyncio.create_task(bench.looker.placeholder())
        looked = asyncio.create_task(bench.look(CAT))
        await asyncio.sleep(0.5)
        assert not placeholder.done()
        await bench.lease(p, d)
        assert await placeholder == HOLE
        await looked
        assert p.looked == [(CAT,)]


async def test_images_of_a_model_that_does_not_wake_are_refused_with_the_reason() -> None:
    async with bench_of(*workers("p", "d"), leased=False, wake_wait_s=0.4) as bench:
        bench.pools.note_sleep(is_asleep=True, num_desired=0, problem="")
        with pytest.raises(NoWorker, match=r"was not awake within 0\.4 s: .* no controller is known"):
            await bench.look(CAT)


async def test_without_workers_that_see_a_request_is_refused_at_once_and_without_workers_after_a_while() -> None:
    p, d = workers("p", "d")
    async with bench_of(p, d, leased=False) as bench:
        with pytest.raises(NoWorker, match="no worker that takes images became ready"):
            await bench.looker.placeholder()
        await bench.lease(p, d, blind=("p", "d"))
        with pytest.raises(Unsupported, match="this model takes no images"):
            await bench.looker.placeholder()


# -- whom the bytes go to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
async def test_who_has_looked_computes_the_prompt_and_gets_no_bytes(mode: str) -> None:
    eyes = workers("p0", "p1", "p2") + workers("d0", "d1", "d2")
    async with bench_of(*eyes, mode=mode) as bench:
        for number in range(6):
            await bench.answer(await bench.look(picture(f"{number}", 8)))
        for each in eyes:
            assert each.got == [()] * len(each.looked)
        assert sum(len(each.got) for each in eyes) == 6


async def test_another_worker_gets_the_bytes_once_each() -> None:
    eyes = workers("p0", "p1", "d")
    async with bench_of(*eyes, mode="disaggregated") as bench:
        images = await bench.look(CAT, DOG, CAT)
        looked, other = sorted(eyes[:2], key=lambda each: -len(each.looked))
        await bench.lease(other, eyes[2])
        found, _ = await bench.answer(images)
        assert found == [5, 6]
        assert other.got == [(CAT, DOG)]
        await bench.answer(images)
        assert other.got == [(CAT, DOG), ()]
        assert not looked.got


async def test_images_in_the_prefix_that_a_worker_caches_are_not_sent() -> None:
    """The first image ends after 72 of the prompt's 114 tokens, the second one after 113."""
    p, d = workers("p", "d")
    async with bench_of(p, d, mode="disaggregated") as bench:
        images = await bench.look(CAT, DOG)
        for num_blocks, expected in ((4, (CAT, DOG)), (5, (DOG,))):
            for sighting in images.sightings:
                sighting.holders.clear()
            bench.num_cached["p"] = num_blocks
            await bench.answer(images)
            assert p.got[-1] == expected


async def test_a_worker_that_has_started_again_gets_the_bytes() -> None:
    p, d = workers("p", "d")
    async with bench_of(p, d, mode="disaggregated") as bench:
        images = await bench.look(CAT)
        p.held.clear()
        await bench.lease(p, d, epoch=2)
        await bench.answer(images)
        assert p.got == [(CAT,)]


async def test_a_worker_that_lacks_an_image_is_asked_again_with_all_bytes() -> None:
    p, d = workers("p", "d")
    async with bench_of(p, d, mode="disaggregated") as bench:
        images = await bench.look(CAT, DOG)
        p.held.clear()
        found, choice = await bench.answer(images)
        assert found == [5, 6]
        assert p.got == [(), (CAT, DOG)]
        assert (choice.timeline.retries, choice.machine._failures) == (0, ())
        await bench.answer(images)
        assert p.got[2:] == [()]


async def test_a_worker_that_lacks_an_image_which_it_was_believed_to_cache_gets_it() -> None:
    p, d = workers("p", "d")
    async with bench_of(p, d, mode="disaggregated") as bench:
        images = await bench.look(CAT)
        p.held.clear()
        bench.num_cached["p"] = 100
        found, _ = await bench.answer(images)
        assert (found, p.got) == ([5, 6], [(), (CAT,)])


async def test_a_worker_that_always_lacks_them_is_given_up() -> None:
    p, d = workers("p", "d")
    p.num_missing = 100
    async with bench_of(p, d, mode="disaggregated") as bench:
        with pytest.raises(ImagesMissing):
            await bench.answer(await bench.look(CAT))
        assert len(p.got) == 1 + RouterConfig().max_attempts


async def test_a_blind_worker_computes_and_decodes_no_images() -> None:
    eyes = workers("p0", "p1", "d0", "d1")
    async with bench_of(*eyes) as bench:
        await bench.lease(*eyes, blind=("p0", "d0"))
        for number in range(4):
            _, choice = await bench.answer(await bench.look(picture(f"{number}", 8)))
            assert choice.timeline.decode_worker == "d1"
            assert choice.timeline.prefill_worker in ("", "p1")


# -- what is remembered ------------------------------------------------------------------------------------------------


def sighting(num_tokens: int) -> Sighting:
    return Sighting(seen=SeenImage(digest=b"d" * 16, grid=(), token_ids=(1,) * num_tokens), look_s=0.1)


def test_a_router_remembers_so_many_images_and_tokens_and_forgets_the_least_recently_used() -> None:
    book = SeenBook(most=3, most_tokens=100)
    for name in (b"a", b"b", b"c"):
        book.add("scope", name, sighting(10))
    assert book.get("scope", b"a") is not None
    book.add("scope", b"d", sighting(10))
    assert [book.get("scope", name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert book.get("other", b"a") is None
    book.add("scope", b"e", sighting(95))
    assert len(book) == 1
    book.add("scope", b"e", sighting(5))
    book.add("scope", b"f", sighting(90))
    assert len(book) == 2


def test_a_few_holders_of_an_image_are_remembered() -> None:
    one, holders = sighting(1), [builders.worker(f"w{number}") for number in range(MAX_HOLDERS + 1)]
    for worker in holders:
        one.note(worker)
    assert [one.is_held_by(worker) for worker in holders] == [False] + [True] * MAX_HOLDERS
    one.forget(holders[-1])
    assert not one.is_held_by(holders[-1])


async def test_a_worker_keeps_no_images_of_a_call_that_goes_on() -> None:
    """Its engine has them. Nothing else of the worker's refers to them while the answer is generated."""
    p, d = workers("p", "d")
    goes_on = asyncio.Event()
    kept: list[int] = []

    async def decode(request: DecodeRequest, _: Context) -> AsyncGenerator[Event]:
        assert request.images == (CAT,)
        request = replace(request, images=())
        yield NewTokens(token_ids=(6,), finish_reason=None, report=PrefillReport())
        gc.collect()
        kept.append(sum(type(each) is DecodeRequest and bool(each.images) for each in gc.get_objects()))
        await goes_on.wait()
        yield NewTokens(token_ids=(6,), finish_reason=FinishReason.LENGTH)

    d.decode = decode  # type: ignore[method-assign]
    async with bench_of(p, d, mode="aggregated") as bench:
        images = await bench.look(CAT)
        d.held.clear()
        for each in images.sightings:
            each.holders.clear()
        answering = asyncio.create_task(bench.answer(images))
        await until(lambda: kept != [])
        goes_on.set()
        found, _ = await answering
    assert found == [6, 6]
    assert kept == [0]

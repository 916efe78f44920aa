"""The registry of adapters: one suite for memory and for every Redis, and what only Redis can do to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from baton.errors import Conflict, StoreUnavailable
from baton.messages import Adapter
from baton.registered_adapters import MAX_ADAPTERS, RegisteredAdapter
from baton.trust import Principal
from kvstore.adapters import AdapterStore, MemoryAdapters, RedisAdapters
from kvstore.adapters.codec import MAX_BYTES, decode, encode
from kvstore.adapters.redis import WHOLE_S
from kvstore.index import RedisConnection
from kvstore.index.keys import Keys

if TYPE_CHECKING:
    from tests.contract.conftest import Backend, RedisServer
    from tests.support.keys import MemberKeys

Make = Callable[[], AdapterStore]


def registered(name: str, digest: str = "ab" * 32, path: str = "/adapters/one") -> RegisteredAdapter:
    adapter = Adapter(name=name, path=path, digest=digest, rank=8)
    return RegisteredAdapter(adapter=adapter, num_bytes=4096, since_s=1_700_000_000.5)


@pytest.fixture
def new_router(request: pytest.FixtureRequest, backend: Backend, member_keys: MemberKeys) -> Make:
    """Each call returns the registry as another router sees it."""

    def make() -> AdapterStore:
        if backend.store:
            return MemoryAdapters(backend.store)
        assert backend.router
        is_signed = request.node.callspec.params["backend"] == "signed"
        return RedisAdapters(
            backend.router,
            backend.namespace,
            keys=member_keys[Principal.ROUTER] if is_signed else None,
            clock=backend.clock,
        )

    return make


async def test_each_router_sees_what_another_one_has_changed(new_router: Make) -> None:
    a, b = new_router(), new_router()
    await b.follow()
    assert dict(b.adapters) == {}
    one, two = registered("one"), registered("two", "cd" * 32)
    assert not await a.put(one)
    assert not await b.put(two)
    await a.follow()
    assert dict(a.adapters) == dict(b.adapters) == {"one": one, "two": two}
    other = registered("one", "ef" * 32)
    assert await b.put(other), "the name was known"
    assert await a.remove("two")
    assert not await a.remove("two")
    for each in (b, new_router()):  # a router that starts finds them, too
        await each.follow()
        assert dict(each.adapters) == {"one": other}


async def test_changes_at_the_same_time_all_count(new_router: Make) -> None:
    routers = [new_router() for _ in range(4)]
    await asyncio.gather(*(router.put(registered(f"adapter-{i}")) for i, router in enumerate(routers)))
    late = new_router()
    await late.follow()
    assert sorted(late.adapters) == [f"adapter-{i}" for i in range(4)]


async def test_a_copy_does_not_change_while_it_is_read(new_router: Make) -> None:
    router = new_router()
    await router.put(registered("one"))
    seen = router.adapters
    await router.put(registered("two"))
    assert list(seen) == ["one"]


async def test_there_are_not_too_many(new_router: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_ADAPTERS == 10_000
    monkeypatch.setattr("kvstore.adapters.codec.MAX_ADAPTERS", 2)
    router = new_router()
    await router.put(registered("one"))
    await router.put(registered("two"))
    assert await router.put(registered("two", "cd" * 32)), "in place of another one"
    with pytest.raises(Conflict, match="2 adapters are registered, the maximum; remove one first"):
        await router.put(registered("three"))


# -- Redis ----------------------------------------------------------------------------------------------------------


def of_redis(
    server: RedisServer,
    namespace: str,
    keys: MemberKeys | None,
    member: Principal = Principal.ROUTER,
    monotonic_s: Callable[[], float] = time.monotonic,
) -> RedisAdapters:
    backend = server.backend(namespace, keys=keys)
    assert backend.router
    own = None if keys is None else keys[member]
    return RedisAdapters(backend.router, namespace, keys=own, monotonic_s=monotonic_s)


def root(server: RedisServer, namespace: str) -> RedisConnection:
    connection = server.backend(namespace).connection
    assert connection
    return connection


@pytest.mark.parametrize("is_signed", [False, True])
async def test_a_registry_that_redis_has_lost_is_written_back(
    server: RedisServer, namespace: str, member_keys: MemberKeys, is_signed: bool
) -> None:
    keys = member_keys if is_signed else None
    router, redis = of_redis(server, namespace, keys), root(server, namespace)
    await router.put(registered("one"))
    await router.put(registered("two"))
    await router.remove("two")
    assert await redis.call("DEL", Keys(namespace).adapters)
    await router.follow()
    assert list(router.adapters) == ["one"]
    late = of_redis(server, namespace, keys)
    await late.follow()
    assert dict(late.adapters) == dict(router.adapters)


async def test_the_last_one_that_is_removed_does_not_come_back(server: RedisServer, namespace: str) -> None:
    a, b = of_redis(server, namespace, None), of_redis(server, namespace, None)
    await a.put(registered("one"))
    await b.follow()
    await a.remove("one")
    await b.follow()
    await a.follow()
    assert dict(a.adapters) == dict(b.adapters) == {}


def _others(keys: Keys, member_keys: MemberKeys, genuine: bytes) -> dict[str, list[tuple[Any, ...]]]:
    """Values that no router has written under this key, each with the commands that put it there."""
    key, two = keys.adapters, {"evil": registered("evil")}
    later = 2**50
    return {
        "unsigned": [("SET", key, encode(key, later, two, None))],
        "signed by a worker": [("SET", key, encode(key, later, two, member_keys[Principal.WORKER]))],
        "of another cluster": [("SET", key, encode("kv:{x}:adapters", later, two, member_keys[Principal.ROUTER]))],
        "altered": [("SET", key, genuine.replace(b"/adapters/one", b"/adapters/0ne"))],
        "cut": [("SET", key, genuine[:-1])],
        "short": [("SET", key, b"x")],
        "empty": [("SET", key, b"")],
        "too long": [("SET", key, genuine + bytes(MAX_BYTES))],
        "a list": [("DEL", key), ("RPUSH", key, "x")],
        "missing": [("DEL", key)],
    }


async def test_only_what_a_router_has_signed_is_served(
    server: RedisServer, namespace: str, member_keys: MemberKeys
) -> None:
    redis, keys = root(server, namespace), Keys(namespace)
    now_s = [0.0]
    router = of_redis(server, namespace, member_keys, monotonic_s=lambda: now_s[0])
    await router.put(registered("one"))
    genuine = await redis.call("GET", keys.adapters)
    for how, commands in _others(keys, member_keys, genuine).items():
        for command in commands:
            await redis.call(*command)
        late = of_redis(server, namespace, member_keys)
        await late.follow()
        assert dict(late.adapters) == {}, how
        now_s[0] += WHOLE_S  # one with the head of the genuine value is noticed by then
        await router.follow()
        assert list(router.adapters) == ["one"], how
        await late.follow()
        assert list(late.adapters) == ["one"], f"{how}: the copy of a router takes its place"
        assert await redis.call("GET", keys.adapters) == genuine, how


async def test_an_unreadable_registry_is_counted_and_can_be_replaced(
    server: RedisServer, namespace: str, member_keys: MemberKeys
) -> None:
    redis, keys = root(server, namespace), Keys(namespace)
    for command in (("SET", keys.adapters, "x"), ("DEL", keys.adapters), ("RPUSH", keys.adapters, "x")):
        await redis.call(*command)
        if command[0] == "DEL":
            continue
        router = of_redis(server, namespace, member_keys)
        await router.follow()
        (seen,) = router._connection.garbage.seen()
        assert (seen.what, seen.times) == ("adapters", 1)
        await router.put(registered("one"))
        assert list(router.adapters) == ["one"]


@pytest.mark.parametrize("few", [500, 0])
async def test_a_poll_that_meets_a_change_takes_nothing_for_garbage(
    server: RedisServer, namespace: str, member_keys: MemberKeys, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the poll is on its way while the change is written."""
    monkeypatch.setattr("kvstore.adapters.redis.FEW", few)  # large registries are decoded in a thread
    router = of_redis(server, namespace, member_keys)
    await router.put(registered("one"))
    has_asked, arrives, ask = asyncio.Event(), asyncio.Event(), router._connection.ask

    async def slow(*args: Any) -> list[Any]:
        monkeypatch.setattr(router._connection, "ask", ask)
        found = await ask(*args)
        has_asked.set()
        await arrives.wait()
        return found

    monkeypatch.setattr(router._connection, "ask", slow)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(router.follow())
        await has_asked.wait()
        writing = tasks.create_task(router.put(registered("two")))
        await asyncio.wait({writing}, timeout=0.1)  # it may as well wait for the poll
        arrives.set()
    assert sorted(router.adapters) == ["one", "two"]
    assert router._connection.garbage.seen() == ()


async def test_an_older_registry_does_not_bring_a_removed_adapter_back(
    server: RedisServer, namespace: str, member_keys: MemberKeys
) -> None:
    redis, key = root(server, namespace), Keys(namespace).adapters
    router = of_redis(server, namespace, member_keys)
    await router.put(registered("one"))
    old = await redis.call("GET", key)
    await router.put(registered("one", "cd" * 32))
    await redis.call("SET", key, old)
    await router.follow()
    assert router.adapters["one"].adapter.digest == "cd" * 32
    assert await redis.call("GET", key) != old


async def test_copies_that_differ_end_with_the_newest(
    server: RedisServer, namespace: str, member_keys: MemberKeys
) -> None:
    a, b = of_redis(server, namespace, member_keys), of_redis(server, namespace, member_keys)
    await a.put(registered("one"))
    await b.follow()
    await a.put(registered("two"))
    await root(server, namespace).call("DEL", Keys(namespace).adapters)
    await b.follow()  # writes its older copy
    await a.follow()
    await b.follow()
    assert sorted(a.adapters) == sorted(b.adapters) == ["one", "two"]


async def test_a_clock_that_was_set_back_does_not_undo_a_change(
    server: RedisServer, namespace: str, member_keys: MemberKeys
) -> None:
    backend = server.backend(namespace, keys=member_keys)
    assert backend.router
    now = [2_000_000.0]
    a, b = (
        RedisAdapters(backend.router, namespace, keys=member_keys[Principal.ROUTER], clock=clock)
        for clock in (lambda: now[0], lambda: now[0] - 3600)
    )
    await a.put(registered("one"))
    await b.put(registered("two"))
    await a.follow()
    assert sorted(a.adapters) == ["one", "two"]


async def test_the_copy_serves_while_redis_is_away(own_server: RedisServer, namespace: str) -> None:
    router = of_redis(own_server, namespace, None)
    await router.put(registered("one"))
    own_server.embedded.kill()
    with pytest.raises(StoreUnavailable):
        await router.follow()
    assert list(router.adapters) == ["one"]
    own_server.embedded.start()  # empty
    await router.follow()
    late = of_redis(own_server, namespace, None)
    await late.follow()
    assert list(late.adapters) == ["one"]


async def test_a_registry_of_a_newer_release_is_left_alone(
    server: RedisServer, namespace: str, member_keys: MemberKeys
) -> None:
    redis, key = root(server, namespace), Keys(namespace).adapters
    router = of_redis(server, namespace, member_keys)
    await router.put(registered("one"))
    newer = registered("two", path="no absolute path, which this release requires")
    value = encode(key, 2**50, {"two": newer}, member_keys[Principal.ROUTER])
    await redis.call("SET", key, value)
    await router.follow()
    await router.follow()
    assert list(router.adapters) == ["one"]
    with pytest.raises(Conflict, match="of a newer release"):
        await router.put(registered("three"))
    assert await redis.call("GET", key) == value


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "Expecting"),
        (b"{}", "no list"),
        (b"[" * 100_000, "nested|Expecting"),
        (b"[1]", "no object"),
        (b'[{"name":"a"}]', "no text"),
        (b'[{"name":"a\\u0001b","path":"/a","digest":"abababababababab","rank":1}]', "the name"),
        (b'[{"name":"a","path":"a","digest":"abababababababab","rank":1}]', "absolute"),
        (b'[{"name":"a","path":"/a","digest":"x","rank":1}]', "no digest"),
        (b'[{"name":"a","path":"/a","digest":"abababababababab","rank":0,"num_bytes":1,"since_s":1}]', "rank"),
        (b'[{"name":"a","path":"/a","digest":"abababababababab","rank":1,"num_bytes":-1,"since_s":1}]', "size"),
        (b'[{"name":"a","path":"/a","digest":"abababababababab","rank":1,"num_bytes":1,"since_s":NaN}]', "time"),
        (b'[{"name":"a","path":"/a","digest":"abababababababab","rank":1,"num_bytes":1,"since_s":1e999}]', "time"),
    ],
)
def test_what_is_no_registry_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode(body)


def test_fields_of_a_newer_release_are_skipped() -> None:
    body = b'[{"name":"a","path":"/a","digest":"abababababababab","rank":1,"num_bytes":1,"since_s":1,"more":[]}]'
    assert decode(body)["a"].adapter.path == "/a"


def test_a_registry_that_is_too_long_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.adapters.codec.MAX_BYTES", 200)
    with pytest.raises(Conflict, match="would exceed 200 bytes"):
        encode("key", 1, {"one": registered("one")}, None)

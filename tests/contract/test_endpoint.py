"""The contract of EndpointStore: the routers of an endpoint and the models that controllers announce there."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from baton.cluster import MAX_REASON, RoutedModel, RouterInfo
from baton.errors import StoreUnavailable
from kvstore.index import RedisConnection
from kvstore.index.keys import Keys, endpoint_namespace
from kvstore.index.values import MAX_LABEL, MAX_NAME_BYTES, MAX_SEQ
from kvstore.leases import MAX_MODELS, MODEL_LEASE_S, RedisEndpoint
from kvstore.leases.codec import (
    MAX_BYTES,
    MAX_INT32,
    MAX_PATH,
    ROUTER_BYTES,
    decode_info,
    decode_model,
    decode_router,
    encode,
)
from tests.contract.roles import url_of
from tests.support.builders import model_announcement, worker_info

if TYPE_CHECKING:
    from tests.contract.conftest import Backend, RedisServer

ROUTER = RouterInfo(
    id="router-0",
    pid=7,
    grpc="127.0.0.1:50051",
    http="127.0.0.1:8000",
    mirror_lag_s=0.25,
    models=(RoutedModel(content_id="a", met=3, missed=1, rejected=2, ready_workers=4, in_flight=5, held=1),),
)


def keys_of(backend: Backend) -> Keys:
    return Keys(endpoint_namespace(backend.namespace))


async def pass_time(backend: Backend, seconds: float, *keys: str) -> None:
    """Lets time pass, after which Redis has removed these keys."""
    backend.clock.now += seconds
    if backend.connection and keys:
        assert await backend.connection.call("DEL", *keys) == len(keys)


# Routers.


async def test_routers_are_listed_until_they_lapse(backend: Backend) -> None:
    second = dataclasses.replace(ROUTER, id="router-1", pid=8, models=())
    await backend.endpoint.announce_router(second)
    await backend.endpoint.announce_router(ROUTER)
    await backend.endpoint.announce_router(ROUTER)
    assert await backend.endpoint.list_routers() == [ROUTER, second]
    await pass_time(backend, 6)
    await backend.endpoint.announce_router(second)
    await pass_time(backend, 5, keys_of(backend).router("router-0"))
    assert await backend.endpoint.list_routers() == [second]


def test_a_router_has_counts_of_as_many_models_as_there_may_be() -> None:
    """All numbers at their bounds, under the longest content ids."""
    counts = dict.fromkeys(("met", "missed", "rejected"), MAX_SEQ)
    counts |= dict.fromkeys(("ready_workers", "in_flight", "held"), MAX_INT32)
    models = tuple(RoutedModel(content_id=f"{number:0{MAX_LABEL}}", **counts) for number in range(MAX_MODELS))
    router = dataclasses.replace(ROUTER, models=models)
    assert decode_router(encode(router).encode()) == router
    assert len(encode(router)) < ROUTER_BYTES
    ids = tuple(RoutedModel(content_id=f"{number:x}") for number in range(MAX_MODELS + 1))
    with pytest.raises(ValueError, match="at most 1024"):
        decode_router(encode(dataclasses.replace(ROUTER, models=ids)).encode())


async def test_the_largest_router_is_listed(backend: Backend) -> None:
    models = tuple(RoutedModel(content_id=f"{number:032x}", met=MAX_SEQ, held=1) for number in range(MAX_MODELS))
    router = dataclasses.replace(ROUTER, models=models)
    await backend.endpoint.announce_router(router)
    assert await backend.endpoint.list_routers() == [router]


@pytest.mark.parametrize(
    "models",
    [
        7,
        {"content_id": "a"},
        ["a"],
        [{}],
        [{"content_id": "a/b}"}],
        [{"content_id": "x" * 65}],
        [{"content_id": "a", "met": -1}],
        [{"content_id": "a", "held": 2**31}],
        [{"content_id": "a", "in_flight": 1.5}],
    ],
)
def test_counts_of_models_that_are_none_are_refused(models: Any) -> None:
    found = json.loads(encode(ROUTER)) | {"models": models}
    with pytest.raises(ValueError, match=r"\bno\b|content_id"):
        decode_router(json.dumps(found).encode())


def test_a_router_of_a_release_with_one_model_is_read() -> None:
    found = json.loads(encode(ROUTER))
    del found["models"]
    assert decode_router(json.dumps(found).encode()) == dataclasses.replace(ROUTER, models=())


def test_counts_of_a_later_release_are_read() -> None:
    found = json.loads(encode(ROUTER))
    found["models"][0]["woken"] = 3
    assert decode_router(json.dumps(found).encode()) == ROUTER


# Models.


async def test_models_are_listed_until_they_lapse(backend: Backend) -> None:
    chat, code = model_announcement("b" * 32, name="chat"), model_announcement("a" * 32, name="code", is_asleep=True)
    assert await backend.endpoint.list_models() == []
    await backend.endpoint.announce_model(chat)
    await backend.endpoint.announce_model(code)
    await backend.endpoint.announce_model(chat)
    assert await backend.endpoint.list_models() == [code, chat]
    await pass_time(backend, MODEL_LEASE_S - 1)
    assert await backend.endpoint.list_models() == [code, chat]
    await backend.endpoint.announce_model(chat)
    await pass_time(backend, 2, keys_of(backend).model("a" * 32))
    assert await backend.endpoint.list_models() == [chat]


async def test_the_latest_announcement_of_a_model_counts(backend: Backend) -> None:
    model = model_announcement()
    for changes in (
        {"is_asleep": True, "wake_s": 12.5},
        {"is_asleep": False, "problem": "no node has 8 GPUs"},
        {"share": 0.0, "path": "/m/π", "mode": "aggregated"},
        {"is_leaving": True},
    ):
        model = dataclasses.replace(model, **changes)
        await backend.endpoint.announce_model(model)
        assert await backend.endpoint.list_models() == [model]


async def test_two_endpoints_at_one_redis_have_models_of_their_own(server: RedisServer, namespace: str) -> None:
    one, other = server.backend(namespace).endpoint, server.backend(f"{namespace}-2").endpoint
    await one.announce_model(model_announcement())
    await one.announce_router(ROUTER)
    assert (await other.list_models(), await other.list_routers()) == ([], [])
    assert await one.boot() != await other.boot()


async def test_what_is_announced_expires(server: RedisServer, namespace: str) -> None:
    backend = server.backend(namespace)
    await backend.endpoint.announce_model(model_announcement())
    await backend.endpoint.announce_router(ROUTER)
    keys = keys_of(backend)
    assert backend.connection
    for key, life_ms in ((keys.model("c" * 32), MODEL_LEASE_S * 1000), (keys.router("router-0"), 10_000)):
        assert life_ms - 5000 < await backend.connection.call("PTTL", key) <= life_ms
    await backend.connection.call("DEL", keys.model("c" * 32), keys.router("router-0"))
    assert (await backend.endpoint.list_models(), await backend.endpoint.list_routers()) == ([], [])
    assert not await backend.connection.call("EXISTS", keys.models, keys.routers), "the sets are empty"


@pytest.mark.parametrize("part", ["router", "controller"])
async def test_routers_and_controllers_may_list_both(server: RedisServer, namespace: str, part: str) -> None:
    """As users of the chart's Redis: reading removes names without a value."""
    backend, model = server.backend(namespace), model_announcement()
    await backend.endpoint.announce_model(model)
    await backend.endpoint.announce_router(ROUTER)
    keys = keys_of(backend)
    assert backend.connection
    await backend.connection.pipeline([("SADD", each, "gone", "", "x" * 300) for each in (keys.models, keys.routers)])
    server.opened.append(connection := RedisConnection(url_of(server.embedded.url, part)))
    endpoint = RedisEndpoint(connection, namespace)
    assert (await endpoint.list_models(), await endpoint.list_routers()) == ([model], [ROUTER])
    assert await backend.connection.call("SMEMBERS", keys.models) == {b"c" * 32}
    assert await backend.connection.call("SMEMBERS", keys.routers) == {b"router-0"}


async def test_the_boot_token_stays_and_is_new_after_a_loss(backend: Backend) -> None:
    boot = await backend.endpoint.boot()
    assert boot
    assert await backend.endpoint.boot() == boot
    if backend.connection:
        await backend.connection.call("DEL", keys_of(backend).boot)
        assert await backend.endpoint.boot() != boot


async def test_a_redis_that_is_away_is_unavailable(own_server: RedisServer, namespace: str) -> None:
    endpoint = own_server.backend(namespace).endpoint
    await endpoint.announce_model(model_announcement())
    own_server.embedded.kill()
    for call in (
        endpoint.announce_model(model_announcement()),
        endpoint.list_models(),
        endpoint.announce_router(ROUTER),
        endpoint.list_routers(),
        endpoint.boot(),
    ):
        with pytest.raises(StoreUnavailable):
            await call


async def test_many_models_are_read_in_two_round_trips(server: RedisServer, namespace: str) -> None:
    backend = server.backend(namespace)
    models = [model_announcement(f"{number:032x}") for number in range(20)]
    for model in models:
        await backend.endpoint.announce_model(model)
    num_asked = 0

    class Counted(RedisConnection):
        async def ask(self, *args: Any) -> list[Any]:
            nonlocal num_asked
            num_asked += 1
            return await super().ask(*args)

        async def run(self, *args: Any) -> list[Any]:
            nonlocal num_asked
            num_asked += 1
            return await super().run(*args)

    server.opened.append(connection := Counted(url_of(server.embedded.url, "router")))
    endpoint = RedisEndpoint(connection, namespace)
    assert await endpoint.list_models() == models
    num_asked = 0
    assert await endpoint.list_models() == models
    assert num_asked == 2


# The codec of models.


def test_the_longest_announcement_fits() -> None:
    """Characters beyond the basic plane take twelve bytes each in JSON."""
    model = model_announcement(
        "c" * MAX_LABEL,
        name="\N{GRINNING FACE}" * MAX_NAME_BYTES,
        release="\N{GRINNING FACE}" * MAX_NAME_BYTES,
        path="\N{GRINNING FACE}" * MAX_PATH,
        problem="\N{GRINNING FACE}" * MAX_REASON,
        files="f" * 128,
    )
    assert decode_model(encode(model).encode()) == model
    assert len(encode(model)) < MAX_BYTES
    assert decode_model(encode(dataclasses.replace(model, problem="p" * 5000)).encode()).problem == "p" * MAX_REASON


@pytest.mark.parametrize(
    "changes",
    [
        {"share": float("nan")},
        {"share": float("inf")},
        {"share": -0.5},
        {"share": "1"},
        {"wake_s": -1},
        {"created_s": -1},
        {"created_s": 10**12},
        {"max_model_len": 2**31},
        {"mode": "split"},
        {"mode": ["auto"]},
        {"name": ""},
        {"name": "two\nlines"},
        {"name": "n" * 257},
        {"release": ""},
        {"release": "\x1b[31m"},
        {"path": "p" * 4097},
        {"problem": "p" * 301},
        {"files": ""},
        {"files": "z" * 32},
        {"files": "F" * 32},
        {"files": "f" * 129},
        {"files": None},
        {"weights": "w" * 65},
        {"kv_dtype": "a b"},
        {"content_id": "a}:b"},
        {"is_asleep": "yes"},
        {"is_leaving": None},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_an_announcement_beyond_its_bounds_is_refused(changes: dict[str, Any]) -> None:
    found = json.loads(encode(model_announcement())) | changes
    with pytest.raises(ValueError, match=r"\bno(ne)?\b"):
        decode_model(json.dumps(found).encode())


def test_an_announcement_needs_what_has_no_default_and_nothing_else() -> None:
    found = json.loads(encode(model_announcement()))
    needed = {"content_id", "name", "path", "release", "files"}
    for name in found.keys() - needed:
        less = {each: value for each, value in found.items() if each != name}
        assert decode_model(json.dumps(less).encode()).name == "m"
    for name in needed:
        with pytest.raises(ValueError, match=name):
            decode_model(json.dumps({each: value for each, value in found.items() if each != name}).encode())
    assert decode_model(json.dumps(found | {"of_a_later_release": [1]}).encode()) == model_announcement()


def test_a_worker_s_digest_of_files_is_one_or_none() -> None:
    found = json.loads(encode(worker_info(files="ab" * 32)))
    assert decode_info(json.dumps(found).encode()).files == "ab" * 32
    for files in ("x" * 32, "ab", 7, "ab" * 100):
        with pytest.raises(ValueError, match="no digest"):
            decode_info(json.dumps(found | {"files": files}).encode())
    del found["files"]
    assert decode_info(json.dumps(found).encode()).files == ""

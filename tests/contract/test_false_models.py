"""Somebody writes models to Redis who is no controller of the cluster, or repeats what controllers wrote."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from baton.cluster import ModelAnnouncement, RouterInfo
from baton.trust import Principal
from baton.trust.keys import SIGNATURE_BYTES
from baton.trust.proofs import MAX_SKEW_S
from kvstore.index import GarbageBook, RedisConnection, reads
from kvstore.index import names as id_sets
from kvstore.index.keys import Keys, endpoint_namespace
from kvstore.leases import MAX_MODELS, MODEL_LEASE_S, RedisEndpoint, endpoint
from kvstore.leases.announcements import Announcements
from kvstore.leases.codec import encode
from tests.contract.conftest import Clock, RedisServer, endpoint_by
from tests.contract.garbage import at_endpoint
from tests.support.builders import model_announcement
from tests.support.keys import MemberKeys, draw_keys
from tests.support.turns import longest_turn

MODEL, OTHER = model_announcement("a" * 32), model_announcement("b" * 32, name="other")


class Scene:
    """A controller that announces `MODEL`, a router that has read it, and the adversary's connection."""

    def __init__(self, connection: RedisConnection, name: str, keys: MemberKeys) -> None:
        self.redis, self.name, self.member_keys = connection, name, keys
        self.clock, self.seconds = Clock(), 0.0
        self.keys = Keys(endpoint_namespace(name))
        self.key = self.keys.model(MODEL.content_id)
        self.controller = self.of(Principal.CONTROLLER)
        self.router = self.of(Principal.ROUTER)

    def of(self, member: Principal, name: str = "", keys: MemberKeys | None = None) -> RedisEndpoint:
        return RedisEndpoint(
            self.redis,
            name or self.name,
            clock=self.clock,
            monotonic_s=lambda: self.seconds,
            keys=(keys or self.member_keys)[member],
        )

    def pass_time(self, seconds: float) -> None:
        self.seconds += seconds
        self.clock.now += seconds

    async def announce(self, model: ModelAnnouncement = MODEL) -> bytes:
        """Announces a model a moment later, and returns what was written."""
        self.pass_time(0.01)
        await self.controller.announce_model(model)
        return await self.written(model.content_id)

    async def written(self, content_id: str = MODEL.content_id) -> bytes:
        found: bytes = await self.redis.call("GET", self.keys.model(content_id))
        return found

    async def put(self, value: Any, content_id: str = MODEL.content_id) -> None:
        await self.redis.pipeline(
            [
                ("DEL", self.keys.model(content_id)),
                ("SET", self.keys.model(content_id), value),
                ("SADD", self.keys.models, content_id),
            ]
        )

    async def listed_anew(self) -> list[ModelAnnouncement]:
        """Returns the models that a router reads if it starts now."""
        return await self.of(Principal.ROUTER).list_models()

    def noted(self, what: str = "model") -> str:
        return {each.what: each.latest for each in self.redis.garbage.seen()}.get(what, "")


@pytest.fixture
async def scene(server: RedisServer, namespace: str, member_keys: MemberKeys) -> Scene:
    connection = RedisConnection(server.embedded.url, GarbageBook())
    server.opened.append(connection)
    scene = Scene(connection, namespace, member_keys)
    await scene.announce()
    assert await scene.router.list_models() == [MODEL]
    return scene


async def test_a_model_that_no_controller_of_the_cluster_has_signed_is_not_there(scene: Scene, tmp_path: Path) -> None:
    genuine = await scene.written()
    forged = encode(dataclasses.replace(MODEL, is_leaving=True)).encode()
    head = genuine[: len(genuine) - len(encode(MODEL))]
    for value in (
        forged,
        head + forged,
        bytes(len(head)) + forged,
        head[:-SIGNATURE_BYTES] + bytes(SIGNATURE_BYTES) + encode(MODEL).encode(),
        genuine[:-1],
        genuine + b" ",
        genuine[: len(head) - 1],
        b"",
    ):
        await scene.put(value)
        assert await scene.router.list_models() == [MODEL], "as it was read last"
        assert await scene.listed_anew() == []
        assert "not signed by a controller" in scene.noted()
    for keys, member in (
        (scene.member_keys, Principal.WORKER),
        (scene.member_keys, Principal.ROUTER),
        (draw_keys(tmp_path / "another"), Principal.CONTROLLER),
    ):
        await scene.of(member, keys=keys).announce_model(dataclasses.replace(MODEL, name="evil"))
        assert await scene.router.list_models() == [MODEL]
        assert await scene.listed_anew() == []


async def test_an_announcement_is_good_under_one_content_id_and_at_one_endpoint(scene: Scene) -> None:
    genuine = await scene.written()
    await scene.put(genuine, OTHER.content_id)
    assert await scene.router.list_models() == [MODEL]
    assert "not signed" in scene.noted()
    elsewhere = scene.of(Principal.ROUTER, "elsewhere")
    keys = Keys(endpoint_namespace("elsewhere"))
    await scene.redis.pipeline(
        [("SET", keys.model(MODEL.content_id), genuine), ("SADD", keys.models, MODEL.content_id)]
    )
    assert await elsewhere.list_models() == []


async def test_an_announcement_names_the_content_id_of_its_key(scene: Scene) -> None:
    """Even one that a controller has signed for that key."""
    keys = scene.member_keys[Principal.CONTROLLER]
    signed = Announcements(scene.redis, MODEL_LEASE_S, clock=scene.clock, keys=keys)
    key = scene.keys.model(OTHER.content_id)
    await signed.announce(key, encode(MODEL), ids=scene.keys.models, announced_id=OTHER.content_id)
    assert await scene.router.list_models() == [MODEL]
    assert "the entry names" in scene.noted()
    await scene.announce(OTHER)
    assert await scene.listed_anew() == [MODEL, OTHER]


async def test_a_router_s_announcement_is_no_model_s(scene: Scene) -> None:
    me = RouterInfo(id="r", pid=1, grpc="h:1", http="h:2", mirror_lag_s=0.0)
    await scene.of(Principal.ROUTER).announce_router(me)
    await scene.put(await scene.redis.call("GET", scene.keys.router("r")))
    assert await scene.listed_anew() == []


@pytest.mark.parametrize(
    "past", [dataclasses.replace(MODEL, is_asleep=True), dataclasses.replace(MODEL, is_leaving=True)]
)
async def test_an_older_announcement_loses_to_the_newer_one(scene: Scene, past: ModelAnnouncement) -> None:
    old = await scene.announce(past)
    new = await scene.announce()
    assert await scene.router.list_models() == [MODEL]
    await scene.put(old)
    for _ in range(3):
        assert await scene.router.list_models() == [MODEL]
        assert "older" in scene.noted()
        scene.pass_time(MODEL_LEASE_S / 4)
    await scene.put(new)
    assert await scene.router.list_models() == [MODEL]
    scene.pass_time(MODEL_LEASE_S / 2)
    await scene.put(old)
    assert await scene.router.list_models() == [], "neither counts any more"
    await scene.put(new)
    assert await scene.router.list_models() == [], "nor is one renewed by being written again"
    scene.pass_time(MAX_SKEW_S)
    assert await scene.listed_anew() == []
    await scene.announce()
    assert await scene.router.list_models() == [MODEL]


async def test_a_model_that_is_not_announced_again_ends_though_its_key_stays(scene: Scene) -> None:
    await scene.put(await scene.written())  # without an expiry
    scene.pass_time(MODEL_LEASE_S - 1)
    assert await scene.router.list_models() == [MODEL]
    scene.pass_time(2)
    assert await scene.router.list_models() == []


async def test_a_controller_that_starts_again_takes_over(scene: Scene) -> None:
    asleep = dataclasses.replace(MODEL, is_asleep=True)
    scene.pass_time(20)
    await scene.of(Principal.CONTROLLER).announce_model(asleep)
    assert await scene.router.list_models() == [asleep]


async def test_an_unchanged_model_is_verified_and_decoded_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await scene.announce(OTHER)
    first = await scene.router.list_models()
    verified: list[object] = []
    monkeypatch.setattr(type(scene.member_keys[Principal.ROUTER]), "verify", lambda *args: verified.append(args))
    second = await scene.router.list_models()
    assert verified == []
    assert all(one is other for one, other in zip(first, second, strict=True))


async def test_there_are_no_more_models_than_a_reader_accepts(
    server: RedisServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_MODELS", 10)
    store = server.backend(namespace).endpoint
    for number in range(12):
        await store.announce_model(model_announcement(f"{number:032x}"))
    assert [int(each.content_id, 16) for each in await store.list_models()] == [*range(10)]


async def test_a_model_is_found_among_more_false_ones_than_a_look_takes_in(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is listed in each look from then on, though each takes in other false ones."""
    monkeypatch.setattr(id_sets, "MAX_LIVING", 10)
    monkeypatch.setattr(reads, "STEP", 5)
    fill = "for i = 1, 150 do redis.call('SADD', KEYS[1], 'x' .. i) redis.call('SET', ARGV[1] .. 'x' .. i, '{}') end"
    await scene.redis.call("EVAL", fill, 1, scene.keys.models, scene.keys.model(""))
    for _ in range(30):
        assert await scene.router.list_models() == [MODEL]
    late = scene.of(Principal.ROUTER)
    looks = [await late.list_models() for _ in range(50)]
    assert [MODEL] in looks
    assert all(looks[looks.index([MODEL]) :])


async def test_all_models_that_there_may_be_are_read_and_others_go_on(scene: Scene) -> None:
    models = [model_announcement(f"{number:032x}") for number in range(MAX_MODELS)]
    for model in models:
        await scene.controller.announce_model(model)
    found, turn_s = await longest_turn(scene.router.list_models())
    assert found == models
    assert turn_s < 0.05


@pytest.mark.parametrize("is_signed", [True, False])
async def test_garbage_harms_neither_other_routers_nor_other_models(
    server: RedisServer, namespace: str, member_keys: MemberKeys, is_signed: bool
) -> None:
    connection = RedisConnection(server.embedded.url, GarbageBook())
    server.opened.append(connection)
    store = endpoint_by(connection, namespace, member_keys if is_signed else None)
    me = RouterInfo(id="router-0", pid=1, grpc="h:1", http="h:2", mirror_lag_s=0.0)

    def times(what: str) -> int:
        return sum(each.times for each in connection.garbage.seen() if each.what == what)

    kinds = [*at_endpoint(Keys(endpoint_namespace(namespace)))]
    assert len(kinds) >= 15
    for garbage in kinds:
        before = times(garbage.what)
        await connection.pipeline(list(garbage.commands))
        if garbage.what not in ("routers", "models") or garbage.how == "no UTF-8":
            assert len(await store.list_routers()) <= 1
            assert len(await store.list_models()) <= 1
            assert times(garbage.what) > before, str(garbage)
        await store.announce_router(me)
        await store.announce_model(MODEL)
        assert (await store.list_routers(), await store.list_models()) == ([me], [MODEL]), str(garbage)

"""Somebody writes to Redis who is no member of the cluster, or repeats what members wrote: nobody believes it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.blocks import KEY_BYTES
from baton.cluster import ControllerInfo, RouterInfo, Worker, WorkerInfo
from baton.errors import Fenced, StoreUnavailable
from baton.sampling import FinishReason
from baton.trust import KeyFile, KeyRing, Principal, draw_secret, key_file, write_private
from baton.trust.keys import SIGNATURE_BYTES
from baton.trust.proofs import MAX_SKEW_S
from kvstore.index import (
    BlockEvent,
    GarbageBook,
    IndexOutcome,
    Mirror,
    MirrorFollower,
    Op,
    Position,
    RedisConnection,
    RedisIndex,
    Seal,
)
from kvstore.index import redis as index_in_redis
from kvstore.index.events import ORIGIN
from kvstore.index.keys import Keys, endpoint_namespace
from kvstore.index.signed import REMEMBERED_S, SightBook, Stamps, packed
from kvstore.index.values import MAX_EPOCH
from kvstore.leases import (
    RecordEntry,
    RecordKey,
    RecordPart,
    RedisEndpoint,
    RedisLeases,
    RedisRecords,
    ReportedLoads,
)
from kvstore.leases import redis as leases_in_redis
from kvstore.leases.chain import NUM_SLOTS, SLOT_MS
from kvstore.leases.codec import decode_load, encode, encode_load
from kvstore.leases.redis import LEASE_FIELDS
from kvstore.leases.signed import SignedRegistry
from router.timeline.usage_marks import RedisMarks
from router.timeline.usage_record import UsageMark
from tests.contract.conftest import Clock, RedisServer
from tests.support import builders
from tests.support.keys import MemberKeys, draw_keys
from tests.support.turns import counted_turns

LEASE_S = 10.0
KEY, OTHER_KEY = RecordKey("acme", "r"), RecordKey("zeta", "r")
DIGEST = b"d" * 16


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


class Scene:
    """One Redis, with the stores of a worker, a router and a controller, a reader, and the adversary's connection."""

    def __init__(self, connection: RedisConnection, namespace: str, keys: MemberKeys, clock: Clock) -> None:
        self.redis, self.namespace, self.member_keys, self.clock = connection, namespace, keys, clock
        self.keys = Keys(namespace)
        self.seconds = 0.0
        """The reader's monotonic clock."""
        self.worker = self.leases(Principal.WORKER)
        self.router = self.leases(Principal.ROUTER)
        self.controller = self.leases(Principal.CONTROLLER)
        self.index = RedisIndex(connection, namespace, keys=keys[Principal.WORKER])
        self.reader = self.new_reader()

    def leases(
        self, member: Principal, keys: MemberKeys | None = None, loads: ReportedLoads | None = None
    ) -> RedisLeases:
        member_keys = (keys or self.member_keys)[member]
        return RedisLeases(
            self.redis,
            self.namespace,
            lease_s=LEASE_S,
            clock=self.clock,
            monotonic_s=lambda: self.seconds,
            keys=member_keys,
            loads=loads,
        )

    def endpoint(self, member: Principal, name: str = "", keys: MemberKeys | None = None) -> RedisEndpoint:
        """A member's store of an endpoint, by default of the one with the name of the namespace."""
        return RedisEndpoint(
            self.redis,
            name or self.namespace,
            lease_s=LEASE_S,
            clock=self.clock,
            monotonic_s=lambda: self.seconds,
            keys=(keys or self.member_keys)[member],
        )

    def new_reader(self) -> RedisLeases:
        return self.leases(Principal.ROUTER)

    def pass_time(self, seconds: float) -> None:
        self.seconds += seconds
        self.clock.now += seconds

    async def join(self, worker_id: str = "w", **values: Any) -> WorkerInfo:
        values = {"address": f"{worker_id}:1"} | values
        info = builders.worker_info(worker_id, epoch=await self.worker.acquire(worker_id), **values)
        assert await self.worker.renew(info, builders.READY)
        return info

    async def lease(self, worker_id: str = "w") -> dict[str, bytes]:
        found = await self.redis.call("HMGET", self.keys.lease(worker_id), *LEASE_FIELDS)
        return dict(zip(LEASE_FIELDS, found, strict=True))

    async def put(self, lease: Mapping[str, Any], worker_id: str = "w") -> None:
        """Writes a lease as the adversary does: for ever."""
        flat = [part for field in lease.items() for part in field]
        await self.redis.pipeline(
            [
                ("DEL", self.keys.lease(worker_id)),
                ("HSET", self.keys.lease(worker_id), *flat),
                ("SADD", self.keys.workers, worker_id),
            ]
        )

    async def listed(self, reader: RedisLeases | None = None) -> list[WorkerInfo]:
        return [worker.info for worker in await (reader or self.reader).list_workers()]

    def noted(self, what: str) -> str:
        return {each.what: each.latest for each in self.redis.garbage.seen()}.get(what, "")


def plain(lease: Mapping[str, bytes]) -> dict[str, bytes]:
    """A lease as a release writes it that knows no chains."""
    return {name: value for name, value in lease.items() if name not in ("since", "anchored", "renewal")}


@pytest.fixture
async def scene(server: RedisServer, namespace: str, member_keys: MemberKeys) -> Scene:
    connection = RedisConnection(server.embedded.url, GarbageBook())
    server.opened.append(connection)
    return Scene(connection, namespace, member_keys, Clock())


# Leases.


@pytest.mark.parametrize("form", ["with a chain", "of an earlier release"])
async def test_a_lease_that_no_worker_of_the_cluster_has_signed_is_not_there(
    scene: Scene, tmp_path: Path, form: str
) -> None:
    await scene.join()
    lease = whole = await scene.lease()
    stamp, signature = "since", "anchored"
    if form == "of an earlier release":
        lease, stamp, signature = plain(lease), "stamp", "signature"
    strangers = draw_keys(tmp_path / "another")
    forged = {"epoch": lease["epoch"], "info": lease["info"], "load": lease["load"]}
    cases: dict[str, Mapping[str, Any]] = {
        "unsigned": forged,
        "a stamp alone": forged | {stamp: lease[stamp]},
        "no signature": lease | {signature: b""},
        "half a signature": lease | {signature: lease[signature][:40]},
        "the other signature": lease | {signature: whole["signature" if signature == "anchored" else "anchored"]},
        "another address": lease | {"info": lease["info"].replace(b"w:1", b"x:1")},
        "another load": lease | {"load": lease["load"].replace(b'"running":0', b'"running":1')},
        "a later stamp": lease | {stamp: int(lease[stamp]) + 1},
        "a later epoch": lease | {"epoch": int(lease["epoch"]) + 1},
        "a space more": lease | {"info": lease["info"] + b" "},
    }
    for how, member, keys in (("a router's", Principal.ROUTER, None), ("a stranger's", Principal.WORKER, strangers)):
        author = SignedRegistry((keys or scene.member_keys)[member], LEASE_S, scene.clock)
        texts = lease["info"].decode(), lease["load"].decode()
        proof = author.lease(scene.keys.lease("w"), int(lease["epoch"]), *texts)
        cases[how] = lease | {name: value for name, value in dataclasses.asdict(proof).items() if name in lease}
    for how, case in cases.items():
        await scene.put(case)
        assert await scene.listed(scene.new_reader()) == [], how
        assert "signed" in scene.noted("lease")
    await scene.put(lease)
    assert len(await scene.listed(scene.new_reader())) == 1


async def test_a_lease_stands_for_no_other_worker_and_no_other_model(scene: Scene) -> None:
    info = await scene.join()
    lease = await scene.lease()
    await scene.put(lease, "v")
    assert await scene.listed() == [info]
    elsewhere = Scene(scene.redis, scene.namespace + "x", scene.member_keys, scene.clock)
    await elsewhere.put(lease)
    assert await elsewhere.listed() == []


async def test_fields_of_a_later_release_are_covered_by_the_signature(scene: Scene) -> None:
    info = await scene.join()
    lease, signed = await scene.lease(), scene.worker._signed
    assert signed
    later = json.dumps(json.loads(lease["info"]) | {"invented_later": [1]})
    proof = signed.lease(scene.keys.lease("w"), info.epoch, later, lease["load"].decode())
    await scene.put(lease | {"info": later} | dataclasses.asdict(proof))
    assert await scene.listed() == [info]
    unknown = later.replace('"decode"', '"encode"')
    proof = signed.lease(scene.keys.lease("w"), info.epoch, unknown, lease["load"].decode())
    await scene.put(lease | {"info": unknown} | dataclasses.asdict(proof))
    assert await scene.reader.list_leases() == {"w": None}, "a worker that lives, and of which no more is known"


async def test_an_older_lease_is_not_believed_again(scene: Scene) -> None:
    info = await scene.join()
    first = await scene.lease()
    scene.pass_time(1)
    assert await scene.worker.renew(dataclasses.replace(info, node="second"), builders.READY)
    assert [each.node for each in await scene.listed()] == ["second"]
    await scene.put(first)
    assert [each.node for each in await scene.listed()] == ["second"], "as it was read last"
    assert "older" in scene.noted("lease")
    scene.pass_time(LEASE_S + 1)
    assert await scene.listed() == []


async def test_an_older_epoch_is_not_believed_again(scene: Scene) -> None:
    await scene.join()
    old = await scene.lease()
    newer = await scene.join()
    assert await scene.listed() == [newer]
    await scene.put(old)
    assert await scene.listed() == [newer]


async def test_a_lease_that_is_kept_where_it_lies_ends_all_the_same(scene: Scene) -> None:
    info = await scene.join()
    await scene.put(await scene.lease())
    assert await scene.listed() == [info]
    scene.pass_time(LEASE_S - 1)
    assert await scene.listed() == [info]
    scene.pass_time(2)
    assert await scene.listed() == []
    assert await scene.worker.renew(info, builders.READY)
    assert await scene.listed() == [info]


async def test_leases_of_the_past_bring_nothing_to_who_has_not_seen_the_worker(scene: Scene) -> None:
    info = await scene.join()
    recorded = [await scene.lease()]
    for _ in range(3):
        scene.pass_time(3)
        await scene.worker.renew(info, builders.READY)
        recorded.append(await scene.lease())
    assert await scene.listed() == [info]
    scene.pass_time(MAX_SKEW_S + 1)
    for lease in recorded:
        await scene.put(lease)
        assert await scene.listed(scene.new_reader()) == []
        assert "clocks" in scene.noted("lease")
    scene.pass_time(REMEMBERED_S)
    await scene.put(recorded[0])
    assert await scene.listed() == [], "forgotten by the reader, and too old"


async def test_a_clock_that_is_set_changes_nothing_for_workers_that_are_known(scene: Scene) -> None:
    info = await scene.join()
    assert await scene.listed() == [info]
    author, workers_clock = scene.worker._signed, Clock()
    assert author
    author.stamps._wall_s = workers_clock
    for _ in range(40):  # the reader's clock is an hour off from now on, the worker's is not
        workers_clock.now += 3
        scene.seconds += 3
        scene.clock.now = workers_clock.now + 3600
        assert await scene.worker.renew(info, builders.READY)
        assert await scene.listed() == [info]


async def test_a_worker_whose_clock_was_set_far_back_takes_a_new_epoch(scene: Scene) -> None:
    info = await scene.join()
    scene.clock.now -= MAX_SKEW_S - 1
    assert await scene.worker.renew(info, builders.READY)
    scene.clock.now -= 2
    assert not await scene.worker.renew(info, builders.READY)
    assert await scene.worker.acquire("w", info.epoch) > info.epoch


async def test_unchanged_values_are_not_verified_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for worker_id in "abc":
        await scene.join(worker_id)
    verify, times = KeyRing.verify, 0

    def counted(self: KeyRing, *args: Any) -> bool:
        nonlocal times
        times += 1
        return verify(self, *args)

    monkeypatch.setattr(KeyRing, "verify", counted)
    for _ in range(5):
        assert len(await scene.listed()) == 3
    assert times == 3


# Renewals by links of a chain.


async def test_a_lease_that_is_renewed_is_verified_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    info = await scene.join()
    verified, verify = [], KeyRing.verify

    def counted(self: KeyRing, *args: Any) -> bool:
        verified.append(args)
        return verify(self, *args)

    monkeypatch.setattr(KeyRing, "verify", counted)
    first = (await scene.reader.list_leases())["w"]
    signature = (await scene.lease())["anchored"]
    for _ in range(20):
        scene.pass_time(3)
        assert await scene.worker.renew(info, builders.READY)
        assert (await scene.reader.list_leases())["w"] is first, "what has not changed is kept"
    assert len(verified) == 1
    assert (await scene.lease())["anchored"] == signature
    assert await scene.listed(scene.new_reader()) == [info], "the link leads a reader that starts now to the anchor"
    for _ in range(2):
        scene.pass_time(3)
        assert await scene.worker.renew(info, builders.READY)
        assert await scene.listed() == [info]
    assert (await scene.lease())["anchored"] != signature, "the chain has ended"
    assert len(verified) == 3


async def test_leases_of_a_release_without_chains_are_read_and_written(scene: Scene) -> None:
    """While a cluster is upgraded, routers and workers of both releases serve side by side."""
    info = await scene.join()
    for running in (0, 0, 3):
        scene.pass_time(3)
        load = dataclasses.replace(builders.READY, running=running)
        assert await scene.worker.renew(info, load)
        lease = await scene.lease()
        stamp, texts = int(lease["stamp"]), (lease["info"], lease["load"])
        message = packed(scene.keys.lease("w"), info.epoch, stamp, *texts)
        assert scene.member_keys[Principal.ROUTER].verify("value", Principal.WORKER, message, lease["signature"])
        assert stamp == int(scene.clock.now * 1000), "such a release counts from each new stamp"
        await scene.put(plain(lease))
        assert await scene.reader.list_workers() == [Worker(info, load)]


async def test_others_run_while_leases_are_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases_in_redis, "SLICE_S", 0.0)
    for number in range(30):
        await scene.join(f"w{number}")
    found, num_turns = await counted_turns(scene.listed())
    assert len(found) == 30
    assert num_turns >= 30


async def test_a_renewal_signs_what_has_changed(scene: Scene) -> None:
    info = await scene.join()
    busy = dataclasses.replace(builders.READY, running=3)
    for load, node in ((busy, "node"), (builders.READY, "node"), (builders.READY, "other")):
        scene.pass_time(3)
        info = dataclasses.replace(info, node=node)
        assert await scene.worker.renew(info, load)
        assert await scene.reader.list_workers() == [Worker(info, load)]


async def test_a_renewal_that_is_stolen_replayed_or_made_up_renews_nothing(scene: Scene) -> None:
    infos = {each: await scene.join(each) for each in ("v", "w")}
    links = []
    for _ in range(2):
        scene.pass_time(3)
        assert await scene.worker.renew(infos["w"], builders.READY)
        links.append((await scene.lease())["renewal"])
    known = scene.new_reader()
    assert len(await scene.listed(known)) == 2
    lease = await scene.lease()
    slot = int.from_bytes(links[-1][:4], "little")
    cases = {
        "an earlier one": links[0],
        "the same once more": links[1],
        "of a later slot": (slot + 1).to_bytes(4, "little") + links[1][4:],
        "of the last slot": (NUM_SLOTS - 1).to_bytes(4, "little") + links[1][4:],
        "beyond the chain": NUM_SLOTS.to_bytes(4, "little") + links[1][4:],
        "made up": (slot + 1).to_bytes(4, "little") + bytes(32),
        "too short": links[1][:-1],
        "empty": b"",
    }
    await scene.put(lease | {"renewal": cases["made up"]}, "w")
    assert await scene.listed(scene.new_reader()) == [infos["v"]], "nobody has signed its anchor"
    scene.pass_time(LEASE_S - 1)
    assert await scene.worker.renew(infos["v"], builders.READY)
    await scene.listed(known)
    cases["another worker's"] = (await scene.lease("v"))["renewal"]
    for renewal in cases.values():
        await scene.put(lease | {"renewal": renewal})
        assert await scene.listed(known) == [infos["v"], infos["w"]], "as it was read last"
    assert "signed" in scene.noted("lease")
    scene.pass_time(2)
    for how, renewal in cases.items():
        await scene.put(lease | {"renewal": renewal})
        assert await scene.listed(known) == [infos["v"]], how
    await scene.put(lease | {"renewal": cases["beyond the chain"]})
    assert await scene.listed(scene.new_reader()) == [infos["v"]]
    assert "a chain has 128" in scene.noted("lease"), "nobody hashes for hours"
    assert await scene.worker.renew(infos["w"], builders.READY)
    assert await scene.listed(known) == [infos["v"], infos["w"]]


async def test_a_link_brings_back_no_earlier_load(scene: Scene) -> None:
    info = await scene.join()
    idle = await scene.lease()
    scene.pass_time(3)
    assert await scene.worker.renew(info, builders.READY)
    renewed = await scene.lease()
    scene.pass_time(3)
    busy = dataclasses.replace(builders.READY, queued_tokens=9)
    assert await scene.worker.renew(info, busy)
    assert await scene.reader.list_workers() == [Worker(info, busy)]
    scene.pass_time(3)
    assert await scene.worker.renew(info, busy)
    latest = await scene.lease()
    for forged in (idle, renewed, renewed | {"renewal": latest["renewal"]}, latest | {"load": idle["load"]}):
        await scene.put(forged)
        assert await scene.reader.list_workers() == [Worker(info, busy)]
    for forged in (idle | {"renewal": latest["renewal"]}, latest | {"load": idle["load"]}):
        await scene.put(forged)
        assert await scene.listed(scene.new_reader()) == []


async def test_a_renewal_counts_by_its_own_time(scene: Scene) -> None:
    info = await scene.join()
    scene.pass_time(SLOT_MS * (NUM_SLOTS - 1) / 1e3)
    assert await scene.worker.renew(info, builders.READY)
    assert int((await scene.lease())["since"]) / 1e3 < scene.clock.now - MAX_SKEW_S, "signed long ago"
    assert await scene.listed(scene.new_reader()) == [info]
    scene.pass_time(MAX_SKEW_S + 1)
    assert await scene.listed(scene.new_reader()) == []
    assert "clocks" in scene.noted("lease")


async def test_a_lease_of_a_removed_secret_is_renewed_no_more(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knew the old secret could have signed it, with a chain of their own."""
    monkeypatch.setattr(key_file, "CHECK_S", 0.0)
    monkeypatch.setattr(key_file, "KEPT_S", 0.0)
    info = await scene.join()
    assert await scene.listed() == [info]
    write_private(tmp_path / "old", (tmp_path / "secret").read_text())
    stays = scene.leases(Principal.WORKER, {Principal.WORKER: KeyFile(tmp_path / "old", Principal.WORKER)})
    assert await stays.renew(info, builders.READY)
    assert await scene.listed() == [info]
    write_private(tmp_path / "secret", draw_secret())
    scene.pass_time(LEASE_S - 1)
    assert await stays.renew(info, builders.READY)
    assert await scene.listed() == [info], "for as long as the last one counts"
    scene.pass_time(2)
    assert await stays.renew(info, builders.READY)
    assert await scene.listed() == []
    assert await scene.worker.renew(info, builders.READY)
    assert await scene.listed() == [info], "the worker has signed it anew"


async def test_two_workers_do_not_have_one_address(scene: Scene) -> None:
    honest = await scene.join("honest", address="h:1")
    assert await scene.listed() == [honest]
    scene.pass_time(1)
    thief = await scene.join("a-thief", address="h:1")
    assert await scene.reader.list_leases() == {"a-thief": None, "honest": Worker(honest, builders.READY)}
    assert "honest" in scene.noted("lease")
    assert await scene.listed(scene.new_reader()) == [honest], "the elder of two"
    scene.pass_time(LEASE_S + 1)
    await scene.worker.renew(thief, builders.READY)
    assert await scene.listed() == [thief], "the other one is gone"
    scene.clock.now -= 30
    backdated = await scene.join("b-elder", address="h:1", node="elder")
    assert backdated.epoch < thief.epoch
    assert await scene.listed() == [thief], "who is known with the address keeps it"


@pytest.mark.parametrize(
    "address", ["unix:/x", "dns:h:1", "ipv4:1.2.3.4:5", "vsock:2:80", "h", "h:", ":1", "a/b:1", "::1:5"]
)
async def test_an_address_is_host_and_port(scene: Scene, address: str) -> None:
    await scene.join(address=address)
    assert await scene.reader.list_leases() == {"w": None}


# Epochs.


@pytest.mark.parametrize("ahead", [1, 10**6, MAX_EPOCH // 2])
async def test_a_forged_epoch_fences_no_worker(scene: Scene, ahead: int) -> None:
    info = await scene.join()
    forged = info.epoch + ahead
    await scene.put(await scene.lease() | {"epoch": forged})
    claim = forged.to_bytes(8, "little") + bytes(SIGNATURE_BYTES)
    await scene.redis.pipeline([("SET", scene.keys.epoch("w"), forged), ("SET", scene.keys.claim("w"), claim)])
    with pytest.raises(StoreUnavailable):
        await scene.worker.renew(info, builders.READY)
    assert await scene.worker.renew(info, builders.READY)
    await scene.redis.pipeline([("SET", scene.keys.epoch("w"), forged), ("DEL", scene.keys.lease("w"))])
    with pytest.raises(StoreUnavailable):
        await scene.worker.acquire("w", info.epoch)
    newer = await scene.worker.acquire("w", info.epoch)
    assert newer == info.epoch + 1
    with pytest.raises(Fenced, match=str(newer)):
        await scene.worker.renew(info, builders.READY)


async def test_a_lease_that_lapsed_is_not_taken_back_with_its_epoch(scene: Scene) -> None:
    info = await scene.join()
    assert await scene.listed() == [info]
    await scene.redis.pipeline([("DEL", scene.keys.lease("w"), scene.keys.epoch("w"), scene.keys.claim("w"))])
    assert await scene.worker.acquire("w", info.epoch) > info.epoch


async def test_a_forged_epoch_does_not_use_epochs_up(scene: Scene) -> None:
    await scene.redis.pipeline([("SET", scene.keys.epoch("w"), MAX_EPOCH - 1)])
    assert await scene.worker.acquire("w") == int(scene.clock.now * 1000)


# Routers, the controller and the sizes.


async def test_routers_and_the_controller_speak_for_themselves_alone(scene: Scene) -> None:
    me = RouterInfo(id="r", pid=1, grpc="h:1", http="h:2", mirror_lag_s=0.0)
    router, reader = scene.endpoint(Principal.ROUTER), scene.endpoint(Principal.CONTROLLER)
    keys = Keys(endpoint_namespace(scene.namespace))
    await router.announce_router(me)
    announced = await scene.redis.call("GET", keys.router("r"))
    assert await reader.list_routers() == [me]
    await scene.redis.pipeline([("SET", keys.router("s"), announced), ("SADD", keys.routers, "s")])
    assert await reader.list_routers() == [me], "another's"
    await scene.redis.pipeline([("SET", keys.router("r"), encode(me))])
    assert await scene.endpoint(Principal.ROUTER).list_routers() == [], "unsigned"
    await scene.endpoint(Principal.WORKER).announce_router(me)
    assert await scene.endpoint(Principal.ROUTER).list_routers() == [], "a worker's"

    controller = ControllerInfo(pid=7, address="h:7")
    for author in (scene.router, scene.worker):
        await author.announce_controller(ControllerInfo(pid=8, address="evil:7"))
        assert await scene.reader.get_controller() is None
    await scene.controller.announce_controller(controller)
    old = await scene.redis.call("GET", scene.keys.controller)
    assert await scene.reader.get_controller() == controller
    scene.pass_time(LEASE_S + 1)
    assert await scene.reader.get_controller() is None, "not renewed"
    await scene.controller.announce_controller(controller)
    assert await scene.reader.get_controller() == controller
    await scene.redis.pipeline([("SET", scene.keys.controller, old)])
    assert await scene.reader.get_controller() == controller, "as it was read last"
    scene.pass_time(MAX_SKEW_S + 1)
    assert await scene.reader.get_controller() is None
    assert await scene.new_reader().get_controller() is None


async def test_sizes_are_the_controllers(scene: Scene) -> None:
    await scene.controller.set_desired({"decode": 2})
    old = await scene.redis.call("HGET", scene.keys.desired, "signed")
    await scene.controller.set_desired({"decode": 3, "prefill": 1})
    await scene.redis.pipeline([("HSET", scene.keys.desired, "decode", 9)])
    assert await scene.reader.get_desired() == {"decode": 3, "prefill": 1}
    scene.pass_time(86_400)
    assert await scene.reader.get_desired() == {"decode": 3, "prefill": 1}, "they stay until there are others"
    await scene.redis.pipeline([("HSET", scene.keys.desired, "signed", old)])
    assert await scene.reader.get_desired() != {"decode": 2}
    await scene.router.set_desired({"decode": 0})
    assert await scene.new_reader().get_desired() == {}


# The index.


async def published(scene: Scene, epoch: int, *numbers: int, seq: int = 1, worker_id: str = "w") -> None:
    event = BlockEvent(worker_id=worker_id, epoch=epoch, seq=seq, op=Op.STORED, keys=tuple(map(key, numbers)))
    assert (await scene.index.apply(event)).outcome is IndexOutcome.APPLIED


async def streamed(scene: Scene, reader: RedisIndex | None = None) -> list[BlockEvent | None]:
    return [event for _, event in await (reader or scene.index).read(ORIGIN, 0)]


async def test_an_event_that_its_worker_has_not_signed_is_none(scene: Scene) -> None:
    info = await scene.join()
    await published(scene, info.epoch, 1, 2)
    ((_, fields),) = await scene.redis.call("XRANGE", scene.keys.events, "-", "+")
    (genuine,) = await streamed(scene)
    assert genuine
    for name, value in (
        ("w", "v"),
        ("e", info.epoch + 1),
        ("q", 2),
        ("o", "-"),
        ("k", key(1) + key(3)),
        ("k", (key(1) + b"h")[:KEY_BYTES] * 2),
        ("s", b""),
        ("s", fields[b"s"][:-1] + b"x"),
        ("s", b"x" + fields[b"s"][1:]),
    ):
        forged = fields | {name.encode(): value}
        await scene.redis.call("XADD", scene.keys.events, "*", *(part for field in forged.items() for part in field))
    assert await streamed(scene) == [genuine] + [None] * 9
    await published(scene, info.epoch, 4, seq=2)
    *before, last = await streamed(scene)
    # Where only the signature is another one, the next event's link says that it is the genuine event once more.
    assert before == [genuine] + [None] * 7 + [genuine, None], "nor before one that is signed"
    assert last
    assert last.seq == 2
    assert "not signed" in scene.noted("event")


async def test_a_load_that_its_worker_has_not_reported_is_none(scene: Scene) -> None:
    info = await scene.join()
    await published(scene, info.epoch, 1)
    for seq, running in ((2, 3), (3, 4)):
        load = encode_load(dataclasses.replace(builders.READY, running=running, number=running))
        event = BlockEvent(worker_id="w", epoch=info.epoch, seq=seq, op=Op.STORED, keys=(key(seq),), load=load)
        assert (await scene.index.apply(event)).outcome is IndexOutcome.APPLIED
    genuine = await streamed(scene)
    assert [decode_load(event.load).running for event in genuine[1:] if event] == [3, 4]
    _, (_, third), (_, fourth) = await scene.redis.call("XRANGE", scene.keys.events, "-", "+")
    for forged in (
        fourth[b"l"].replace(b"4", b"5"),
        third[b"l"],
        fourth[b"l"][:32] + third[b"l"][32:],
        third[b"l"][:32] + fourth[b"l"][32:],
        bytes(32) + fourth[b"l"][32:],
        b"",
    ):
        await scene.redis.call("DEL", scene.keys.events)
        for fields in (third, fourth | {b"l": forged}):
            await scene.redis.call(
                "XADD", scene.keys.events, "*", *(part for field in fields.items() for part in field)
            )
        assert genuine[2]
        assert await streamed(scene) == [genuine[1], dataclasses.replace(genuine[2], load=b"")]


async def test_a_replayed_load_replaces_no_newer_one(scene: Scene) -> None:
    info = await scene.join()
    loads = ReportedLoads(scene.redis)
    router = scene.leases(Principal.ROUTER, loads=loads)
    first, second, third = (dataclasses.replace(builders.READY, running=n, number=n) for n in (1, 2, 3))
    for load, newest in ((second, second), (first, second), (third, third), (second, third)):
        loads.report("w", info.epoch, encode_load(load))
        assert await router.list_workers() == [Worker(info, newest)]
        assert (await router.list_workers())[0] is (await router.list_workers())[0]
    loads.report("w", info.epoch - 1, encode_load(dataclasses.replace(first, number=9)))
    assert await router.list_workers() == [Worker(info, third)], "another epoch's"
    loads.report("w", info.epoch + 1, encode_load(first))
    assert await router.list_workers() == [Worker(info, builders.READY)], "of an epoch without a lease"
    scene.pass_time(3)
    signed = dataclasses.replace(builders.READY, number=4)
    assert await scene.worker.renew(info, signed)
    assert await router.list_workers() == [Worker(info, signed)], "which the lease has signed since"
    loads.report("w", info.epoch, b'{"running": "5"}')
    loads.report("nobody", 1, encode_load(third))
    assert await router.list_workers() == [Worker(info, signed)]
    assert "load of w" in scene.noted("event")


async def test_an_event_is_good_once_and_in_one_place(scene: Scene) -> None:
    info = await scene.join()
    await published(scene, info.epoch, 1)
    await published(scene, info.epoch, 2, seq=2)
    entries = await scene.redis.call("XRANGE", scene.keys.events, "-", "+")
    mirror = Mirror()
    for event in await streamed(scene):
        assert event
        mirror.apply(event)
    assert mirror.position("w") == Position(info.epoch, 2)
    removed = BlockEvent(worker_id="w", epoch=info.epoch, seq=3, op=Op.REMOVED, keys=(key(1), key(2)))
    assert (await scene.index.apply(removed)).outcome is IndexOutcome.APPLIED
    for _, fields in entries:
        await scene.redis.call("XADD", scene.keys.events, "*", *(part for field in fields.items() for part in field))
        elsewhere = Keys(scene.namespace + "x")
        await scene.redis.call("XADD", elsewhere.events, "*", *(part for field in fields.items() for part in field))
    for event in await streamed(scene):
        assert event
        mirror.apply(event)
    mirror.set_leased({"w": info.epoch})
    assert mirror.lookup([key(1)]) == mirror.lookup([key(2)]) == {}
    other = RedisIndex(scene.redis, scene.namespace + "x", keys=scene.member_keys[Principal.ROUTER])
    assert await streamed(scene, other) == [None, None]


async def test_one_signature_proves_a_run_of_events(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = {worker_id: (await scene.join(worker_id)).epoch for worker_id in "vw"}
    authors = {
        each: RedisIndex(scene.redis, scene.namespace, keys=scene.member_keys[Principal.WORKER]) for each in "vw"
    }
    for seq in range(1, 21):
        for worker_id, epoch in epochs.items():
            event = BlockEvent(worker_id=worker_id, epoch=epoch, seq=seq, op=Op.STORED, keys=(key(seq),))
            await authors[worker_id].apply(event)
            await scene.redis.call("XADD", scene.keys.events, "*", "hello", "world")
    verify, times = KeyRing.verify, 0

    def counted(self: KeyRing, *args: Any) -> bool:
        nonlocal times
        times += 1
        return verify(self, *args)

    monkeypatch.setattr(KeyRing, "verify", counted)
    events = await streamed(scene)
    assert len([event for event in events if event]) == 40
    assert times == 2


@pytest.mark.parametrize("num_more", [1, 30])
async def test_a_set_is_read_though_its_worker_publishes_all_the_time(
    scene: Scene, server: RedisServer, num_more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each answer of Redis the set changes: what is read is what was signed at one moment, or is read later."""
    info = await scene.join()
    await published(scene, info.epoch, 1, 2, 3)
    seq = 1

    class Busy(RedisConnection):
        async def ask(self, *args: Any) -> list[Any]:
            nonlocal seq
            seq += 1
            numbers = range(100 * seq, 100 * seq + num_more)
            event = BlockEvent(worker_id="w", epoch=info.epoch, seq=seq, op=Op.STORED, keys=tuple(map(key, numbers)))
            assert (await scene.index.apply(event)).outcome is IndexOutcome.APPLIED
            return await super().ask(*args)

    monkeypatch.setattr(index_in_redis, "GROWTH", 10)
    busy = Busy(server.embedded.url)
    server.opened.append(busy)
    reader = RedisIndex(busy, scene.namespace, keys=scene.member_keys[Principal.ROUTER])
    if num_more > 10:
        with pytest.raises(StoreUnavailable, match="grows faster"):
            await reader.snapshot("w", info.epoch)
        return
    found = await reader.snapshot("w", info.epoch)
    assert found == (seq, {key(1), key(2), key(3), *(key(100 * each) for each in range(2, seq + 1))})


async def test_a_set_that_its_worker_has_not_signed_is_empty(scene: Scene) -> None:
    info = await scene.join()
    blocks, seal = scene.keys.blocks("w", info.epoch), scene.keys.seal("w", info.epoch)
    await published(scene, info.epoch, 1, 2, 3)
    old_seal = await scene.redis.call("GET", seal)
    reader = RedisIndex(scene.redis, scene.namespace, keys=scene.member_keys[Principal.ROUTER])
    assert await reader.snapshot("w", info.epoch) == (1, {key(1), key(2), key(3)})
    await scene.redis.call("SADD", blocks, key(9))
    assert await reader.snapshot("w", info.epoch) == (1, set()), "one more"
    assert await scene.index.position("w", info.epoch) == 0, "its worker publishes it anew"
    await scene.redis.call("SREM", blocks, key(1))
    assert await reader.snapshot("w", info.epoch) == (1, set()), "another one"
    await scene.redis.pipeline([("SREM", blocks, key(9)), ("SADD", blocks, key(1))])
    assert (await reader.snapshot("w", info.epoch))[1] == {key(1), key(2), key(3)}
    assert await scene.index.position("w", info.epoch) == 1
    await published(scene, info.epoch, 4, seq=2)
    assert (await reader.snapshot("w", info.epoch))[0] == 2
    await scene.redis.pipeline([("SET", seal, old_seal), ("SREM", blocks, key(4))])
    assert await reader.snapshot("w", info.epoch) == (2, set()), "as it was before"
    assert "older" in scene.noted("blocks")
    other = await scene.join("v")
    moved = scene.keys.blocks("v", other.epoch), scene.keys.seal("v", other.epoch)
    await scene.redis.pipeline([("COPY", blocks, moved[0]), ("COPY", seal, moved[1])])
    assert await reader.snapshot("v", other.epoch) == (0, set())


async def test_a_worker_finds_its_way_back_from_a_forged_position(scene: Scene) -> None:
    info = await scene.join()
    await published(scene, info.epoch, 1)
    await scene.redis.pipeline([("SET", scene.keys.seq("w", info.epoch), 2**53 - 2)])
    event = BlockEvent(worker_id="w", epoch=info.epoch, seq=2, op=Op.SNAPSHOT_BEGIN)
    answer = await scene.index.apply(event)
    assert (answer.outcome, answer.seq) == (IndexOutcome.RESYNC, 2)
    assert (await scene.index.apply(dataclasses.replace(event, seq=3))).outcome is IndexOutcome.APPLIED
    await scene.redis.call("HSET", scene.keys.lease("w"), "epoch", info.epoch + 5)
    await scene.redis.call("SET", scene.keys.epoch("w"), info.epoch + 5)
    answer = await scene.index.apply(BlockEvent(worker_id="w", epoch=info.epoch, seq=4, op=Op.SNAPSHOT_END))
    assert answer.outcome is IndexOutcome.RESYNC, "nobody has signed the epoch that would fence it off"


async def test_a_mirror_learns_nothing_that_is_not_signed(scene: Scene) -> None:
    info = await scene.join()
    await published(scene, info.epoch, 1)
    index = RedisIndex(scene.redis, scene.namespace, keys=scene.member_keys[Principal.ROUTER])
    follower = MirrorFollower(index, Mirror(), poll_s=0.01)
    forged = {"w": "w", "e": info.epoch, "q": 2, "o": "+", "k": key(7), "n": 1}
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(follower.run())
        for _ in range(20):
            await scene.redis.call("XADD", scene.keys.events, "*", *(part for each in forged.items() for part in each))
            await scene.redis.call("SADD", scene.keys.blocks("w", info.epoch), key(7))
            await scene.redis.call("DEL", scene.keys.boot)
            await asyncio.sleep(0.02)
            assert follower.mirror.lookup([key(7)]) == {}
        running.cancel()
    assert scene.noted("event")


# What only routers read.


async def test_records_are_of_use_to_routers_alone_and_in_their_place(scene: Scene) -> None:
    seal, records = Seal("secret"), RedisRecords(scene.redis, scene.namespace, seal=Seal("secret"))
    tokens = list(range(70_000, 70_050))
    parts = [RecordPart(choice_index=0, start=0, token_ids=tokens, finish_reason=FinishReason.STOP, sampler="a/1")]
    await records.write([RecordEntry(KEY, DIGEST, b"router-a", parts)], [])
    name, other = (scene.keys.record(each.tenant_id, each.request_id, DIGEST) for each in (KEY, OTHER_KEY))
    ((field, value),) = (await scene.redis.call("HGETALL", name)).items()
    assert b"stop" not in value
    assert tokens[0].to_bytes(4, "little") not in value
    assert (await records.read(KEY, DIGEST))[0].token_ids == tuple(tokens)

    await scene.redis.call("HSET", other, field, value)
    assert await records.read(OTHER_KEY, DIGEST) == {}, "another tenant's"
    moved = field[:-4] + (1).to_bytes(4, "little")
    await scene.redis.call("HSET", name, moved, value)
    assert (await records.read(KEY, DIGEST))[0].token_ids == tuple(tokens), "elsewhere in the answer"
    assert await RedisRecords(scene.redis, scene.namespace, seal=Seal("other")).read(KEY, DIGEST) == {}
    for forged in (seal.open(name, field, value), value[:-1], b"", value[:12], b"\0" + value[1:], value + b"\0"):
        await scene.redis.call("HSET", name, field, forged)
        assert await records.read(KEY, DIGEST) == {}
    assert "sealed" in scene.noted("record")


async def test_marks_are_of_use_to_routers_alone_and_in_their_place(scene: Scene) -> None:
    marks = RedisMarks(scene.redis, scene.namespace, scene.clock, seal=Seal("secret"))
    mark = UsageMark(digest="d", token="token-1")
    assert await marks.swap(KEY, await marks.get(KEY), mark)
    name, other = (scene.keys.usage(each.tenant_id, each.request_id) for each in (KEY, OTHER_KEY))
    stored = await scene.redis.call("GET", name)
    assert b"token-1" not in stored
    assert (await marks.get(KEY)).mark == mark
    for where, value in ((other, stored), (name, mark.encode()), (name, stored[:-1])):
        await scene.redis.call("SET", where, value)
        assert (await marks.get(OTHER_KEY if where == other else KEY)).mark is None
    assert await marks.swap(KEY, await marks.get(KEY), mark), "the next one replaces it"


# The books.


def test_stamps_rise_whatever_the_clock_does() -> None:
    now = 100.0
    stamps = Stamps(lambda: now)
    drawn = [stamps.draw(), stamps.draw()]
    now = 90.0
    drawn.append(stamps.draw())
    now = 200.0
    drawn.append(stamps.draw())
    assert drawn == [100_000, 100_001, 100_002, 200_000]


def test_signatures_of_a_secret_that_is_given_up_end_with_their_lease(tmp_path: Path, member_keys: MemberKeys) -> None:
    """Two secrets are valid while the cluster changes from one to the other."""
    old, new = draw_keys(tmp_path / "old"), draw_keys(tmp_path / "new")
    both = tmp_path / "both"
    both.write_text((tmp_path / "new").read_text() + "\n" + (tmp_path / "old").read_text())
    both.chmod(0o600)
    reading = KeyFile(both, Principal.ROUTER)
    for keys, reader, is_good in ((old, reading, True), (new, reading, True), (old, new[Principal.ROUTER], False)):
        author = SignedRegistry(keys[Principal.ROUTER], LEASE_S)
        value = author.announcement("k", "{}")
        book = SignedRegistry(reader, LEASE_S)
        if is_good:
            assert book.seen("k", Principal.ROUTER, value)[1] == b"{}"
        else:
            with pytest.raises(ValueError, match="not signed"):
                book.seen("k", Principal.ROUTER, value)
    assert SightBook(member_keys[Principal.ROUTER], LEASE_S).last("k") is None

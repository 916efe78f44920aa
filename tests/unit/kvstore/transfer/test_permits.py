"""Pulls between workers of a cluster with a secret: what a router permits, and what anybody else asks for.

Real gRPC and links, in one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.context import Context

from baton import wire
from baton.blocks import block_keys
from baton.cluster import Role
from baton.config import RouterConfig
from baton.messages import PrefixSource, Pull, SequenceSpec, Ticket
from baton.rpc.member_auth import member_metadata
from baton.telemetry.instruments import Instruments
from baton.trust import PERMIT_S, KeyFile, Party, Permit, Principal, draw_secret, keys_digest, write_private
from baton.v1 import kv_pb2_grpc
from engine.testing import ArithmeticRunner
from kvstore.index import Mirror
from kvstore.transfer.connection.control_stream import open_channel
from router.placement.pool_view import HintTracker, PoolView
from router.serve.selector import WorkerSelector
from tests.support import builders
from tests.unit.kvstore.transfer.peers import (
    Worker,
    decode_side,
    engine_worker,
    make_spec,
    tables_of,
    with_link,
)

PROMPT = [(7 * position) % 1000 + 1 for position in range(100)]
NUM_PULLED = 96


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    write_private(path, draw_secret())
    return path


def router_with(keys: KeyFile | None) -> WorkerSelector:
    pools = PoolView(lambda keys: {}, time.monotonic)
    hints = HintTracker(Mirror(), Instruments(builders.cluster_status))
    return WorkerSelector(pools=pools, hints=hints, config=RouterConfig(), keys=keys)


def leased(worker: Worker, **more: Any) -> Any:
    return builders.worker(
        worker.id,
        Role.DECODE,
        address=worker.address,
        incarnation=f"{worker.id}.1",
        **{"known_fields": wire.KNOWN_FIELDS} | more,
    )


@contextlib.asynccontextmanager
async def two_workers(
    secret: Path | None, link: str = "tcp", ours: int = 16, theirs: int = 16
) -> AsyncIterator[tuple[Worker, Worker]]:
    """The puller, and the source, which has the prompt in its cache."""
    config = with_link(link)
    keys = KeyFile(secret, Principal.WORKER) if secret else None
    async with (
        engine_worker("puller", ArithmeticRunner(64, ours), config, keys=keys) as puller,
        engine_worker("source", ArithmeticRunner(64, theirs), config, keys=keys) as source,
    ):
        await source.generate(make_spec(PROMPT))
        yield puller, source


async def fetched(puller: Worker, source: PrefixSource, spec: SequenceSpec | None = None) -> int:
    return await puller.kv.prefixes.fetch(spec or make_spec(PROMPT), source, time.monotonic(), Context())


@pytest.mark.parametrize(("link", "ours", "theirs"), [("tcp", 16, 16), ("shm", 32, 16), ("tcp", 16, 32)])
async def test_what_the_router_permits_is_pulled(secret: Path, link: str, ours: int, theirs: int) -> None:
    router = router_with(KeyFile(secret, Principal.ROUTER))
    async with two_workers(secret, link, ours, theirs) as (puller, source):
        for num_held in (40, 100):
            named = router.source(router.prompt(make_spec(PROMPT)), leased(source), leased(puller), num_held)
            assert named.permit
            await fetched(puller, named)
        assert puller.kv.counts().pulled_tokens == NUM_PULLED
        assert puller.kv.counts().failed_pulls == 0
        assert await puller.generate(make_spec(PROMPT)) == await source.generate(make_spec(PROMPT))


async def test_without_a_secret_nobody_asks_for_permits() -> None:
    router = router_with(None)
    async with two_workers(None) as (puller, source):
        named = router.source(router.prompt(make_spec(PROMPT)), leased(source), leased(puller), 100)
        assert named == PrefixSource(worker_id="source", address=source.address, num_tokens=100, incarnation="source.1")
        assert await fetched(puller, named) == NUM_PULLED


async def test_an_older_puller_gets_no_permit_and_computes_the_prompt(secret: Path) -> None:
    """It would refuse a command with a field that it does not know."""
    router = router_with(KeyFile(secret, Principal.ROUTER))
    older = wire.KNOWN_FIELDS.replace("PrefixSource:1,2,3", "PrefixSource:9,1,2,3").replace(",5 ", " ")
    assert wire.PERMIT_FIELD in wire.fields_unknown_to(older)
    async with two_workers(secret) as (puller, source):
        named = router.source(router.prompt(make_spec(PROMPT)), leased(source), leased(puller, known_fields=older), 100)
        assert named.permit == b""
        assert await fetched(puller, named) == 0
        assert await puller.generate(make_spec(PROMPT)) == await source.generate(make_spec(PROMPT))


Change = Callable[[Permit, KeyFile], bytes]
BAD_PERMITS: dict[str, Change] = {
    "none": lambda permit, router: b"",
    "garbage": lambda permit, router: b"\xff" * 300,
    "expired": lambda permit, router: dataclasses.replace(permit, until_s=time.time() - 61).signed(router.keys),
    "another worker's": lambda permit, router: dataclasses.replace(permit, puller=Party("thief", "puller.1")).signed(
        router.keys
    ),
    "an earlier start's": lambda permit, router: dataclasses.replace(permit, puller=Party("puller", "puller.0")).signed(
        router.keys
    ),
    "another address's": lambda permit, router: dataclasses.replace(permit, address="127.0.0.1:1").signed(router.keys),
    "another source's": lambda permit, router: dataclasses.replace(permit, source=Party("other", "source.1")).signed(
        router.keys
    ),
    "fewer tokens": lambda permit, router: dataclasses.replace(permit, num_tokens=80).signed(router.keys),
    "other blocks": lambda permit, router: dataclasses.replace(permit, keys=keys_digest([])).signed(router.keys),
}


@pytest.mark.parametrize("bad", BAD_PERMITS)
async def test_without_a_good_permit_the_prompt_is_computed(
    secret: Path, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    router = KeyFile(secret, Principal.ROUTER)
    async with two_workers(secret) as (puller, source):
        permit = permit_for(puller.address)
        assert await fetched(puller, source_of(source, BAD_PERMITS[bad](permit, router))) == 0
        assert puller.kv.counts().failed_pulls == 1
        assert source.kv.counts().sent_bytes == 0
        assert "is computed, not pulled" in caplog.text
        expected = await source.generate(make_spec(PROMPT))
        assert await puller.generate(make_spec(PROMPT)) == expected
        assert await fetched(puller, source_of(source, permit.signed(router.keys)), make_spec([*PROMPT, 1])) == 0, (
            "it is there by now"
        )
        await puller.check_idle()
        await source.check_idle()


def permit_for(address: str, keys: list[bytes] | None = None) -> Permit:
    keys = block_keys(b"seed", PROMPT[:100]) if keys is None else keys
    return Permit(
        puller=Party("puller", "puller.1"),
        address=address,
        source=Party("source", "source.1"),
        keys=keys_digest(keys),
        num_tokens=16 * len(keys),
        until_s=time.time() + PERMIT_S,
    )


def source_of(source: Worker, permit: bytes) -> PrefixSource:
    return dataclasses.replace(source.source(100), permit=permit)


async def test_a_thief_gets_no_blocks_with_a_permit_that_it_has_stolen(secret: Path) -> None:
    """It asks as itself, as the puller at its own address, and for blocks of another tenant among those permitted."""
    router = KeyFile(secret, Principal.ROUTER)
    async with (
        two_workers(secret) as (puller, source),
        decode_side(with_link("tcp"), "thief", caches=ArithmeticRunner(64).caches) as thief,
    ):
        others = [token + 1 for token in PROMPT]
        await source.generate(dataclasses.replace(make_spec(others), cache_seed=b"another tenant"))
        named = block_keys(b"seed", PROMPT[:100])
        stolen = permit_for(puller.address).signed(router.keys)
        own = thief.receiver.expect("t", 96, 0, tables_of(thief.receiver, range(6)))
        posing = dataclasses.replace(own, decode_worker_id="puller", incarnation="puller.1")
        astray = dataclasses.replace(posing, kv_address=puller.address)
        mixed = [*block_keys(b"another tenant", others)[:5], named[5]]
        for ticket, keys, said in (
            (own, named, "the KV would go to worker thief"),
            (posing, named, f"at {own.kv_address}"),
            (astray, mixed, "for other blocks"),
            (dataclasses.replace(astray, num_tokens=97), named, "97 are asked for"),
        ):
            kind, text = await refusal(source, Pull(ticket, tuple(keys), stolen), KeyFile(secret, Principal.WORKER))
            assert kind == "TransferRefused"
            assert said in text
        assert not thief.endpoint.messages, "nobody has come to the thief"
        assert source.kv.counts().open_connections == 0
        await thief.receiver.release(own)
        await source.check_idle()


async def refusal(source: Worker, pull: Pull, keys: KeyFile | None = None) -> tuple[str, str]:
    """How the source refuses a pull of who has a worker's keys, where the cluster has any."""
    proof = member_metadata(keys, "/baton.v1.KvControl/Pull", source.incarnation)
    async with open_channel(source.address) as channel:
        stub: Any = kv_pb2_grpc.KvControlStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Pull(wire.pull_to_pb(pull), metadata=proof)
    trailers = dict(error.value.trailing_metadata() or ())
    return str(trailers.get("baton-error", trailers)), error.value.details() or ""


async def test_a_ticket_that_names_no_host_and_port_leads_nowhere(secret: Path) -> None:
    """Not even a router's: gRPC would take a file's name, or another resolver's."""
    async with two_workers(None) as (puller, source):
        for address in (
            "",
            "unix:/run/x.sock",
            "unix:7",
            "dns:///127.0.0.1:7",
            "ipv4:127.0.0.1:7",
            "[::1",
            "h:0",
            "h:65536",
        ):
            named = PrefixSource(worker_id="source", address=address, num_tokens=100)
            assert await fetched(puller, named) == 0
            ticket = dataclasses.replace(await ticket_of(puller), kv_address=address)
            kind, text = await refusal(source, Pull(ticket, tuple(block_keys(b"seed", PROMPT[:100]))))
            if address == "unix:7":  # a host of that name
                assert kind == "WorkerFailed"
            else:
                assert (kind, "is not host:port" in text) == ("TransferRefused", True)


async def ticket_of(worker: Worker) -> Ticket:
    receiver = worker.kv.receiver
    ticket = receiver.expect("t", 96, 0, tables_of(receiver, range(6)))
    await receiver.release(ticket)
    return ticket

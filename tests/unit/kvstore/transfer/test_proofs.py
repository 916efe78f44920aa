"""Workers prove to each other that they are some, when they pull a prefix and when they send one."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from opentelemetry.context import Context

from baton.blocks import block_keys
from baton.messages import PrefixSource
from baton.trust import PERMIT_S, KeyFile, Party, Permit, Principal, draw_secret, keys_digest, write_private
from engine.testing import ArithmeticRunner
from tests.unit.kvstore.transfer.peers import CONFIG, Worker, engine_worker, make_spec

PROMPT = [(7 * position) % 1000 + 1 for position in range(100)]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    write_private(tmp_path / "secret", draw_secret())
    return tmp_path / "secret"


def permitted(secret: Path, here: Worker, there: Worker) -> PrefixSource:
    """What a router of the cluster says of a worker that holds the prompt."""
    permit = Permit(
        puller=Party(here.id, here.incarnation),
        address=here.address,
        source=Party(there.id, there.incarnation),
        keys=keys_digest(block_keys(b"seed", PROMPT[:96])),
        num_tokens=96,
        until_s=time.time() + PERMIT_S,
    )
    return dataclasses.replace(there.source(96), permit=permit.signed(KeyFile(secret, Principal.ROUTER).keys))


async def pulled(
    secret: Path, ours: KeyFile | None, theirs: KeyFile | None, *, incarnation: str = ""
) -> tuple[int, int]:
    """How many tokens came from a worker that has 96 of them, and how many pulls failed."""
    async with (
        engine_worker("here", ArithmeticRunner(64), CONFIG, keys=ours) as here,
        engine_worker("there", ArithmeticRunner(64), CONFIG, keys=theirs) as there,
    ):
        await there.generate(make_spec(PROMPT))
        source = permitted(secret, here, there)
        if incarnation:
            source = dataclasses.replace(source, incarnation=incarnation)
        num_tokens = await here.kv.prefixes.fetch(make_spec(PROMPT), source, time.monotonic(), Context())
        return num_tokens, here.kv.counts().failed_pulls


async def test_a_worker_pulls_from_another_and_is_sent_to(secret: Path) -> None:
    assert await pulled(secret, KeyFile(secret, Principal.WORKER), KeyFile(secret, Principal.WORKER)) == (96, 0)
    assert await pulled(secret, None, None) == (96, 0)


async def test_who_is_no_worker_of_this_cluster_gets_nothing(secret: Path, tmp_path: Path) -> None:
    """A proof for a past incarnation counts as little; the prefix is computed then."""
    write_private(tmp_path / "other", draw_secret())
    worker = KeyFile(secret, Principal.WORKER)
    assert await pulled(secret, None, worker) == (0, 1)
    assert await pulled(secret, KeyFile(tmp_path / "other", Principal.WORKER), worker) == (0, 1)
    assert await pulled(secret, KeyFile(secret, Principal.ROUTER), worker) == (0, 1)
    assert await pulled(secret, worker, worker, incarnation="there.0") == (0, 1)


async def test_kv_goes_to_no_receiver_that_refuses_the_sender(secret: Path) -> None:
    """The pull is admitted; the session by which it would be answered is not."""
    assert await pulled(secret, KeyFile(secret, Principal.WORKER), KeyFile(secret, Principal.WORKER)) == (96, 0)
    async with (
        engine_worker("here", ArithmeticRunner(64), CONFIG, keys=KeyFile(secret, Principal.WORKER)) as here,
        engine_worker("there", ArithmeticRunner(64), CONFIG) as there,
    ):
        await there.generate(make_spec(PROMPT))
        source = permitted(secret, here, there)
        assert await here.kv.prefixes.fetch(make_spec(PROMPT), source, time.monotonic(), Context()) == 0
        assert there.kv.counts().lost == 1
        await there.check_idle()
        await here.check_idle()

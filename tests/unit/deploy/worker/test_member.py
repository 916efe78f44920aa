"""What the parts of a worker learn of its state."""

from __future__ import annotations

import pytest

from baton.blocks import content_id
from baton.cluster import Role, WorkerState
from baton.config import Config, ModelConfig, TransferConfig
from baton.engine.model.arithmetic import ArithmeticRunner
from baton.errors import WorkerDraining
from deploy.worker.member import Member

pytestmark = pytest.mark.asyncio


async def test_the_handlers_take_no_new_work_while_the_worker_drains() -> None:
    config = Config(transfer=TransferConfig(links=("tcp",)))
    member = Member(Role.DECODE, "decode-0", "127.0.0.1", config, ArithmeticRunner(8, 16))
    try:
        member.context.require_staying()
        member.become(WorkerState.DRAINING)
        with pytest.raises(WorkerDraining, match="decode-0"):
            member.context.require_staying()
        member.become(WorkerState.READY)
        member.context.require_staying()
    finally:
        await member.kv.close()


async def test_workers_share_no_kv_unless_their_weights_are_the_same() -> None:
    async def identities(model: ModelConfig) -> tuple[str, str]:
        config = Config(model=model, transfer=TransferConfig(links=("tcp",)))
        member = Member(Role.DECODE, "decode-0", "127.0.0.1", config, ArithmeticRunner(8, 16))
        await member.kv.close()
        return member.content_id, member.wire_compat

    found = [await identities(ModelConfig(revision="r", weights=weights)) for weights in ("exact", "bf16", "int8g")]
    assert await identities(ModelConfig(revision="r")) == found[0]
    assert found[0][0] == content_id("r"), "exact weights keep the keys that they had"
    assert len({one for both in found for one in both}) == 6

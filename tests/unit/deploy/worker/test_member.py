"""What the parts of a worker learn of its state."""

from __future__ import annotations

import pytest

from baton.cluster import Role, WorkerState
from baton.config import Config, TransferConfig
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

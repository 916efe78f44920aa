"""What the parts of a worker learn of its state."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opentelemetry.context import Context

from baton.blocks import content_id
from baton.cluster import BlockCounts, Role, WorkerState
from baton.config import Config, EngineConfig, ModelConfig, TransferConfig
from baton.errors import DeviceLost, WorkerDraining
from baton.messages import DecodeRequest
from baton.rpc import RpcServer
from baton.tasks import cancel_and_wait
from decode_worker.service import DecodeService
from engine.core.runner import KVSpec, LayerGroup, Runner, StateSpec
from engine.core.sequence import Purpose
from engine.engines import engine_over
from engine.testing import ArithmeticRunner
from kvstore.index.memory import MemoryStore
from kvstore.leases import MemoryLeases, codec
from kvstore.transfer.connection.control_stream import Peer
from kvstore.transfer.device import DeviceLosses
from tests.support.builders import READY, worker_info
from tests.unit.kvstore.transfer.peers import make_spec
from worker.member import Member, wire_compat

pytestmark = pytest.mark.asyncio


def member_of(config: Config, runner: Runner, role: Role = Role.DECODE) -> Member:
    return Member(role, f"{role}-0", "127.0.0.1", config, engine_over(runner, config.engine))


async def test_the_handlers_take_no_new_work_while_the_worker_drains() -> None:
    config = Config(transfer=TransferConfig(transports=("tcp",)))
    member = member_of(config, ArithmeticRunner(8, 16))
    try:
        assert not member.context.is_draining
        member.become(WorkerState.DRAINING)
        with pytest.raises(WorkerDraining, match="decode-0"):
            await anext(DecodeService(member.context).decode(DecodeRequest(make_spec([1]), False), Context()))
        member.become(WorkerState.READY)
        assert not member.context.is_draining
    finally:
        await member.kv.close()


async def test_the_kind_of_kv_is_the_models_and_not_a_ranks() -> None:
    group = LayerGroup(name="all", layers=(0, 1), block_size=16, num_kv_heads=4, k_dim=8, v_dim=8, dtype="float32")
    spec = KVSpec((group,), (StateSpec("conv", (2, 33), "float32"),))

    def kind(spec: KVSpec, **changes: Any) -> str:
        return wire_compat("model", replace(spec, groups=(replace(group, **changes),)))

    assert kind(spec) == kind(spec, num_kv_heads=2), "at a tensor-parallel degree of 2"
    assert kind(spec) == kind(spec, block_size=32, dtype="bfloat16")
    others = [
        wire_compat("other", spec),
        kind(spec, window=64),
        kind(spec, window=65),
        kind(spec, layers=(0,)),
        kind(spec, layers=()),
        kind(spec, k_dim=16),
        kind(spec, name="window"),
        kind(replace(spec, states=())),
        kind(replace(spec, states=(StateSpec("conv", (2, 34), "float32"),))),
        kind(replace(spec, states=(StateSpec("conv", (2, 33), "bfloat16"),))),
    ]
    assert len({kind(spec), *others}) == 1 + len(others)


@pytest.mark.parametrize(("kind", "anywhere"), [({}, True), ({"with_state": True}, False), ({"window": 32}, False)])
async def test_a_lease_says_whether_a_sequence_can_continue_after_any_block(
    kind: dict[str, Any], anywhere: bool
) -> None:
    config = Config(transfer=TransferConfig(transports=("tcp",)))
    member = member_of(config, ArithmeticRunner(64, 16, **kind))
    try:
        info = member._introduced(1, 7001)
        leased = codec.decode_info(codec.encode(info).encode())
        assert leased.resumes_anywhere is info.resumes_anywhere is anywhere
    finally:
        await member.kv.close()


async def test_reports_of_a_load_are_numbered_by_its_changes() -> None:
    config = Config(transfer=TransferConfig(transports=("tcp",)))
    member = member_of(config, ArithmeticRunner(64, 16))
    try:
        first = member._load()
        assert first.number > 0, "0 stands for a release that does not count"
        assert member._load() == first
        member.become(WorkerState.READY)
        assert member._load() == replace(first, state=WorkerState.READY, number=first.number + 1)
        assert not member._report(first), "there is no publisher: the lease must be renewed"
    finally:
        await member.kv.close()


async def test_workers_share_no_kv_unless_they_compute_the_same() -> None:
    async def identities(model: ModelConfig, **engine: Any) -> tuple[str, str]:
        config = Config(model=model, engine=EngineConfig(**engine), transfer=TransferConfig(transports=("tcp",)))
        member = member_of(config, ArithmeticRunner(8, 16))
        await member.kv.close()
        return member.content_id, member.wire_compat

    found = [await identities(ModelConfig(revision="r", weights=weights)) for weights in ("exact", "bf16", "int8g")]
    assert await identities(ModelConfig(revision="r")) == found[0]
    assert found[0][0] == content_id("r"), "exact weights keep the keys that they had"
    found.append(await identities(ModelConfig(revision="r"), batch_invariant=True))
    assert len({one for both in found for one in both}) == 8, "also unless nothing beside an answer changes its bits"

    async def of_vllm(**arguments: Any) -> tuple[str, str]:
        engine = {"runner": "vllm", "vllm_python": "/opt/vllm/bin/python", "vllm_args": arguments}
        return await identities(ModelConfig(revision="r"), **engine)

    assert await of_vllm(enforce_eager=True, kv_cache_dtype="fp8") == found[0]
    overrides = {"rope_theta": 1e6, "sliding_window": None}
    found += [await of_vllm(quantization="fp8"), await of_vllm(hf_overrides=overrides)]
    assert await of_vllm(hf_overrides=dict(reversed(overrides.items()))) == found[-1]
    assert len({one for both in found for one in both}) == 12, "nor if vLLM makes other models of one folder"


async def test_a_device_that_is_lost_in_a_transfer_alone_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle worker computes no step that would show it."""
    losses = DeviceLosses()
    monkeypatch.setattr("kvstore.transfer.endpoint.LOSSES", losses)
    monkeypatch.setattr("kvstore.transfer.endpoint.POLL_S", 0.01)
    config = Config(transfer=TransferConfig(transports=("tcp",)))
    member = member_of(config, ArithmeticRunner(8, 16))

    async def belong(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(member, "_belong", belong)
    leases: Any = None
    running = asyncio.create_task(member._run(leases, leases, leases, RpcServer(())))
    try:
        async with member.engine.sequence(make_spec([1, 2, 3]), Purpose.RECEIVE) as waits:
            await waits.next()  # its blocks
            done, _ = await asyncio.wait([running], timeout=0.1)
            assert not done
            losses.note(RuntimeError("CUDA error: an illegal memory access was encountered"))
            with pytest.raises(DeviceLost, match="illegal memory access"):
                async with asyncio.timeout(10):
                    await waits.next()
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(running, 10)
        assert [type(error) for error in ended.value.exceptions] == [DeviceLost]
    finally:
        await cancel_and_wait([running])
        await member.kv.close()


async def test_what_copies_kv_is_chosen_before_a_worker_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = dict[torch.device, Any]()
    monkeypatch.setattr("kvstore.transfer.copy.kernel_choice.CHOSEN", chosen)
    config = Config(transfer=TransferConfig(transports=("tcp",)))
    member = member_of(config, ArithmeticRunner(8, 16))
    try:
        assert member.state is WorkerState.STARTING
        assert chosen == {torch.device("cpu"): None}
    finally:
        await member.kv.close()


async def test_a_worker_says_what_copies_its_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ArithmeticRunner(8, 16)
    config = Config(transfer=TransferConfig(transports=("tcp",)), engine=EngineConfig(plan_ahead=True))
    member = member_of(config, runner)
    member._info = worker_info("decode-0", Role.DECODE)
    cpu, gpu, chosen = torch.device("cpu"), torch.device("cuda", 0), dict[torch.device, Any]()
    monkeypatch.setattr("kvstore.transfer.copy.kernel_choice.CHOSEN", chosen)
    try:
        chosen[cpu] = None
        found = member._described().computes
        assert (found.kv_copies, found.dtype, found.plans_ahead, found.fallbacks) == ("torch", "int64", True, ())
        monkeypatch.setattr(runner, "caches", (SimpleNamespace(device=gpu),))
        chosen[gpu] = object()
        assert (member._described().computes.kv_copies, member._described().computes.fallbacks) == ("kernels", ())
        chosen[gpu] = None
        monkeypatch.setattr("worker.member.why_not_kernels", lambda device: "Triton is not installed")
        assert member._described().computes.fallbacks == ("KV is copied by torch: Triton is not installed",)
        monkeypatch.setattr("worker.member.why_not_kernels", lambda device: None)
        assert "do not run or move other bytes" in member._described().computes.fallbacks[0]
    finally:
        await member.kv.close()


async def test_a_worker_counts_its_rows_of_states() -> None:
    config = Config(transfer=TransferConfig(transports=("tcp",)))
    for with_state, expected in ((True, BlockCounts(8, free=8)), (False, BlockCounts())):
        runner = ArithmeticRunner(8, 16, max_num_seqs=2, with_state=with_state)
        member = member_of(config, runner)
        try:
            assert member._load().state_rows == expected
        finally:
            await member.kv.close()


async def test_connections_are_opened_ahead_by_prefill_workers_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the view of the cluster as it is at each opening, and in no role or state but these."""
    monkeypatch.setattr("worker.member.LOOK_AROUND_S", 0.01)
    config = Config(transfer=TransferConfig(transports=("tcp",)))
    member = member_of(config, ArithmeticRunner(8, 16), Role.PREFILL)
    member._info = worker_info("prefill-0", Role.PREFILL)
    leases, views = MemoryLeases(MemoryStore()), asyncio.Queue[list[str]]()

    async def open_ahead(peers: Sequence[Peer]) -> bool:
        views.put_nowait([peer.worker_id for peer in peers])
        return False

    monkeypatch.setattr(member.kv.sender, "open_ahead", open_ahead)
    opening = asyncio.create_task(member._open_ahead(leases))
    try:
        await asyncio.sleep(0.1)
        assert views.empty(), "the worker has not started yet"
        member.become(WorkerState.READY)
        assert await views.get() == []
        info = worker_info("decode-0", Role.DECODE, incarnation="d", epoch=await leases.acquire("decode-0"))
        assert await leases.renew(info, READY)
        async with asyncio.timeout(10):
            while await views.get() != ["decode-0"]:
                pass
        for state, role in ((WorkerState.DRAINING, Role.PREFILL), (WorkerState.READY, Role.DECODE)):
            member.become(state, role)
            await asyncio.sleep(0.05)
            while not views.empty():
                views.get_nowait()
            await asyncio.sleep(0.1)
            assert views.empty()
    finally:
        await cancel_and_wait([opening])
        await member.kv.close()

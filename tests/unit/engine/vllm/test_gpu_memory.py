"""vLLM's KV cache of a GPU, from the host to the worker, over a driver that is a fake. It has not been run on a GPU."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence

import pytest
import torch

from baton.errors import ModelLoadError
from engine.core.runner import KVSpec
from engine.gpu_memory import BY_DESCRIPTOR
from engine.model.kv_cache import KVCache
from engine.vllm.caches import Opened, opened
from engine.vllm.gpu_cache import Gpu, GpuCache
from engine.vllm.gpu_export import MAX_ALLOCATIONS, Exported, NotShared, close_all, exported, rows_of
from engine.vllm.messages import Channel, GpuMemory, Group, KvMemory, Ready
from engine.vllm.shared_cache import spec_of
from kvstore.transfer.copy.blocks import BlockCopier
from kvstore.transfer.protocol.plan import WireOptions, layout_of, plan
from tests.fakes.gpu import fake_gpus
from tests.fakes.gpu_memory import PAGE, FakeMemoryCalls, no_descriptor_is_left
from tests.unit.engine.vllm.test_messages import READY

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 8, 2, 16, 32
NUM_BYTES = LAYERS * BLOCKS * HEADS * TOKENS * CONTENT * 4
NUM_PAGES = NUM_BYTES // PAGE
PROBE = [3, 4]
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""vLLM's layouts (`vllm.v1.kv_cache_layout`): the logical dimensions L, B, H, N, C in the order of the memory."""


@pytest.fixture
def host() -> Iterator[FakeMemoryCalls]:
    made = FakeMemoryCalls()
    with no_descriptor_is_left():
        yield made
        made.end()


@pytest.fixture
def worker(host: FakeMemoryCalls) -> FakeMemoryCalls:
    return FakeMemoryCalls()


def views(memory: torch.Tensor, layout: str = "LBHNC", num_heads: int = HEADS) -> dict[str, torch.Tensor]:
    """A layer's tensor each, `[B, H, N, C]`, as vLLM makes them (`create_kv_cache_views`)."""
    shape = LAYERS, BLOCKS, num_heads, TOKENS, CONTENT * HEADS // num_heads
    order = ORDERS[layout]
    stored = memory[:NUM_BYTES].view(torch.float32).view([shape[dim] for dim in order])
    back = [order.index(dim) for dim in range(5)]
    return {f"layer.{index}": each for index, each in enumerate(stored.permute(back).unbind(0))}


def compute(caches: dict[str, torch.Tensor], blocks: Sequence[int] = PROBE) -> None:
    """Does what vLLM does for the probe: writes every value of these blocks in all layers."""
    for number, layer in enumerate(caches.values(), 1):
        for block in blocks:
            layer[block] = 100.0 * number + block


def ready_with(memory: KvMemory) -> Ready:
    return READY._replace(groups=[Group("full", LAYERS, TOKENS, 0)], memory=memory, num_blocks=BLOCKS - 1)


def opened_by(worker: FakeMemoryCalls, export: Exported) -> Opened:
    ready = ready_with(export.memory._replace(probe=PROBE))
    return opened(ready, -1, export.descriptors, lambda uuid: Gpu(torch.device("cpu"), worker))


def rows_in(cache: object) -> torch.Tensor:
    assert isinstance(cache, GpuCache)
    (rows,) = cache.groups
    return rows


def values_of(memory: torch.Tensor) -> list[float]:
    return sorted(set(memory.flatten().tolist()))


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_layouts_whose_rows_are_contiguous_are_shared(
    host: FakeMemoryCalls, worker: FakeMemoryCalls, layout: str
) -> None:
    caches = views(host.allocate(NUM_PAGES, legacy=True), layout)
    compute(caches)
    opening = opened_by(worker, exported(caches, BLOCKS, host))
    rows = rows_in(opening.cache)
    assert rows.shape == (LAYERS, BLOCKS, HEADS * TOKENS * CONTENT)
    for layer, cache in enumerate(caches.values()):
        for block in range(BLOCKS):
            assert values_of(rows[layer, block]) == values_of(cache[block])
    opening.close()
    assert not worker.held


@pytest.mark.parametrize("layout", ["LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_other_layouts_are_refused(host: FakeMemoryCalls, layout: str) -> None:
    with pytest.raises(NotShared, match="do not follow each other in memory"):
        exported(views(host.allocate(NUM_PAGES, legacy=True), layout), BLOCKS, host)


def test_the_strides_decide_and_not_the_name(host: FakeMemoryCalls) -> None:
    """With one KV head, as in latent attention, the order of heads and blocks makes no difference."""
    caches = views(host.allocate(NUM_PAGES, legacy=True), "LHBNC", num_heads=1)
    assert rows_of(list(caches.values()), BLOCKS).row_numel == HEADS * TOKENS * CONTENT


def test_blocks_that_attention_divides_are_rows_as_wholes(host: FakeMemoryCalls) -> None:
    caches = {
        name: layer.reshape(2 * BLOCKS, HEADS, TOKENS // 2, CONTENT)
        for name, layer in views(host.allocate(NUM_PAGES, legacy=True)).items()
    }
    assert rows_of(list(caches.values()), BLOCKS).row_numel == HEADS * TOKENS * CONTENT
    with pytest.raises(NotShared, match="has 16 blocks, which are not 5 equal parts"):
        rows_of(list(caches.values()), 5)


def test_layers_that_are_not_alike_are_refused(host: FakeMemoryCalls) -> None:
    layers = list(views(host.allocate(NUM_PAGES, legacy=True)).values())
    for one_more, reason in (
        (layers[0], "its layers do not follow"),  # it shares the first layer's KV
        (layers[0].view(torch.int32), "differ in shape, data type"),
        (layers[0][:, :1], "differ in shape"),
    ):
        with pytest.raises(NotShared, match=reason):
            rows_of([*layers, one_more], BLOCKS)
    with pytest.raises(NotShared, match="no layers"):
        rows_of([], BLOCKS)


def test_padded_blocks_are_refused(host: FakeMemoryCalls) -> None:
    memory = host.allocate(2 * NUM_PAGES, legacy=True).view(torch.float32)
    padded = memory.view(LAYERS, BLOCKS, 2, HEADS, TOKENS, CONTENT)[:, :, 0]
    with pytest.raises(NotShared, match="the blocks of a layer do not follow"):
        rows_of(list(padded.unbind(0)), BLOCKS)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_a_legacy_handle_is_of_the_whole_allocation(host: FakeMemoryCalls, worker: FakeMemoryCalls) -> None:
    memory = host.allocate(NUM_PAGES + 5, legacy=True)
    memory[: 3 * PAGE] = 77  # torch's other tensors in the segment
    caches = views(memory[3 * PAGE :])
    compute(caches)
    export = exported(caches, BLOCKS, host)
    assert export.memory.gpu is not None
    assert (export.memory.gpu.offset, export.memory.gpu.sizes, export.descriptors) == (3 * PAGE, [], [])
    opening = opened_by(worker, export)
    assert worker.held
    rows = rows_in(opening.cache)
    caches["layer.1"][6] = 8.5  # computed by vLLM
    assert values_of(rows[1, 6]) == [8.5]
    rows[2, 7] = 9.5  # received by the worker
    assert values_of(caches["layer.2"][7]) == [9.5]
    opening.close()
    assert not worker.held
    assert worker.num_waits == 2, "nothing may copy while it is closed"


@pytest.mark.parametrize(
    ("sizes", "before"),
    [
        pytest.param((NUM_PAGES,), 0, id="one"),
        pytest.param((5, 7, NUM_PAGES - 12), 0, id="three"),
        pytest.param((4, NUM_PAGES - 2, 3), 3, id="from the middle of the first to the middle of the last"),
        pytest.param((2, NUM_PAGES, 4), 2, id="from the second one on"),
    ],
)
def test_vmm_allocations_are_mapped_one_after_another(
    host: FakeMemoryCalls, worker: FakeMemoryCalls, sizes: tuple[int, ...], before: int
) -> None:
    memory = host.allocate(*sizes)
    caches = views(memory[before * PAGE :])
    compute(caches)
    export = exported(caches, BLOCKS, host)
    gpu = export.memory.gpu
    assert gpu is not None
    assert (gpu.handle, len(export.descriptors)) == ("", len(gpu.sizes))
    assert gpu.offset < gpu.sizes[0], "allocations before the cache are not shared"
    opening = opened_by(worker, export)
    close_all(export.descriptors)
    rows = rows_in(opening.cache)
    rows[:, 6] = torch.arange(LAYERS)[:, None] + 1.0
    assert [float(each[6].mean()) for each in caches.values()] == [1.0, 2.0, 3.0]
    opening.close()
    assert not worker.held
    assert not opening.cache.groups, "no tensor of memory that is not mapped any more"


@pytest.mark.parametrize(
    ("types", "sizes", "fails", "reason"),
    [
        pytest.param(0, (NUM_PAGES,), {}, "neither a legacy handle nor a file descriptor", id="vLLM's own in 0.32"),
        pytest.param(8, (NUM_PAGES,), {}, "neither a legacy handle nor a file descriptor", id="fabric handles"),
        pytest.param(1, (NUM_PAGES,), {"placed": 0}, "driver does not share it: CUDA's placed", id="unknown pointer"),
        pytest.param(1, (9, NUM_PAGES - 9), {"export": 1}, "driver does not share it", id="the second allocation"),
        pytest.param(1, (9, NUM_PAGES - 9), {"placed": 2}, "driver does not share it", id="asked for the second"),
        pytest.param(1, (1,) * NUM_PAGES, {}, f"more than {MAX_ALLOCATIONS} allocations", id="expandable segments"),
    ],
)
def test_memory_that_cannot_be_exported_has_a_reason_and_leaves_nothing(
    host: FakeMemoryCalls,
    monkeypatch: pytest.MonkeyPatch,
    types: int,
    sizes: tuple[int, ...],
    fails: dict[str, int],
    reason: str,
) -> None:
    if len(sizes) > 2:
        monkeypatch.setattr("engine.vllm.gpu_export.MAX_ALLOCATIONS", 4)
        reason = reason.replace(str(MAX_ALLOCATIONS), "4")
    caches = views(host.allocate(*sizes, types=types))
    host.fails = dict(fails)
    with no_descriptor_is_left(), pytest.raises(NotShared, match=reason):
        exported(caches, BLOCKS, host)


def test_a_legacy_handle_that_the_driver_refuses_is_a_reason(host: FakeMemoryCalls) -> None:
    caches = views(host.allocate(NUM_PAGES, legacy=True))
    host.fails = {"legacy_handle": 0}
    with pytest.raises(NotShared, match="the GPU's driver does not share it: CUDA's legacy_handle"):
        exported(caches, BLOCKS, host)


def test_a_cache_beyond_its_allocation_is_refused(host: FakeMemoryCalls) -> None:
    caches = views(host.allocate(NUM_PAGES - 1, 1, legacy=True))
    with pytest.raises(NotShared, match="longer than its allocation"):
        exported(caches, BLOCKS, host)


# -- in the worker -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("legacy", "fails"),
    [
        (True, {"open_handle": 0}),
        (True, {"bytes_at": 0}),
        (False, {"reserve": 0}),
        (False, {"map_descriptor": 0}),
        (False, {"map_descriptor": 1}),
        (False, {"allow": 0}),
        (False, {"bytes_at": 0}),
    ],
)
def test_a_worker_that_cannot_open_it_serves_without_kv_transfer(
    host: FakeMemoryCalls,
    worker: FakeMemoryCalls,
    caplog: pytest.LogCaptureFixture,
    legacy: bool,
    fails: dict[str, int],
) -> None:
    sizes = (NUM_PAGES,) if legacy else (9, NUM_PAGES - 9)
    caches = views(host.allocate(*sizes, legacy=legacy))
    compute(caches)
    export = exported(caches, BLOCKS, host)
    worker.fails = dict(fails)
    with caplog.at_level(logging.WARNING):
        opening = opened_by(worker, export)
    assert opening.ready.memory is None
    assert isinstance(opening.cache, KVCache)
    assert opening.cache.spec.num_layers == 0
    assert f"this process cannot open it: CUDA's {next(iter(fails))}: operation not supported" in caplog.text
    assert not worker.held
    opening.close()
    close_all(export.descriptors)


def test_a_worker_without_that_gpu_serves_without_kv_transfer(host: FakeMemoryCalls) -> None:
    caches = views(host.allocate(NUM_PAGES, legacy=True))
    opening = opened(ready_with(exported(caches, BLOCKS, host).memory), -1, [])
    assert opening.ready.memory is None
    assert opening.ready.why_not_shared == "this process cannot open it: this process's torch finds no GPU GPU-fake"


def test_descriptors_that_are_missing_are_noticed(host: FakeMemoryCalls, worker: FakeMemoryCalls) -> None:
    caches = views(host.allocate(9, NUM_PAGES - 9))
    export = exported(caches, BLOCKS, host)
    close_all(export.descriptors)
    opening = opened_by(worker, export)
    assert opening.ready.why_not_shared.endswith("the host sent 0 descriptors of 2 allocations")
    assert not worker.held


@pytest.mark.parametrize("legacy", [True, False])
def test_a_wrong_idea_of_the_layout_is_found_at_the_start(
    host: FakeMemoryCalls, worker: FakeMemoryCalls, legacy: bool
) -> None:
    """Some attention backends have written a pool in another layout than its tensors' strides declare."""
    memory = host.allocate(NUM_PAGES, legacy=legacy)
    compute(views(memory, "BLHNC"))
    export = exported(views(memory, "LBHNC"), BLOCKS, host)
    with pytest.raises(ModelLoadError, match="is not laid out as vLLM declares"):
        opened_by(worker, export)
    assert not worker.held
    close_all(export.descriptors)


def test_every_layout_that_is_written_otherwise_is_found(host: FakeMemoryCalls, worker: FakeMemoryCalls) -> None:
    """Another order of values within the rows changes the tag, not the places of the rows."""
    for written in ORDERS:
        memory = host.allocate(NUM_PAGES, legacy=True)
        compute(views(memory, written))
        export = exported(views(memory), BLOCKS, host)
        if written in ("LBHNC", "LBNHC"):
            opened_by(worker, export).close()
        else:
            with pytest.raises(ModelLoadError):
                opened_by(worker, export)
        assert not worker.held


def test_descriptors_come_with_the_hosts_description(host: FakeMemoryCalls, worker: FakeMemoryCalls) -> None:
    caches = views(host.allocate(9, NUM_PAGES - 9))
    compute(caches)
    export = exported(caches, BLOCKS, host)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        Channel(theirs).send(ready_with(export.memory._replace(probe=PROBE)), export.descriptors)
        close_all(export.descriptors)
        (ready,) = channel.receive()
    assert isinstance(ready, Ready)
    assert ready.memory is not None
    assert isinstance(ready.memory.gpu, GpuMemory)
    assert len(channel.descriptors) == 2
    assert not any(os.get_inheritable(each) for each in channel.descriptors), "no child of the worker has them"
    opening = opened(ready, -1, channel.descriptors, lambda uuid: Gpu(torch.device("cpu"), worker))
    close_all(channel.descriptors)
    assert values_of(rows_in(opening.cache)[2, 4]) == [304.0]
    opening.close()


def test_as_many_descriptors_as_a_cache_may_have_fit_into_a_message(host: FakeMemoryCalls) -> None:
    descriptors = [os.memfd_create("one") for _ in range(MAX_ALLOCATIONS)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        Channel(theirs).send(READY, descriptors)
        (ready,) = channel.receive()
    assert ready == READY
    assert len(channel.descriptors) == MAX_ALLOCATIONS
    close_all(descriptors)
    close_all(channel.descriptors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.uint8])
def test_the_kv_transfer_copies_between_two_such_caches(
    host: FakeMemoryCalls, worker: FakeMemoryCalls, dtype: torch.dtype
) -> None:
    with fake_gpus(1) as (gpu,):
        sides = []
        for _ in range(2):
            memory = host.allocate(NUM_PAGES, types=BY_DESCRIPTOR)
            caches = {name: layer.view(dtype) for name, layer in views(memory).items()}
            compute(views(memory))
            export = exported(caches, BLOCKS, host)
            spec = _spec_of(export.memory)
            cache = GpuCache(
                export.memory._replace(probe=PROBE), export.descriptors, spec, Gpu(gpu.device, FakeMemoryCalls())
            )
            close_all(export.descriptors)
            sides.append((cache, memory[:NUM_BYTES].view(LAYERS, BLOCKS, -1)))
        (source, source_rows), (target, target_rows) = sides
        layout = layout_of(source.spec, 1)
        source_rows[:, 5:7] = torch.randint(1, 100, (LAYERS, 2, source_rows.shape[2]), dtype=torch.uint8)
        planned = plan(layout, 0, layout, 0, 2 * TOKENS, (0,), WireOptions(1 << 20, 2 * TOKENS, "auto"))
        ours = BlockCopier(source, planned, layout, 0, ((5, 6),))
        theirs = BlockCopier(target, planned, layout, 0, ((2, 7),))
        for chunk in planned.chunks:
            payload = torch.zeros(chunk.num_bytes, dtype=torch.uint8)
            checksum = ours.begin_gather(chunk, payload, None, True).end()
            assert theirs.begin_scatter(chunk, payload, True).end() == checksum
        assert torch.equal(target_rows[:, [2, 7]], source_rows[:, 5:7])
        assert not target_rows[:, 1].any()
        source.close()
        target.close()


def _spec_of(memory: KvMemory) -> KVSpec:
    return spec_of(ready_with(memory))

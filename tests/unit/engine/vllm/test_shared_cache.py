"""vLLM's cache in memory that two processes map: the place of each block, and the check of the host's probe."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
import torch

from baton.errors import ModelLoadError
from engine.core.runner import KVSpec, PageOrder
from engine.vllm.messages import Group, KvMemory
from engine.vllm.shared_cache import SharedCache, spec_of
from tests.unit.engine.vllm.test_messages import READY
from worker.member import wire_compat

MEMORY = KvMemory(num_layers=2, num_blocks=9, row_numel=64, dtype="float32", probe=[3, 4])
SPEC = spec_of(READY._replace(groups=[Group("full", 2, 32, 0)], memory=MEMORY))


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 2 * 9 * 64 * 4)
    yield descriptor
    os.close(descriptor)


def host_side(descriptor: int) -> torch.Tensor:
    """The cache as the host has it: `[layer, block, row]`."""
    return torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.float32).view(2, 9, 64)


def test_it_is_the_hosts_memory(descriptor: int) -> None:
    rows = host_side(descriptor)
    rows[:, 3:5] = 1.0
    cache = SharedCache(descriptor, MEMORY, SPEC)
    (group,) = cache.groups
    assert (group.shape, group.dtype, cache.table_sizes, cache.states) == ((2, 9, 64), torch.float32, (9,), {})
    rows[1, 7, 5] = 2.5
    group[0, 8] = 3.5
    assert group[1, 7, 5] == 2.5
    assert rows[0, 8, 63] == 3.5


def test_it_needs_no_descriptor_afterwards(descriptor: int) -> None:
    host_side(descriptor)[:, 3:5] = 1.0
    own = os.dup(descriptor)
    cache = SharedCache(own, MEMORY, SPEC)
    os.close(own)
    host_side(descriptor)[0, 3, 0] = 7.0
    assert cache.groups[0][0, 3, 0] == 7.0


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(lambda rows: None, id="nothing"),
        pytest.param(lambda rows: rows[0, 3:5].fill_(1), id="one layer"),
        pytest.param(lambda rows: rows[:, 3].fill_(1), id="one block"),
        pytest.param(lambda rows: rows[:, 2:5].fill_(1), id="the block before"),
        pytest.param(lambda rows: rows[:, 3:6].fill_(1), id="the block after"),
        pytest.param(lambda rows: rows.view(9, 2, 64)[3:5].fill_(1), id="blocks before layers"),
        pytest.param(lambda rows: rows.fill_(1), id="everything"),
    ],
)
def test_another_layout_is_noticed(descriptor: int, written: object) -> None:
    assert callable(written)
    written(host_side(descriptor))
    with pytest.raises(ModelLoadError, match=r"is not laid out as vLLM declares; set router.mode to aggregated"):
        SharedCache(descriptor, MEMORY, SPEC)


@pytest.mark.parametrize("probe", [[1], [8], [1, 2, 3, 4, 5, 6, 7, 8], [8, 1], [2, 5]])
def test_blocks_at_the_edges_and_apart_are_no_reason(descriptor: int, probe: list[int]) -> None:
    """Block 0, the null block, may have any content."""
    rows = host_side(descriptor)
    rows[:, probe] = -0.5
    rows[:, 0] = 9.0
    SharedCache(descriptor, MEMORY._replace(probe=probe), SPEC)


def test_a_tiny_value_is_content_too(descriptor: int) -> None:
    rows = host_side(descriptor)
    rows[:, 3:5, 11] = 1e-45
    SharedCache(descriptor, MEMORY, SPEC)


def test_the_spec_says_how_blocks_may_be_copied() -> None:
    (group,) = SPEC.groups
    assert (group.layers, group.block_size, group.row_numel, group.dtype) == ((0, 1), 32, 64, "float32")
    assert (group.page_order, group.tag) == (PageOrder.OPAQUE, READY.tag)
    assert not SPEC.whole_prompts
    assert spec_of(READY._replace(caches_prefixes=False)).whole_prompts


def test_without_shared_memory_the_spec_only_names_prefixes() -> None:
    spec = spec_of(READY._replace(memory=None))
    assert isinstance(spec, KVSpec)
    assert (spec.num_layers, spec.block_size) == (0, 32)
    assert spec_of(READY._replace(memory=None, groups=[])).block_size == 16


def test_workers_without_shared_memory_are_not_paired() -> None:
    """Workers with the same layout are compatible, also if the sizes of their pools differ."""
    unshared = READY._replace(memory=None)
    assert wire_compat("model", spec_of(unshared)) != wire_compat("model", spec_of(unshared))
    assert READY.memory is not None
    larger = READY._replace(memory=READY.memory._replace(num_blocks=999))
    assert wire_compat("model", spec_of(READY)) == wire_compat("model", spec_of(larger))

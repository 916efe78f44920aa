"""Moves between caches of all layouts, from the gather at one rank to the scatter at another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import TransferError
from baton.kv_layout import GroupLayout, KvLayout, StateLayout
from engine.core.runner import EMPTY_PLACE, BlockTables
from engine.model.kv_cache import KVCache, rounded, torch_dtype
from kvstore.transfer.copy.blocks import BlockCopier, choose_copies
from kvstore.transfer.copy.checksum import Xxh3
from kvstore.transfer.protocol.plan import Chunk, TransferPlan, WireOptions, heads_of, plan, rank_spec, source_ranks

torch.set_num_threads(1)

NUM_TOKENS_OF_POOL = 1024
NUM_STATE_SLOTS = 3
OPTIONS = WireOptions(32768, 96, "auto")

Pages = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each group of the model, `[layers, heads, tokens, dim]`."""


def layout(tp_size: int = 1, block_size: int = 16, num_heads: int = 6, dtype: str = "float32") -> KvLayout:
    return KvLayout(
        block_size,
        tp_size,
        (
            GroupLayout(name="full", layers=(0, 2, 3), num_kv_heads=num_heads, k_dim=8, v_dim=8, dtype=dtype),
            GroupLayout(name="latent", layers=(1,), num_kv_heads=1, k_dim=24, v_dim=8, dtype=dtype),
            GroupLayout(name="keys", layers=(4, 5), num_kv_heads=num_heads, k_dim=8, v_dim=0, dtype=dtype),
        ),
    )


def random_pages(layout: KvLayout, num_tokens: int, seed: int) -> Pages:
    generator = torch.Generator().manual_seed(seed)

    def of(group: GroupLayout, dim: int) -> torch.Tensor:
        values = torch.randn(len(group.layers), group.num_kv_heads, num_tokens, dim, generator=generator)
        return rounded(values * 1000, torch_dtype(group.dtype))

    return [(of(group, group.k_dim), of(group, group.v_dim)) for group in layout.groups]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One rank's cache and the sequence's place in it."""

    layout: KvLayout
    rank: int
    cache: KVCache
    block_ids: list[int]
    state_slot: int

    @property
    def tables(self) -> BlockTables:
        states = ((self.state_slot,),) if self.layout.states else ()
        return (tuple(self.block_ids),) * len(self.layout.groups) + states

    def rows(self, planned: TransferPlan) -> BlockCopier:
        return BlockCopier(self.cache, planned, self.layout, self.rank, self.tables)

    def write(self, pages: Pages, tokens: range, group: int, layer: int) -> None:
        """What computing `tokens` in one layer of a group does."""
        heads = heads_of(self.layout.groups[group], self.layout.tp_size, self.rank)
        for part, values in zip(self.parts(group), pages[group], strict=True):
            for token in tokens:
                part[layer, self.block_ids[token // self.layout.block_size], :, token % self.layout.block_size] = (
                    values[layer, heads.start : heads.stop, token]
                )

    def read(self, group: int, tokens: range) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the rank's heads, `[layers, heads, tokens, dim]`."""
        blocks = [self.block_ids[token // self.layout.block_size] for token in tokens]
        offsets = [token % self.layout.block_size for token in tokens]
        k, v = (part[:, blocks, :, offsets].permute(1, 2, 0, 3) for part in self.parts(group))
        return k, v

    def parts(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A group's K and V, `[layers, blocks, heads, block_size, dim]`; share memory with the cache."""
        spec, size = self.cache.spec.groups[group], self.layout.block_size
        pages = self.cache.groups[group].view(len(spec.layers), self.cache.num_blocks, spec.num_kv_heads, -1)
        k, v = pages[..., : size * spec.k_dim], pages[..., size * spec.k_dim :]
        return k.view(*k.shape[:3], size, spec.k_dim), v.view(*v.shape[:3], size, spec.v_dim)


def make_side(layout: KvLayout, rank: int, num_tokens: int, seed: int, device: str = "cpu") -> Side:
    """Blocks in random order; everything in the cache is NaN, or for integers -1."""
    num_blocks = NUM_TOKENS_OF_POOL // layout.block_size
    cache = KVCache(rank_spec(layout, rank), num_blocks, NUM_STATE_SLOTS, torch.device(device))
    for tensor in (*cache.groups, *cache.states.values()):
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    num_used = -(-num_tokens // layout.block_size)
    return Side(
        layout=layout,
        rank=rank,
        cache=cache,
        block_ids=random.Random(seed).sample(range(num_blocks), num_used),
        state_slot=seed % NUM_STATE_SLOTS,
    )


def make_source(layout: KvLayout, rank: int, pages: Pages, seed: int = 0) -> Side:
    num_tokens = pages[0][0].shape[2]
    side = make_side(layout, rank, num_tokens, seed)
    for group, group_layout in enumerate(layout.groups):
        for layer in range(len(group_layout.layers)):
            side.write(pages, range(num_tokens), group, layer)
    return side


def move(
    source: Side, destination: Side, num_tokens: int, skip: int = 0, options: WireOptions = OPTIONS
) -> TransferPlan:
    begins = (skip,) * len(source.layout.groups)
    planned = plan(source.layout, source.rank, destination.layout, destination.rank, num_tokens, begins, options)
    ours, theirs = source.rows(planned), destination.rows(planned)
    slot = torch.empty(64 + options.chunk_bytes, dtype=torch.uint8)
    for chunk in planned.chunks:
        payload = slot[64 : 64 + chunk.num_bytes]
        gathered, scattered = Xxh3(), Xxh3()
        ours.gather(chunk, payload, checksum=gathered)
        theirs.scatter(chunk, payload, scattered)
        assert gathered.digest() == scattered.digest() == xxhash.xxh3_64_intdigest(payload.numpy().data)
    return planned


def move_all(sources: Sequence[Side], destinations: Sequence[Side], num_tokens: int, skip: int = 0) -> None:
    for destination in destinations:
        for rank in source_ranks(sources[0].layout, destination.layout, destination.rank):
            move(sources[rank], destination, num_tokens, skip)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_arrived(destination: Side, pages: Pages, tokens: range) -> None:
    """These tokens are there bit for bit, the rest of the last block has no NaN, and nothing else was touched."""
    size, tp_size = destination.layout.block_size, destination.layout.tp_size
    written = set(destination.block_ids[tokens.start // size :])
    untouched = [block for block in range(destination.cache.num_blocks) if block not in written]
    for group, group_layout in enumerate(destination.layout.groups):
        heads = heads_of(group_layout, tp_size, destination.rank)
        for got, want in zip(destination.read(group, tokens), pages[group], strict=True):
            assert same_bits(got, want[:, heads.start : heads.stop, tokens.start : tokens.stop])
        cache = destination.cache.groups[group]
        assert bool(cache[:, untouched].float().isnan().all())


@settings(max_examples=20)
@given(
    src=st.tuples(st.sampled_from([1, 2, 3, 6, 12]), st.sampled_from([16, 32, 64])),
    dst=st.tuples(st.sampled_from([1, 2, 3, 6, 12]), st.sampled_from([16, 32, 64])),
    num_heads=st.sampled_from([3, 6]),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
    num_tokens=st.integers(1, 200),
    skip_blocks=st.integers(0, 6),
)
def test_every_move_arrives_bit_for_bit(
    src: tuple[int, int], dst: tuple[int, int], num_heads: int, dtype: str, num_tokens: int, skip_blocks: int
) -> None:
    tp_sizes = [tp if max(tp, num_heads) % min(tp, num_heads) == 0 else 1 for tp in (src[0], dst[0])]
    source_layout = layout(tp_sizes[0], src[1], num_heads, dtype)
    destination_layout = layout(tp_sizes[1], dst[1], num_heads, dtype)
    pages = random_pages(source_layout, num_tokens, seed=num_tokens)
    skip = min(skip_blocks, num_tokens // dst[1]) * dst[1]
    sources = [make_source(source_layout, rank, pages, seed=rank) for rank in range(tp_sizes[0])]
    destinations = [make_side(destination_layout, rank, num_tokens, seed=7 + rank) for rank in range(tp_sizes[1])]
    move_all(sources, destinations, num_tokens, skip)
    for destination in destinations:
        assert_arrived(destination, pages, range(skip, num_tokens))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        pytest.param(layout(1, num_heads=3), layout(3, num_heads=3), id="1 to 3 ranks"),
        pytest.param(layout(3, num_heads=3), layout(1, num_heads=3), id="3 to 1"),
        pytest.param(layout(3, num_heads=3), layout(3, num_heads=3), id="3 to 3"),
        pytest.param(layout(6, num_heads=3), layout(3, num_heads=3), id="6, each head twice, to 3"),
        pytest.param(layout(2), layout(3), id="2 to 3, which share one or two heads of six"),
        pytest.param(layout(block_size=16), layout(block_size=32), id="blocks of 16 to 32"),
        pytest.param(layout(block_size=32), layout(block_size=16), id="32 to 16"),
        pytest.param(layout(block_size=64), layout(block_size=16), id="64 to 16"),
        pytest.param(layout(2, 32), layout(6, 64, dtype="float32"), id="both"),
    ],
)
@pytest.mark.parametrize(("num_tokens", "skip"), [(128, 0), (150, 64), (1, 0), (65, 64)])
def test_a_move_and_the_block_after_the_last_token(src: KvLayout, dst: KvLayout, num_tokens: int, skip: int) -> None:
    """A destination whose last block is filled in part has zeros behind it: another's NaN would spoil attention."""
    pages = random_pages(src, num_tokens, seed=1)
    sources = [make_source(src, rank, pages) for rank in range(src.tp_size)]
    for source in sources:  # as the engine does for the blocks that it begins
        for tensor in source.cache.groups:
            tensor.nan_to_num_(0.0)
    destinations = [make_side(dst, rank, num_tokens, seed=9) for rank in range(dst.tp_size)]
    move_all(sources, destinations, num_tokens, skip)
    for destination in destinations:
        assert_arrived(destination, pages, range(skip, num_tokens))
        for tensor in destination.cache.groups:
            assert not tensor[:, destination.block_ids[-1]].isnan().any()


def test_a_block_that_the_cache_does_not_have_is_refused() -> None:
    side = make_side(layout(), 0, 64, seed=1)
    planned = plan(side.layout, 0, side.layout, 0, 64, (0, 0, 0), OPTIONS)
    for block in (-2, side.cache.num_blocks):
        with pytest.raises(ValueError, match="does not have all of"):
            BlockCopier(side.cache, planned, side.layout, 0, ((0, 1, 2, block),) * len(side.layout.groups))


def test_what_travels_from_an_empty_place_is_no_junk() -> None:
    """Nothing reads it at the other side, but a NaN there would spoil a masked sum."""
    pages = random_pages(layout(), 64, seed=1)
    source, destination = make_source(layout(), 0, pages), make_side(layout(), 0, 64, seed=9)
    emptied = replace(source, block_ids=[EMPTY_PLACE, EMPTY_PLACE, *source.block_ids[2:]])
    move(emptied, destination, 64)
    for group in range(len(pages)):
        for got, want in zip(destination.read(group, range(64)), pages[group], strict=True):
            assert same_bits(got[:, :, 32:], want[:, :, 32:])
            assert not got.isnan().any()


def test_a_block_that_has_left_a_window_and_a_state_that_is_not_there_are_not_copied() -> None:
    full, *others = layout().groups
    stateful = replace(
        layout(), groups=(replace(full, window=20), *others), states=(StateLayout("conv", (5,), "float32"),)
    )
    side = make_source(stateful, 0, random_pages(stateful, 64, seed=1))
    planned = plan(stateful, 0, stateful, 0, 64, (0, 0, 0), OPTIONS)
    assert planned.begins == (32, 0, 0)
    window = next(chunk for chunk in planned.chunks if chunk.part == 0)
    state = planned.chunks[-1]
    blocks = tuple(side.block_ids)

    def gather(chunk: Chunk, windowed: tuple[int, ...], row: tuple[int, ...]) -> torch.Tensor:
        payload = torch.empty(chunk.num_bytes, dtype=torch.uint8)
        copier = BlockCopier(side.cache, planned, stateful, 0, ((), (), (), ()))
        copier.extend((windowed, blocks, blocks, row))
        copier.gather(chunk, payload)
        return payload

    gone = (EMPTY_PLACE,)
    assert same_bits(gather(window, blocks, ()), gather(window, (*gone * 2, *blocks[2:]), gone))
    with pytest.raises(TransferError, match="a block has left the window before it was sent"):
        gather(window, (*gone * 3, *blocks[3:]), (1, 2))
    assert same_bits(gather(state, gone * 4, (1, 2)), side.cache.states["conv"][1])
    for row in ((), gone, (EMPTY_PLACE, 1)):
        with pytest.raises(TransferError, match="no row with its states"):
            gather(state, blocks, row)


def test_a_model_may_have_states_and_no_layer_with_kv() -> None:
    names = GroupLayout(name="names", layers=(), num_kv_heads=1, k_dim=0, v_dim=0, dtype="bfloat16")
    bare = KvLayout(16, 1, (names,), (StateLayout("conv", (5,), "float32"),))
    source, destination = make_side(bare, 0, 64, seed=1), make_side(bare, 0, 64, seed=2)
    source.cache.states["conv"][1] = 3.0
    choose_copies([source.cache])
    move(source, destination, 64)
    assert bool((destination.cache.states["conv"][2] == 3.0).all())


def test_integers_travel_as_they_are() -> None:
    """As in the arithmetic engine, whose answers would show one changed bit."""
    numbers = KvLayout(
        16, 1, (GroupLayout(name="all", layers=(0, 1), num_kv_heads=1, k_dim=1, v_dim=1, dtype="int64"),)
    )
    pages = [(torch.arange(2 * 40).view(2, 1, 40, 1) + 2**60, torch.arange(2 * 40).view(2, 1, 40, 1) - 2**60)]
    source, destination = make_source(numbers, 0, pages), make_side(replace(numbers, block_size=32), 0, 40, 5)
    move(source, destination, 40, options=replace(OPTIONS, wire_dtype="int8"))
    k, v = destination.read(0, range(40))
    assert torch.equal(k, pages[0][0])
    assert torch.equal(v, pages[0][1])


@pytest.mark.parametrize("wire_dtype", ["auto", "int8"])
def test_pages_of_codes_travel_as_they_are(wire_dtype: str) -> None:
    """They are int8 by themselves, and have their scales within."""
    codes = KvLayout(16, 1, (GroupLayout(name="all", layers=(0, 1), num_kv_heads=2, k_dim=12, v_dim=8, dtype="int8"),))
    generator = torch.Generator().manual_seed(3)
    k, v = (torch.randint(-128, 128, (2, 2, 40, dim), dtype=torch.int8, generator=generator) for dim in (12, 8))
    source, destination = make_source(codes, 0, [(k, v)]), make_side(replace(codes, block_size=32), 0, 40, 5)
    planned = move(source, destination, 40, options=replace(OPTIONS, wire_dtype=wire_dtype))
    num_units = 2 * 3 * 2  # layers, units of 16 tokens, heads
    assert sum(chunk.num_bytes for chunk in planned.chunks) == num_units * 16 * (12 + 8)
    for ours, theirs in zip((k, v), destination.read(0, range(40)), strict=True):
        assert torch.equal(ours, theirs)
    for behind in destination.read(0, range(48, 64)):
        assert not behind.any()


def test_states_travel_whole_and_alone() -> None:
    states = (StateLayout("conv", (3, 2801), "float32"), StateLayout("sum", (1,), "int64"))
    stateful = replace(layout(3, num_heads=3), states=states)
    pages = random_pages(stateful, 20, seed=1)
    source, destination = make_source(stateful, 1, pages, seed=1), make_side(stateful, 1, 20, seed=2)
    source.cache.states["conv"][source.state_slot] = torch.randn(3, 2801)
    source.cache.states["sum"][source.state_slot] = 2**62 + 1
    planned = move(source, destination, 20)
    assert [c.num_bytes for c in planned.chunks if c.part == 3] == [32768, 3 * 2801 * 4 - 32768]
    for name, tensor in destination.cache.states.items():
        assert same_bits(tensor[destination.state_slot], source.cache.states[name][source.state_slot])
        others = tensor[[slot for slot in range(NUM_STATE_SLOTS) if slot != destination.state_slot]]
        assert bool((others.isnan() | (others == -1)).all())
    assert_arrived(destination, pages, range(20))
    with pytest.raises(ValueError, match="a sequence has 4 block tables here, got 3"):
        BlockCopier(source.cache, planned, stateful, 1, source.tables[:-1])


@settings(max_examples=15)
@given(
    prefill_chunk=st.integers(1, 130),
    block_sizes=st.tuples(st.sampled_from([16, 32]), st.sampled_from([16, 32])),
    skip_blocks=st.integers(0, 2),
    span_tokens=st.sampled_from([16, 64, 512]),
    wire=st.sampled_from(["auto", "int8"]),
)
def test_what_is_ready_does_not_change_any_more(
    prefill_chunk: int, block_sizes: tuple[int, int], skip_blocks: int, span_tokens: int, wire: str
) -> None:
    """The prompt is computed in chunks, layer by layer, and everything leaves the moment it may."""
    num_tokens, num_layers = 150, 6
    stateful = replace(layout(1, block_sizes[0], 3), states=(StateLayout("conv", (5,), "float32"),))
    target = replace(stateful, block_size=block_sizes[1])
    pages = random_pages(stateful, num_tokens, seed=3)
    source, destination = make_side(stateful, 0, num_tokens, 1), make_side(target, 0, num_tokens, 2)
    skip = skip_blocks * block_sizes[1]
    planned = plan(stateful, 0, target, 0, num_tokens, (skip,) * 3, WireOptions(16384, span_tokens, wire))
    ours, theirs = source.rows(planned), destination.rows(planned)
    waiting = list(planned.chunks)
    num_early = 0

    def send_what_is_ready(num_done: int, num_current: int, num_current_layers: int) -> int:
        sent = 0
        while waiting:
            tokens, layers = planned.ready_at(waiting[0])
            if tokens > num_done and (tokens > num_current or layers > num_current_layers):
                break
            chunk = waiting.pop(0)
            payload = torch.empty(chunk.num_bytes, dtype=torch.uint8)
            ours.gather(chunk, payload)
            theirs.scatter(chunk, payload)
            sent += 1
        return sent

    for start in range(0, num_tokens, prefill_chunk):
        end = min(start + prefill_chunk, num_tokens)
        for layer in range(num_layers):
            for group, group_layout in enumerate(stateful.groups):
                if layer in group_layout.layers:
                    source.write(pages, range(start, end), group, group_layout.layers.index(layer))
            num_early += send_what_is_ready(start, end, layer + 1)
        source.cache.states["conv"][source.state_slot] = float(end)
        send_what_is_ready(end, end, num_layers)
    assert not waiting
    assert num_early >= 4
    again = make_side(target, 0, num_tokens, 2)
    move(source, again, num_tokens, skip, planned.options)
    for early, late in zip(
        (*destination.cache.groups, *destination.cache.states.values()),
        (*again.cache.groups, *again.cache.states.values()),
        strict=True,
    ):
        assert same_bits(early, late)


@pytest.mark.parametrize(
    ("src", "dst", "wire", "relative_error"),
    [
        ("float32", "bfloat16", "auto", 2**-8),
        ("bfloat16", "float32", "auto", 0.0),
        ("float32", "float32", "bfloat16", 2**-8),
        ("float32", "float32", "float16", 2**-11),
        ("bfloat16", "bfloat16", "float32", 0.0),
    ],
)
def test_floats_are_rounded_once(src: str, dst: str, wire: str, relative_error: float) -> None:
    source_layout, destination_layout = layout(dtype=src), layout(3, 32, dtype=dst)
    pages = random_pages(source_layout, 40, seed=2)
    source = make_source(source_layout, 0, pages)
    for rank in range(3):
        destination = make_side(destination_layout, rank, 40, seed=4)
        move(source, destination, 40, options=replace(OPTIONS, wire_dtype=wire))
        for group, group_layout in enumerate(destination_layout.groups):
            heads = heads_of(group_layout, 3, rank)
            for got, values in zip(destination.read(group, range(40)), pages[group], strict=True):
                want = values[:, heads.start : heads.stop].float()
                assert bool(((got.float() - want).abs() <= relative_error * want.abs()).all())
                assert relative_error == 0.0 or not want.numel() or not torch.equal(got.float(), want)


@pytest.mark.parametrize("junk", [0.0, 1e30, float("inf"), float("nan")])
@pytest.mark.parametrize("block_sizes", [(16, 16), (32, 16), (16, 32)])
def test_int8_keeps_every_value_within_half_a_step_of_its_page(junk: float, block_sizes: tuple[int, int]) -> None:
    """Whatever lies behind the last token: it must not widen a scale."""
    num_tokens = 39
    source_layout, destination_layout = layout(1, block_sizes[0]), layout(3, block_sizes[1])
    pages = random_pages(source_layout, num_tokens, seed=2)
    pages[0][0][1, 2, :16] = 0.0  # a page of zeros
    pages[0][1][1, 2, 16:32] = 1e-44  # smaller than any normal float32
    source = make_source(source_layout, 0, pages)
    for tensor in source.cache.groups:
        tensor.nan_to_num_(junk)
    for rank in range(3):
        destination = make_side(destination_layout, rank, num_tokens, seed=4)
        planned = move(source, destination, num_tokens, options=replace(OPTIONS, wire_dtype="int8"))
        assert all(group.dtype == "int8" for group in planned.groups)
        for group, group_layout in enumerate(destination_layout.groups):
            heads = heads_of(group_layout, 3, rank)
            for got, values in zip(destination.read(group, range(num_tokens)), pages[group], strict=True):
                want = values[:, heads.start : heads.stop]
                for start in range(0, num_tokens, 16):
                    page, expected = got[:, :, start : start + 16], want[:, :, start : start + 16]
                    if page.numel():
                        step = expected.abs().amax((2, 3), keepdim=True) / 127
                        assert bool(((page - expected).abs() <= step / 2 * 1.0001 + 1e-38).all())
            assert bool(destination.cache.groups[group][:, destination.block_ids].isfinite().all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch")
@pytest.mark.parametrize("slot_device", ["cpu", "cuda"])
@pytest.mark.parametrize(("wire", "dtype"), [("auto", "float32"), ("int8", "float32"), ("auto", "float8_e4m3fn")])
def test_on_a_gpu_a_gather_waits_for_its_fence_on_a_stream_of_its_own(slot_device: str, wire: str, dtype: str) -> None:
    src, dst, num_tokens = layout(dtype=dtype), layout(3, 32, dtype=dtype), 150
    pages = random_pages(src, num_tokens, seed=1)
    computed = make_source(src, 0, pages)
    source = make_side(src, 0, num_tokens, 0, "cuda")
    ready = [tensor.cuda() for tensor in computed.cache.groups]
    compute, copy = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for rank in range(3):
        want, destination = make_side(dst, rank, num_tokens, 3), make_side(dst, rank, num_tokens, 3, "cuda")
        move(computed, want, num_tokens, options=replace(OPTIONS, wire_dtype=wire))
        planned = plan(src, 0, dst, rank, num_tokens, (0, 0, 0), replace(OPTIONS, wire_dtype=wire))
        ours = BlockCopier(source.cache, planned, src, 0, source.tables)
        theirs = BlockCopier(destination.cache, planned, dst, rank, destination.tables)
        fence = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(compute):
            # Tens of milliseconds before the KV is there.
            torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
            for tensor, values in zip(source.cache.groups, ready, strict=True):
                tensor.copy_(values)
            fence.record()
        with torch.cuda.stream(copy):
            for chunk in planned.chunks:
                payload = torch.empty(chunk.num_bytes, dtype=torch.uint8, device=slot_device)
                ours.gather(chunk, payload, fence)
                theirs.scatter(chunk, payload)
        for got, expected in zip(destination.cache.groups, want.cache.groups, strict=True):
            assert same_bits(got.cpu(), expected)
        torch.cuda.synchronize()
        for tensor in source.cache.groups:
            tensor.fill_(float("nan"))
        torch.cuda.synchronize()

"""Transfers of models with states and windows: the missing blocks of each layer group, and one row of states."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from opentelemetry.context import Context

from baton.blocks import block_keys
from baton.errors import TransferCorrupted, TransferError, TransferRefused
from baton.messages import FirstToken, NewTokens, PrefillRequest, Ticket, Transferred
from decode_worker.service import DecodeService
from engine.core.runner import EMPTY_PLACE, KVSpec
from engine.core.sequence import Purpose
from engine.model.kv_cache import KVCache
from engine.testing import ArithmeticRunner, expected_tokens
from kvstore.transfer.connection.reservations import Arrival, Expected
from kvstore.transfer.protocol.plan import layout_of, rank_spec
from prefill_worker.service import PrefillService
from tests.unit.kvstore.transfer.peers import (
    NUM_BLOCKS,
    SPEC,
    Worker,
    decode_side,
    engine_worker,
    filled_cache,
    is_blank,
    make_spec,
    prefill_side,
    read_all,
    scattered,
    send,
    tables_of,
    with_link,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["shm", "tcp"])
def link(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


def with_window(window: int) -> KVSpec:
    """SPEC whose second group has a window."""
    return dataclasses.replace(SPEC, groups=(SPEC.groups[0], dataclasses.replace(SPEC.groups[1], window=window)))


def is_blank_states(cache: KVCache, but_not: int) -> bool:
    return not any(state[[row for row in range(8) if row != but_not]].any() for state in cache.states.values())


async def test_each_group_receives_what_it_lacks_of_its_window(link: str) -> None:
    """The blocks before the window are on neither side; the row of the states is known only at the end."""
    spec, config = with_window(40), with_link(link)
    caches = [filled_cache(1, spec)], [KVCache(spec, NUM_BLOCKS, 8)]
    async with decode_side(config, caches=caches[1]) as decode, prefill_side(config, caches=caches[0]) as prefill:
        source, target, gone = scattered(13, 1), scattered(13, 2), (EMPTY_PLACE,) * 10
        for number, (begins, first) in enumerate((((), 10), ((96, 176), 11), ((208, 208), 13))):
            for tensor in (*decode.cache.groups, *decode.cache.states.values()):
                tensor.zero_()
            skip = begins[0] if begins else 0
            tables = (tuple(target), (*gone, *target[10:]), (5, 6))
            ticket = decode.receiver.expect(f"t{number}", 208, skip, tables, begins=begins)
            async with prefill.sender.transfer(ticket) as transfer:
                transfer.extend((tuple(source[:7]), tuple(source[:7]), ()))
                transfer.advance(100, 2)
                transfer.extend((tuple(source), (*gone, *source[10:]), (EMPTY_PLACE, 2)))
                transfer.advance(208, 5)
                transfer.extend((tuple(source), (*gone, *source[10:]), (2, 1)))
                transferred = await transfer.finish(1234)
            assert await decode.receiver.wait_committed(ticket) == Arrival(208, 1234)
            assert await decode.receiver.release(ticket) == tables
            sent = [source[skip // 16 :], source[first:]]
            for index, (blocks, group) in enumerate(zip(sent, spec.groups, strict=True)):
                there, start = decode.cache.groups[index], 13 - len(blocks)
                assert torch.equal(there[:, target[start:]], prefill.cache.groups[index][:, blocks])
                assert is_blank(decode.cache, [b for b in range(NUM_BLOCKS) if b not in target[start:]], group=index)
                assert len(group.layers) == len(there)
            assert torch.equal(decode.cache.states["conv"][5], prefill.cache.states["conv"][2])
            assert is_blank_states(decode.cache, but_not=5)
            num_bytes = (len(group.layers) * group.row_bytes for group in spec.groups)
            assert transferred.num_bytes == sum(n * len(b) for n, b in zip(num_bytes, sent, strict=True)) + 33 * 4


@pytest.mark.parametrize(("num_empty", "begin"), [(4, 0), (2, 0), (0, 0), (0, 32), (4, 80)])
async def test_a_shorter_prefix_fits_if_the_blocks_of_its_window_are_reserved(num_empty: int, begin: int) -> None:
    """The window of 40 tokens starts in block 4 after 104 tokens, and in block 2 after 80."""
    spec, config = with_window(40), with_link("tcp")
    caches = [filled_cache(1, spec)], [KVCache(spec, NUM_BLOCKS, 8)]
    async with decode_side(config, caches=caches[1]) as decode, prefill_side(config, caches=caches[0]) as prefill:
        tables = (tuple(range(7)), (EMPTY_PLACE,) * num_empty + tuple(range(num_empty, 7)), (5, 6))
        ticket = decode.receiver.expect("t", 104, 0, tables, Expected.PREFIX, begins=(0, begin))
        sending = prefill.sender.transfer(ticket, 80)
        if num_empty == 4:
            with pytest.raises(TransferRefused, match="80 of 104 tokens need blocks before the windows"):
                await sending.__aenter__()
        else:
            async with sending as transfer:
                transfer.extend((tuple(range(10, 15)), (EMPTY_PLACE, EMPTY_PLACE, 12, 13, 14), (2,)))
                await transfer.finish(None)
            assert (await decode.receiver.wait_committed(ticket)).num_tokens == 80
            assert torch.equal(decode.cache.groups[1][:, 2:5], prefill.cache.groups[1][:, 12:15])
            assert is_blank(decode.cache, [0, 1, *range(5, NUM_BLOCKS)], group=1)
        assert await decode.receiver.release(ticket) == tables


@pytest.mark.parametrize("missing", ["row", "block"])
async def test_what_the_source_lacks_fails_the_transfer(link: str, missing: str) -> None:
    """It is never replaced by other bytes."""
    spec, config = with_window(40), with_link(link)
    caches = [filled_cache(1, spec)], [KVCache(spec, NUM_BLOCKS, 8)]
    async with decode_side(config, caches=caches[1]) as decode, prefill_side(config, caches=caches[0]) as prefill:
        ticket = decode.receiver.expect("t", 64, 0, tables_of(decode.receiver, range(4)))
        windowed, row = ((4, 5, 6, 7), ()) if missing == "row" else ((EMPTY_PLACE, EMPTY_PLACE, 6, 7), (0,))
        async with prefill.sender.transfer(ticket) as transfer:
            transfer.extend(((4, 5, 6, 7), windowed, row))
            transfer.advance(64, 5)
            with pytest.raises(TransferError):
                await transfer.finish(1)
        with pytest.raises(TransferError):
            await decode.receiver.wait_committed(ticket)
        await decode.receiver.release(ticket)
        assert not decode.cache.states["conv"].any()


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 2), (2, 1), (2, 4)])
async def test_states_arrive_at_every_rank_from_one(link: str, src_tp: int, dst_tp: int) -> None:
    heads = [dataclasses.replace(group, num_kv_heads=4) for group in SPEC.groups]
    whole = layout_of(dataclasses.replace(SPEC, groups=tuple(heads)))
    none = dataclasses.replace(whole.groups[0], layers=(), num_kv_heads=0, k_dim=0, v_dim=0)
    for layout in (whole, dataclasses.replace(whole, groups=(none,))):
        sides = [dataclasses.replace(layout, tp_size=tp_size) for tp_size in (src_tp, dst_tp)]
        ours, theirs = (
            [KVCache(rank_spec(side, rank), NUM_BLOCKS, 8) for rank in range(side.tp_size)] for side in sides
        )
        for cache in ours:
            cache.states["conv"][3] = torch.arange(33)
        config = with_link(link, slot_bytes=8192)
        totals = [group.num_kv_heads for group in layout.groups]
        async with (
            decode_side(config, caches=theirs, heads=totals) as decode,
            prefill_side(config, caches=ours, heads=totals) as prefill,
        ):
            tables = tables_of(decode.receiver, range(4), 5)
            ticket = decode.receiver.expect("t", 64, 0, tables)
            transferred = await send(prefill, ticket, range(4), state_slot=3)
            await decode.receiver.wait_committed(ticket)
            await decode.receiver.release(ticket)
            kv_bytes = 4 * sum(len(g.layers) * g.row_bytes for g in heads) if layout is whole else 0
            assert transferred.num_bytes == kv_bytes + dst_tp * 33 * 4
        for cache in theirs:
            assert torch.equal(cache.states["conv"][5], torch.arange(33.0))
            assert is_blank_states(cache, but_not=5)


@pytest.mark.parametrize("fault", ["corrupt_chunk=1", "drop_chunk=1"])
async def test_a_spoiled_state_fails_the_transfer(link: str, fault: str) -> None:
    """The blocks are there already, so that the state is all that travels."""
    config = with_link(link)
    async with decode_side(config) as decode, prefill_side(config, fault) as prefill:
        ticket = decode.receiver.expect("spoiled", 64, 64, tables_of(decode.receiver, range(4), 5))
        with pytest.raises(TransferCorrupted, match="checksum"):
            await send(prefill, ticket, range(4), state_slot=3)
        with pytest.raises(TransferCorrupted, match="checksum"):
            await decode.receiver.wait_committed(ticket)
        await decode.receiver.release(ticket)
        stats = decode.receiver.stats
        assert (stats.committed, stats.failed, stats.corrupted, stats.num_chunks) == (0, 1, 1, 0)
    async with decode_side(config) as decode, prefill_side(config) as prefill:
        ticket = decode.receiver.expect("whole", 64, 64, tables_of(decode.receiver, range(4), 5))
        transferred = await send(prefill, ticket, range(4), state_slot=3)
        assert (transferred.num_chunks, transferred.num_bytes) == (1, 33 * 4)


# -- workers with an engine ------------------------------------------------------------------------------------------

PROMPT = [(7 * position) % 1000 + 1 for position in range(100)]
KINDS: dict[str, dict[str, Any]] = {
    "states": {"with_state": True},
    "window": {"window": 40},
    "both": {"with_state": True, "window": 40},
}
PLACE_BYTES = {"states": (32, 0, 8), "window": (32, 16, 0), "both": (32, 16, 8)}
"""Bytes of a token in the group without a window and in the one with it, and of a state."""


async def fetched(here: Worker, there: Worker, prompt: Sequence[int], num_tokens: int) -> int:
    spec = make_spec(prompt, request_id="pull")
    return await here.kv.prefixes.fetch(spec, there.source(num_tokens), time.monotonic(), Context())


async def cached_tokens(worker: Worker, prompt: Sequence[int], **kind: Any) -> int:
    """The cached tokens of a prompt whose answer is right."""
    async with worker.loop.sequence(make_spec(prompt), Purpose.GENERATE) as handle:
        with_state = kind.get("with_state", False)
        assert await read_all(handle) == expected_tokens(prompt, 4, with_state=with_state)
        return handle._sequence.num_cached_tokens


async def resumable(worker: Worker, prompt: Sequence[int]) -> int:
    spec = make_spec(prompt)
    pin = await worker.loop.pin_prefix(block_keys(spec.cache_seed, prompt[: len(prompt) - 1]))
    worker.loop.unpin(pin)
    return pin.num_tokens


async def handed_over(prefill: Worker, decode: Worker, prompt: Sequence[int]) -> list[int]:
    """The answer of a decode worker to a prompt that another worker has computed."""
    spec = make_spec(prompt, num_tokens=6)
    async with contextlib.aclosing(DecodeService(decode.context)._after_kv_transfer(spec)) as answers:
        ticket = await anext(answers)
        assert isinstance(ticket, Ticket)
        request = PrefillRequest(spec, ticket)
        async with contextlib.aclosing(PrefillService(prefill.context).prefill(request, Context())) as events:
            first = await anext(events)
            assert isinstance(first, FirstToken)
            assert isinstance(await anext(events), Transferred)
        tokens = [first.token_id]
        async for message in answers:
            assert isinstance(message, NewTokens)
            tokens += message.token_ids
    return tokens  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prefix_with_its_states_and_windows_is_pulled(link: str, kind: str) -> None:
    """It carries exactly the missing blocks and one state, and a sequence continues from it."""
    config, (token, windowed, state) = with_link(link), PLACE_BYTES[kind]
    async with (
        engine_worker("here", ArithmeticRunner(64, **KINDS[kind]), config) as here,
        engine_worker("there", ArithmeticRunner(64, **KINDS[kind]), config) as there,
    ):
        await cached_tokens(there, PROMPT, **KINDS[kind])
        assert await fetched(here, there, PROMPT, 96) == 96
        window = 48 if windowed else 0  # from the block of the 40th last token on
        assert there.kv.counts().sent_bytes == 96 * token + window * windowed + state
        await here.check_idle()
        assert await cached_tokens(here, PROMPT, **KINDS[kind]) == 96
        assert await fetched(here, there, PROMPT, 96) == 0, "is here"
        longer = [*PROMPT, *range(1, 71)]
        assert await cached_tokens(there, longer, **KINDS[kind]) >= 96
        sent, held = there.kv.counts().sent_bytes, await resumable(here, longer)
        assert held >= 96
        assert await fetched(here, there, longer, 160) == 160 - held
        assert await cached_tokens(here, longer, **KINDS[kind]) == 160
        assert there.kv.counts().sent_bytes - sent == (160 - 96) * token + (160 - 112) * windowed + state
        counts = here.kv.counts()
        assert (counts.failed_pulls, counts.committed) == (0, 2)
        await here.check_idle()
        await there.check_idle()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_source_that_has_less_than_believed_sends_what_can_be_continued(kind: str) -> None:
    """A window of fewer tokens starts before the blocks that were reserved, and a state cannot be cut."""
    config, longer = with_link("tcp"), [*PROMPT, *range(1, 71)]
    async with (
        engine_worker("here", ArithmeticRunner(64, **KINDS[kind]), config) as here,
        engine_worker("there", ArithmeticRunner(64, **KINDS[kind]), config) as there,
        engine_worker("unlike", ArithmeticRunner(16, 64, with_state=True), config) as unlike,
    ):
        await cached_tokens(there, PROMPT, **KINDS[kind])
        num_tokens = 96 if kind == "states" else 0
        assert await fetched(here, there, longer, 160) == num_tokens
        assert await cached_tokens(here, longer, **KINDS[kind]) == num_tokens
        assert await fetched(here, there, [9] * 100, 96) == 0
        if kind == "states":
            assert await fetched(unlike, there, longer, 160) == 0, "a state within a block is of no use"
            assert await cached_tokens(unlike, longer, with_state=True) == 0
        for worker in (here, there, unlike):
            assert worker.kv.counts().failed_pulls == 0
            await worker.check_idle()
        assert there.kv.counts().sent_committed == (kind == "states")


async def test_a_state_of_more_than_is_asked_for_is_not_pulled() -> None:
    async with (
        engine_worker("here", ArithmeticRunner(16, 64, with_state=True)) as here,
        engine_worker("there", ArithmeticRunner(64, with_state=True)) as there,
    ):
        await cached_tokens(there, PROMPT, with_state=True)
        assert await fetched(here, there, PROMPT, 96) == 0, "64 tokens are whole blocks, and the state is that of 96"
        assert await cached_tokens(here, PROMPT, with_state=True) == 0


async def test_a_state_is_pulled_for_blocks_that_are_here() -> None:
    """Snapshots are evicted before blocks if there are few rows."""
    async with (
        engine_worker("here", ArithmeticRunner(64, with_state=True, max_num_seqs=2)) as here,
        engine_worker("there", ArithmeticRunner(64, with_state=True)) as there,
    ):
        await cached_tokens(there, PROMPT, with_state=True)
        await cached_tokens(here, PROMPT, with_state=True)
        for number in range(here.runner.num_blocks[-1]):
            await here.generate(make_spec([number + 1] * 17))
        assert await resumable(here, PROMPT) == 0
        assert await fetched(here, there, PROMPT, 96) == 96
        assert there.kv.counts().sent_bytes == 8
        assert await cached_tokens(here, PROMPT, with_state=True) == 96
        await here.check_idle()
        await there.check_idle()


@pytest.mark.parametrize("kind", KINDS)
async def test_the_services_transfer_the_missing_blocks_and_one_state(link: str, kind: str) -> None:
    config, (token, windowed, state) = with_link(link), PLACE_BYTES[kind]
    with_state = KINDS[kind].get("with_state", False)
    async with (
        engine_worker("prefill", ArithmeticRunner(64, **KINDS[kind]), config) as prefill,
        engine_worker("decode", ArithmeticRunner(64, **KINDS[kind]), config) as decode,
    ):
        sent = 0
        # The window of 40 starts at 48 of 100 tokens, 128 of 170 and 16 of 64, whose window never was on "decode".
        for prompt, begin, window_begin in (
            (PROMPT, 0, 48),
            (PROMPT, 96, 96),
            ([*PROMPT, *range(1, 71)], 96, 128),
            (PROMPT[:64], 64, 16),
        ):
            end = -(-len(prompt) // 16) * 16
            assert await handed_over(prefill, decode, prompt) == expected_tokens(prompt, 6, with_state=with_state)
            now = prefill.kv.counts().sent_bytes
            assert now - sent == (end - begin) * token + (end - window_begin) * windowed + state
            sent = now
        await prefill.check_idle()
        await decode.check_idle()
        counts = decode.kv.counts()
        assert (counts.received_committed, counts.received_failed) == (4, 0)

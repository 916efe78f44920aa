"""How pairs are made, kept and closed, when several things happen at once. Real gRPC and real links."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest

from baton.errors import BatonError
from kvstore.transfer.links import open_receiver
from tests.integration.transfer_peers import (
    CONFIG,
    Decode,
    Prefill,
    decode_side,
    eventually,
    prefill_side,
    same_blocks,
    send,
)


async def hand_over(prefill: Prefill, decode: Decode, name: str) -> str:
    """ "" or what went wrong."""
    ticket = decode.receiver.expect(name, 640, 0, range(40), state_slot=3)
    try:
        await send(prefill, ticket, range(40))
    except BatonError as error:
        return str(error)
    finally:
        await decode.receiver.release(ticket)
    return ""


@pytest.mark.parametrize("yields", [0, 1, 2, 3])
async def test_what_is_given_up_while_its_pair_opens_is_never_offered(yields: int) -> None:
    async with decode_side(CONFIG) as decode, prefill_side(CONFIG) as prefill:
        ticket = decode.receiver.expect("early", 16, 0, [0], state_slot=0)
        async with prefill.sender.transfer(ticket) as transfer:
            assert await eventually(lambda: bool(prefill.sender._pairs._routes))
            (route,) = prefill.sender._pairs._routes.values()
            await asyncio.wait({route.making})  # the pair has just been made
            for _ in range(yields):
                await asyncio.sleep(0)
            await transfer.close()
            await asyncio.sleep(0.05)
        assert not prefill.sender._live
        assert await hand_over(prefill, decode, "next") == "", "the pair is well"
        await decode.receiver.release(ticket)


async def test_a_ticket_that_is_used_twice_harms_only_the_second() -> None:
    async with decode_side(CONFIG) as decode, prefill_side(CONFIG) as prefill:
        ticket = decode.receiver.expect("once", 640, 0, range(40), state_slot=3)
        async with prefill.sender.transfer(ticket) as transfer:
            transfer.attach(range(40), 3)
            assert await eventually(lambda: all(part.granted for part in transfer._parts.values()))
            with pytest.raises(BatonError, match="in use already"):
                await send(prefill, ticket, range(40))
            await transfer.finish(1)
        assert same_blocks(prefill.cache, range(40), decode.cache, range(40))
        await decode.receiver.release(ticket)


async def test_a_burst_to_more_peers_than_pairs_is_served_and_the_surplus_closed() -> None:
    config = dataclasses.replace(CONFIG, max_pairs=2)
    async with contextlib.AsyncExitStack() as stack:
        decodes = [await stack.enter_async_context(decode_side(config, f"d{n}")) for n in range(6)]
        prefill = await stack.enter_async_context(prefill_side(config))
        for number in range(3):
            outcomes = await asyncio.gather(*(hand_over(prefill, d, f"t{number}") for d in decodes))
            assert outcomes == [""] * 6
            kinds = {pair.link_kind for pair in prefill.sender._pairs._alive}
            assert kinds == {"shm"}, "none is taken for a broken link"
            assert await eventually(lambda: prefill.sender.num_pairs <= 2)


async def test_a_link_that_only_the_receiver_cannot_open_gives_way_to_the_next_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse_shm(kind: str, *args: object) -> object:
        if kind == "shm":
            raise RuntimeError("not permitted here")
        return open_receiver(kind, *args)  # type: ignore[arg-type]

    monkeypatch.setattr("kvstore.transfer.session.open_receiver", refuse_shm)
    async with decode_side(CONFIG) as decode, prefill_side(CONFIG) as prefill:
        assert await asyncio.gather(*(hand_over(prefill, decode, f"t{n}") for n in range(3))) == [""] * 3
        assert [pair.link_kind for pair in prefill.sender._pairs._alive if not pair.failure] == ["gloo"]
        assert same_blocks(prefill.cache, range(40), decode.cache, range(40))


@pytest.mark.parametrize("num_slots", [1, 2])
async def test_pools_too_small_for_all_pairs_starve_none(num_slots: int) -> None:
    config = dataclasses.replace(CONFIG, links=("gloo",), num_slots=num_slots, window=1)
    async with contextlib.AsyncExitStack() as stack:
        decodes = [await stack.enter_async_context(decode_side(config, f"d{n}")) for n in range(3)]
        prefills = [await stack.enter_async_context(prefill_side(config, name=f"p{n}")) for n in range(3)]
        for number in range(3):
            cross = [(p, d) for p in prefills for d in decodes]
            outcomes = await asyncio.gather(*(hand_over(p, d, f"{number}/{n}") for n, (p, d) in enumerate(cross)))
            assert outcomes == [""] * 9
        sides = [p.sender for p in prefills] + [d.receiver for d in decodes]
        assert await eventually(lambda: all(side.slots_in_use <= 2 for side in sides))

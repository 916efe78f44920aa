"""A worker that somebody has taken over: it may open sessions, and it knows every name and number but no ticket."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from baton import wire
from baton.messages import Abort, Commit, FromReceiver, FromSender, Nack, Offer, Ticket
from baton.v1 import kv_pb2_grpc
from kvstore.transfer.connection.control_stream import open_channel
from kvstore.transfer.connection.reservations import Expected
from kvstore.transfer.protocol.plan import WireOptions, plan
from tests.support.waiting import until
from tests.unit.kvstore.transfer.peers import (
    CONFIG,
    SOON_S,
    Prefill,
    decode_side,
    prefill_side,
    same_blocks,
    send,
    tables_of,
)

NAME = "5e0f/order-1/0/0@decode-0"
GUESSES: dict[str, Callable[[Ticket], str]] = {
    "its name": lambda ticket: NAME,
    "its name and nothing random": lambda ticket: f"{NAME}#",
    "another transfer's end": lambda ticket: f"{NAME}#{'A' * 22}",
    "all but the last character": lambda ticket: ticket.transfer_id[:-1],
    "nothing": lambda ticket: "",
}


async def answers(thief: Prefill, ticket: Ticket, *messages: FromSender) -> list[FromReceiver]:
    """What the receiver says to a sender's messages, up to its answer to the last one that it refuses."""
    heard: list[FromReceiver] = []
    async with open_channel(ticket.kv_address) as channel, asyncio.timeout(SOON_S):
        stub: Any = kv_pb2_grpc.KvControlStub(channel)
        call = stub.Session()
        for message in (thief.sender._connections._hello, *messages):
            await call.write(wire.session_request(message))
        async for response in call:
            if (answer := wire.session_response_from_pb(response)) is not None:
                heard.append(answer)
            if isinstance(answer, Nack):
                break
    return heard


def offer_of(thief: Prefill, ticket: Ticket, transfer_id: str) -> Offer:
    """What the sender with the ticket would offer, but for the id."""
    hello = thief.sender._connections._hello
    options = WireOptions(CONFIG.slot_bytes, CONFIG.span_tokens, "auto")
    planned = plan(hello.layout, 0, ticket.layout, 0, ticket.num_tokens, (0, 0), options)
    return Offer(
        transfer_id=transfer_id,
        generation=ticket.generation,
        plan_digest=planned.digest(CONFIG.checksum),
        num_chunks=len(planned.chunks),
        wire_dtype=planned.options.wire_dtype,
        num_tokens=ticket.num_tokens,
        chunk_bytes=CONFIG.slot_bytes,
    )


@pytest.mark.parametrize("guess", GUESSES)
async def test_it_can_neither_fill_nor_fail_a_transfer_without_its_ticket(guess: str) -> None:
    async with (
        decode_side(CONFIG) as decode,
        prefill_side(CONFIG) as prefill,
        prefill_side(CONFIG, name="thief") as thief,
    ):
        tables = tables_of(decode.receiver, [0, 1], 0)
        ticket = decode.receiver.expect(NAME, 32, 0, tables, Expected.WITH_FIRST_TOKEN)
        transfer_id = GUESSES[guess](ticket)
        ids = (transfer_id, ticket.generation)
        refused = Nack(*ids, f"TransferRefused: transfer {ids[0]}, generation {ids[1]}, is not expected")
        assert (await answers(thief, ticket, offer_of(thief, ticket, transfer_id)))[-1] == refused
        assert (await answers(thief, ticket, Abort(*ids, "TransferError: no"), Commit(*ids, None)))[-1] == refused
        await until(lambda: decode.receiver.num_connections == 0, SOON_S)
        await send(prefill, ticket, [4, 5])
        assert (await decode.receiver.wait_committed(ticket)).num_tokens == 32
        assert same_blocks(prefill.cache, [4, 5], decode.cache, [0, 1])
        assert (await decode.receiver.release(ticket))[0] == (0, 1)


async def test_two_reservations_of_one_name_have_ids_of_their_own() -> None:
    """A client may choose its request's id again, or another client the same one."""
    async with decode_side(CONFIG) as decode, prefill_side(CONFIG) as prefill:
        tickets = [decode.receiver.expect(NAME, 16, 0, tables_of(decode.receiver, [n], n)) for n in range(2)]
        assert len({ticket.transfer_id for ticket in tickets}) == 2
        swapped = dataclasses.replace(tickets[0], generation=tickets[1].generation)
        assert isinstance((await answers(prefill, swapped, offer_of(prefill, swapped, swapped.transfer_id)))[-1], Nack)
        for number, ticket in enumerate(tickets):
            await send(prefill, ticket, [8 + number])
            assert same_blocks(prefill.cache, [8 + number], decode.cache, [number])

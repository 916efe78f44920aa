"""The four ways to make a communicator, and what one costs."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from kvstore.transfer.transport import nccl
from kvstore.transfer.transport.streams import own_stream
from tests.gpu.hour.checks import Found, is_rehearsal, judged
from tests.gpu.hour.ends import SLOT_BYTES, Side, free_bytes, header_of, taken, two, weighted_sum
from tests.gpu.hour.models import synchronize

NUM_MESSAGES = 20 if is_rehearsal() else 1000
NUM_MORE = 4


def move(side: Side, link: Any, num_messages: int, num_bytes: int = SLOT_BYTES) -> list[int]:
    """Chunks whose bytes differ, and their sums."""
    sums = []
    for number in range(num_messages):
        slot = taken(link.slots.acquire(10.0))
        payload = slot.payload(num_bytes)
        if side.sends:
            payload.random_(256)
            payload[:2] = number % 251
            sums.append(weighted_sum(payload))
            slot.write_header(header_of(num_bytes))
            link.send_chunk(slot, num_bytes).wait()
        else:
            link.recv_chunk(slot, num_bytes).wait()
            sums.append(weighted_sum(payload))
        link.slots.release(slot)
    return sums


def _exchange(mode: str, side: Side) -> dict[str, Any]:
    with own_stream(side.device):
        began = time.monotonic()
        link = side.open("nccl", nccl_mode=mode)
        opened = time.monotonic()
        sums = move(side, link, NUM_MESSAGES)
        moved = time.monotonic()
        side.meet("moved")
        closing = time.monotonic()
        link.close()
        return {
            "opened_s": round(opened - began, 3),
            "closed_s": round(time.monotonic() - closing, 3),
            "message_ms": round((moved - opened) / NUM_MESSAGES * 1e3, 3),
            "sums": sums,
            "carrier": link.carrier,
        }


def open_in(mode: str) -> Found:
    """Opens a pair in one of the four ways, moves messages, and closes it."""
    sent, received = two(partial(_exchange, mode), 100.0)
    same = sent.pop("sums") == received.pop("sums")
    is_right = same and sent["opened_s"] < 30 and max(sent["closed_s"], received["closed_s"]) < 2
    return judged(is_right, "wrong bytes, or slow to open or to close", same=same, sender=sent, receiver=received)


def _weigh(max_ctas: int, side: Side) -> float:
    nccl._MAX_CTAS = max_ctas
    with own_stream(side.device):
        links = [side.open("nccl", "first")]
        free = []
        for names in ([], [f"more-{number}" for number in range(NUM_MORE)]):
            links += [side.open("nccl", name) for name in names]
            synchronize()
            side.meet(f"open-{len(links)}")
            free.append(free_bytes())
            side.meet(f"weighed-{len(links)}")
        for link in links:
            link.close()
    return (free[0] - free[1]) / NUM_MORE / 2**20


def memory() -> Found:
    """The memory that a pair takes of the GPU on which both its ends are, by channels."""
    weights = {}
    for max_ctas in (1, 2, 4):
        weights[f"{max_ctas} channels"] = round(max(two(partial(_weigh, max_ctas), 50.0)), 1)
    return judged(
        weights["4 channels"] <= 2 * (4 * 6.5 + 16), "a pair takes more than its channels explain", mib=weights
    )

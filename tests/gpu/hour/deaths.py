"""A peer that is killed or stopped, many pairs, and what is left behind."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from baton.errors import TransferError
from kvstore.transfer.transport import nccl
from kvstore.transfer.transport.base import RECEIVER, SENDER
from kvstore.transfer.transport.nccl_counts import num_stuck_aborts
from kvstore.transfer.transport.streams import num_shared_streams, own_stream
from tests.gpu.hour.checks import Found, is_rehearsal, judged
from tests.gpu.hour.ends import SLOT_BYTES, Side, free_bytes, header_of, taken, two
from tests.gpu.hour.models import synchronize
from tests.gpu.hour.pairs import move

HOW = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
VICTIMS = {"opening": SENDER, "idle": SENDER, "receiving": SENDER, "sending": RECEIVER}
"""What the side is doing that lives on, and which side dies."""
NOTICED_S = 0.5
"""After this long the session notices that its peer is dead, and aborts the transport."""
OPENING_S = 2.0
"""The same, counted from the start, where the peer is lost while a pair opens."""
NUM_PAIRS, NUM_AT_A_TIME = 40, 24
NUM_BUFFERED = 256
"""More messages than NCCL takes without a receiver."""
NUM_CYCLES = 8 if is_rehearsal() else 40


def die(how: str, *_: Any) -> Any:
    os.kill(os.getpid(), HOW[how])
    time.sleep(600)


def _victim(how: str, phase: str, side: Side) -> None:
    with own_stream(side.device):
        if phase == "opening":
            nccl.NcclTransport._make_communicator = partial(die, how)  # type: ignore[method-assign]
        link = side.open("nccl")
        side.meet("open")
        if phase == "idle":
            die(how)
        link._launch = partial(die, how)
        slot = taken(link.slots.acquire(1.0))
        slot.write_header(header_of(SLOT_BYTES))
        (link.send_chunk(slot, SLOT_BYTES) if side.sends else link.recv_chunk(slot, SLOT_BYTES)).wait()


def _survivor(phase: str, side: Side) -> dict[str, Any]:
    with own_stream(side.device):
        began = time.monotonic()
        if phase == "opening":
            threading.Timer(OPENING_S, side.end_session).start()
            try:
                side.open("nccl")
            except TransferError as error:
                gave_up = time.monotonic() - began
                return {"gave_up_s": gave_up, "closed_s": 0.0, "error": str(error)[:100], "ok": side.still_computes()}
            return {"gave_up_s": 1e9, "closed_s": 0.0, "error": "it opened", "ok": False}
        link = side.open("nccl")
        side.meet("open")
        noticed = time.monotonic() + NOTICED_S
        threading.Timer(NOTICED_S, link.abort).start()
        text = ""
        try:
            slot = taken(link.slots.acquire(1.0))
            slot.write_header(header_of(SLOT_BYTES))
            for _ in range(NUM_BUFFERED if side.sends else 1):  # NCCL takes some messages that nobody receives
                (link.send_chunk(slot, SLOT_BYTES) if side.sends else link.recv_chunk(slot, SLOT_BYTES)).wait()
        except TransferError as error:
            text = str(error)[:100]
        gave_up = time.monotonic()
        time.sleep(max(0.0, noticed - gave_up + 0.1))
        link.close()
        closed = time.monotonic()
        computes = side.still_computes()
        return {
            "gave_up_s": round(max(0.0, gave_up - noticed), 3),
            "closed_s": round(closed - max(noticed, gave_up), 3),
            "error": text,
            "ok": computes and bool(text) and num_stuck_aborts() == 0,
        }


def _meets(how: str, phase: str, side: Side) -> Any:
    return _victim(how, phase, side) if side.rank == VICTIMS[phase] else _survivor(phase, side)


def death(case: str) -> Found:
    """One side dies in a phase; the other one has to know within a second of the session, and its GPU has to work."""
    how, phase = case.split()
    found = two(partial(_meets, how, phase), 50.0, victim=VICTIMS[phase])[1 - VICTIMS[phase]]
    limit_s = OPENING_S + 8 if phase == "opening" else 1.0
    is_right = found["ok"] and found["gave_up_s"] < limit_s and found["closed_s"] < 6.0
    return judged(is_right, "known too late, closed too late, or the GPU computes no more", **found)


def _beside(side: Side) -> Any:
    if side.sends:
        _victim("kill", "receiving", side)
    from tests.gpu.decode_step import DecodeStep

    step = DecodeStep(side.device)  # before any pair: its watchdog's queries break a capture
    alone = sorted(step.run() for _ in range(1000))
    done = threading.Event()
    found: dict[str, Any] = {}

    def lane() -> None:
        found.update(_survivor("receiving", side))
        done.set()

    threading.Thread(target=lane, daemon=True).start()
    beside: list[float] = []
    num_wrong = 0
    while not done.is_set() or len(beside) < 1000:
        beside.append(step.run())
        num_wrong += not step.is_right()
    beside.sort()
    return {**found, "alone_s": _p99(alone), "beside_s": _p99(beside), "longest_s": beside[-1], "wrong": num_wrong}


def _p99(values: list[float]) -> float:
    return values[int(0.99 * len(values))]


def inter_token() -> Found:
    """Decode steps as a CUDA graph while a pair breaks in a receive and is aborted."""
    _, found = two(_beside, 80.0, victim=SENDER)
    ratio = found["beside_s"] / found["alone_s"]
    is_right = ratio < 3 and found["wrong"] == 0 and found["ok"]
    return judged(is_right, "steps stand while a pair is aborted", ratio=round(ratio, 2), **found)


def _many(side: Side) -> dict[str, Any]:
    with own_stream(side.device):
        links: list[Any] = []
        sums: list[int] = []
        for number in range(NUM_PAIRS):
            if len(links) == NUM_AT_A_TIME:
                links.pop(0).close()
                side.meet(f"closed-{number}")
                side.forget(f"pair-{number - NUM_AT_A_TIME}")
            links.append(side.open("nccl", f"pair-{number}"))
            sums += move(side, links[-1], 1)
            sums += move(side, links[0], 1)
        side.meet("moved")
        for link in links:
            link.close()
    return {"sums": sums, "shared": num_shared_streams(), "stuck": num_stuck_aborts()}


def many_pairs() -> Found:
    """Forty pairs, 24 at a time: none has a stream of another one, and all move bytes."""
    sent, received = two(_many, 200.0)
    is_right = sent == received and sent["shared"] == 0 and sent["stuck"] == 0
    figures = {"pairs": NUM_PAIRS, "shared_streams": sent["shared"], "stuck_aborts": sent["stuck"]}
    return judged(is_right, "wrong bytes, or streams in common", same=sent["sums"] == received["sums"], **figures)


def _come_and_go(side: Side) -> list[tuple[int, int, int]]:
    found = []
    with own_stream(side.device):
        for cycle in range(NUM_CYCLES):
            link = side.open("nccl", f"cycle-{cycle}")
            move(side, link, 2)
            side.meet(f"moved-{cycle}")
            link.close()
            del link
            side.meet(f"closed-{cycle}")
            side.forget(f"cycle-{cycle}")
            side.forget(f"moved-{cycle}")
            synchronize()
            time.sleep(0.1)  # threads of the last one end
            side.meet(f"counted-{cycle}")
            num_fake = sum(thread.name.startswith("fake-") for thread in threading.enumerate())
            num_threads, num_files = (len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("task", "fd"))
            found.append((free_bytes(), num_threads - num_fake, num_files))
    return found


def leaks() -> Found:
    """Forty pairs that come and go: memory of the GPU, threads and files, after the first few and at the end."""
    figures = {}
    is_right = True
    for name, found in zip(("sender", "receiver"), two(_come_and_go, 200.0), strict=True):
        rest = found[4:]
        slopes = [_slope([float(row[column]) for row in rest]) for column in range(3)]
        figures[name] = {"mib_a_cycle": round(-slopes[0] / 2**20, 3), "threads": slopes[1], "files": slopes[2]}
        is_right &= -slopes[0] < 2**18 and slopes[1] < 0.1 and slopes[2] < 0.1
    return judged(is_right, "something is left of each pair", cycles=NUM_CYCLES, **figures)


def _slope(values: list[float]) -> float:
    return round(statistics.linear_regression(range(len(values)), values).slope, 3)

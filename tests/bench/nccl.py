"""NCCL between two processes with a GPU: links, bare sends, copies through CUDA IPC; and what they cost a decode loop.

    NCCL link    as in production: each chunk staged, granted, in its turn
    bare NCCL    the communicator alone, several sends in flight
    CUDA IPC     the receiver's copy engine reads the sender's staging ring, told by a gloo pair

With one GPU both processes share it. Then NCCL before 2.30 goes through a socket, and its rates say nothing.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist

from tests.bench.nccl_peer import ARMS, WINDOW
from tests.bench.peer import Peer
from tests.bench.report import Report, Table
from tests.bench.stats import Spread, difference, interleaved, ratio, spread

CHUNK_MIB = (4, 16, 64)
BLOCK_KIB = (16, 128)
STAGED_MIB = 16
DECODE_CHUNK_MIB = 4


class Ends:
    def __init__(self, sender: Peer, receiver: Peer, mode: str, folder: str) -> None:
        self._sender = sender
        self._receiver = receiver
        self.both("open", mode=mode, folder=folder)
        receiver.ask("map_ring", handle=sender.ask("share_ring")["handle"])

    def both(self, op: str, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The sender's answer and the receiver's."""
        for peer in (self._receiver, self._sender):
            peer.tell(op, **arguments)
        received, sent = self._receiver.answer(), self._sender.answer()
        return sent, received

    def gb_per_s(self, arm: str, num_chunks: int, chunk_bytes: int) -> float:
        sent, _ = self.both("move", arm=arm, num_chunks=num_chunks, chunk_bytes=chunk_bytes)
        return float(num_chunks * chunk_bytes / sent["wall_s"] / 1e9)

    def blocks_ms(self, arm: str, block_bytes: int) -> float:
        sent, _ = self.both("blocks", arm=arm, num_blocks=STAGED_MIB * 2**20 // block_bytes, block_bytes=block_bytes)
        return float(sent["wall_s"] * 1e3)

    def decode_ms(self, arm: str, num_chunks: int) -> tuple[float, float]:
        """A step's median and 99th percentile, beside a transfer or, for "alone", without one."""
        size = {"num_chunks": num_chunks, "chunk_bytes": DECODE_CHUNK_MIB * 2**20}
        found = self._receiver.ask("decode") if arm == "alone" else self.both("move_beside_decode", arm=arm, **size)[1]
        return found["median_s"] * 1e3, found["p99_s"] * 1e3


def run(quick: bool) -> Report:
    num_rounds, total_bytes = (3, 2 * 10**9) if quick else (9, 10**10)
    mode = _mode()
    with (
        tempfile.TemporaryDirectory() as folder,
        Peer("tests.bench.nccl_peer", "receiver") as receiver,
        Peer("tests.bench.nccl_peer", "sender") as sender,
    ):
        ends = Ends(sender, receiver, mode, folder)
        tables = [
            _throughput(ends, num_rounds, total_bytes),
            _blocks(ends, num_rounds),
            _decode(ends, num_rounds, total_bytes),
        ]
    for table in tables:
        table.title += f", {mode}, {torch.cuda.get_device_name(0)}"
    return Report("nccl", tables)


def _mode() -> str:
    if torch.cuda.device_count() > 1:
        return "two GPUs"
    version = getattr(dist, "ProcessGroupNCCL").get_runtime_nccl_version()  # noqa: B009 - not in a CPU build of torch
    return "two ranks on one GPU" if tuple(version) >= (2, 30) else "two hosts on one GPU"


def _throughput(ends: Ends, num_rounds: int, total_bytes: int) -> Table:
    table = Table(
        f"Chunks between two GPU buffers, {num_rounds} rounds",
        ("", "GB/s", "of the NCCL link"),
        note=f"A link has one chunk on the GPU at a time, bare NCCL {WINDOW}, the ring {WINDOW} slots.",
    )
    for mib in CHUNK_MIB:
        chunk_bytes = mib * 2**20
        found: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for arm in ARMS:
            ends.gb_per_s(arm, 2 * WINDOW, chunk_bytes)  # warms up
        for arm in interleaved(ARMS, num_rounds):
            found[arm].append(ends.gb_per_s(arm, total_bytes // chunk_bytes, chunk_bytes))
        for arm in ARMS:
            table.rows.append((f"{mib} MiB, {arm}", spread(found[arm]), ratio(found[arm], found[ARMS[0]])))
    return table


def _blocks(ends: Ends, num_rounds: int) -> Table:
    table = Table(
        f"{STAGED_MIB} MiB of scattered blocks to scattered blocks, {num_rounds} rounds",
        ("", "gathered, one send, scattered: ms", "a send for each block, grouped: ms", "ratio"),
    )
    arms = ("staged", "grouped")
    for kib in BLOCK_KIB:
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        for arm in arms:
            ends.blocks_ms(arm, kib * 1024)
        for arm in interleaved(arms, num_rounds):
            found[arm].append(ends.blocks_ms(arm, kib * 1024))
        times = [found[arm] for arm in arms]
        table.rows.append((f"blocks of {kib} KiB", *(spread(values) for values in times), ratio(*times)))
    return table


def _decode(ends: Ends, num_rounds: int, total_bytes: int) -> Table:
    table = Table(
        f"A decode step (one CUDA graph) on the receiver, {DECODE_CHUNK_MIB} MiB chunks beside it, {num_rounds} rounds",
        ("", "ms a step, median", "more than alone", "ms a step, 99th percentile"),
    )
    arms = ("alone", *ARMS)
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    num_chunks = total_bytes // (DECODE_CHUNK_MIB * 2**20)
    for arm in interleaved(arms, num_rounds):
        found[arm].append(ends.decode_ms(arm, num_chunks))
    medians = {arm: [median for median, _ in found[arm]] for arm in arms}
    for arm in arms:
        more: Spread | str = difference(medians[arm], medians["alone"]) if arm != "alone" else ""
        table.rows.append((arm, spread(medians[arm]), more, spread([p99 for _, p99 in found[arm]])))
    return table

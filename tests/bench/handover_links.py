"""Links alone between two processes, against a raw TCP socket that moves as many bytes; and what a pair costs.

Raw TCP, gloo and tcp move bytes from one process's buffers to the other's. An shm link moves none: here they are copied
into its ring and out of it, which a gather and a scatter do otherwise.
"""

from __future__ import annotations

from typing import Any

from tests.bench.handover import Moved, measure
from tests.bench.handover_links_peer import window
from tests.bench.peer import Peer
from tests.bench.report import Report, Table
from tests.bench.stats import ratio, spread

CHUNK_MIB = (1, 4, 16)
KINDS = ("gloo", "tcp", "shm")
NUM_PAIRS = 64


class Ends:
    """Two processes with a raw connection and a link of each kind between them."""

    def __init__(self, sender: Peer, receiver: Peer) -> None:
        self._sender = sender
        self._receiver = receiver
        port = receiver.ask("listen")["port"]
        receiver.tell("accept")
        sender.ask("connect", port=port)
        receiver.answer()
        for kind in KINDS:
            for num_slots in {window(mib * 2**20) for mib in CHUNK_MIB}:
                self.both("open", kind=kind, num_slots=num_slots)

    def both(self, op: str, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The sender's answer and the receiver's."""
        for peer in (self._receiver, self._sender):
            peer.tell(op, **arguments)
        received, sent = self._receiver.answer(), self._sender.answer()
        return sent, received

    def move(self, arm: str, num_chunks: int, chunk_bytes: int) -> Moved:
        size = {"num_chunks": num_chunks, "chunk_bytes": chunk_bytes}
        sent, received = self.both("raw", **size) if arm == "raw" else self.both("link", kind=arm, **size)
        return Moved(num_chunks * chunk_bytes, sent["wall_s"], sent["cpu_s"] + received["cpu_s"])


def run(quick: bool) -> Report:
    num_rounds, total_bytes = (3, 200_000_000) if quick else (9, 750_000_000)
    with (
        Peer("tests.bench.handover_links_peer", "receiver") as receiver,
        Peer("tests.bench.handover_links_peer", "sender") as sender,
    ):
        ends = Ends(sender, receiver)
        return Report("handover_links", [_throughput(ends, num_rounds, total_bytes), _pairs(ends)])


def _throughput(ends: Ends, num_rounds: int, total_bytes: int) -> Table:
    table = Table(
        f"A link alone, 16 MiB and at least 4 chunks in flight, {num_rounds} rounds",
        ("", "GB/s", "of raw TCP", "CPU-s/GB"),
        note="Gates of the design for gloo: at least 0.75 of raw TCP, at most 0.7 CPU-s/GB.",
    )
    arms = ("raw", *KINDS)
    for mib in CHUNK_MIB:

        def once(arm: str, chunk_bytes: int = mib * 2**20) -> Moved:
            return ends.move(arm, total_bytes // chunk_bytes, chunk_bytes)

        found = measure(once, arms, num_rounds, 1)
        rates = {arm: [moved.gb_per_s for moved in found[arm]] for arm in arms}
        for arm in arms:
            cpu = spread([moved.cpu_s_per_gb for moved in found[arm]])
            name = "raw TCP" if arm == "raw" else arm
            table.rows.append((f"{mib} MiB, {name}", spread(rates[arm]), ratio(rates[arm], rates["raw"]), cpu))
    return table


def _pairs(ends: Ends) -> Table:
    table = Table(
        f"{NUM_PAIRS} idle pairs, each with the thread that owns it; of the side where it costs more",
        ("", "ms to open", "threads", "file descriptors", "KiB resident"),
        note="Gates: at most 50 ms to open, one thread and one file descriptor a pair. No slot is made yet.",
    )
    for kind in KINDS:
        answers = ends.both("open_many", kind=kind, names=[f"{kind}-{number}" for number in range(NUM_PAIRS)])
        open_ms = [max(sides) * 1e3 for sides in zip(*(answer["open_s"] for answer in answers), strict=True)]
        threads, fds, resident = (max(values) / NUM_PAIRS for values in zip(*(a["cost"] for a in answers), strict=True))
        ends.both("close_many")
        table.rows.append((kind, spread(open_ms), f"{threads:.2f}", f"{fds:.2f}", f"{resident / 1024:.0f}"))
    return table

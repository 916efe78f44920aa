"""The KV hand-over between two processes against a raw TCP socket that moves as many bytes between the same two.

The hand-over is whole: offer and grant, gather from scattered blocks, checksum, gloo over loopback, verify, scatter,
commit. The socket does `sendall` and `recv_into` of one flat buffer: what the machine can do, not what would serve.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.peer import Peer
from tests.bench.report import Report, Table
from tests.bench.stats import interleaved, ratio, spread

TOKEN_BYTES = 46_080
BLOCK_TOKENS = 16
NUM_TOKENS = (512, 2000)
LINK_MIB = (1, 4, 16)
ARMS = ("raw TCP", "checksum full", "checksum off")


@dataclass(frozen=True, slots=True)
class Moved:
    """Some transfers, one after the other; CPU of both processes."""

    num_bytes: int
    wall_s: float
    cpu_s: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.wall_s / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / self.num_bytes * 1e9


class Pair:
    """A prefill and a decode process with everything open between them."""

    def __init__(self, prefill: Peer, decode: Peer, folder: Path) -> None:
        self._prefill = prefill
        self._decode = decode
        port = decode.ask("listen")["port"]
        decode.tell("accept")
        prefill.ask("open_raw", port=port)
        decode.answer()
        self._both("open_gloo", path=str(folder / "rendezvous"))

    def hand_over(self, num_tokens: int, mode: str) -> Moved:
        ticket = self._decode.ask("expect", mode=mode, num_tokens=num_tokens)
        sent = self._prefill.ask("hand_over", mode=mode, num_tokens=num_tokens, ticket=ticket)
        settled = self._decode.ask("settle")
        return Moved(sent["num_bytes"], sent["wall_s"], sent["cpu_s"] + settled["cpu_s"])

    def raw_flat(self, num_bytes: int, chunk_bytes: int = 0) -> Moved:
        return self._both("raw_flat", num_bytes=num_bytes, chunk_bytes=chunk_bytes or num_bytes)

    def gloo(self, num_bytes: int, chunk_bytes: int) -> Moved:
        return self._both("gloo", num_bytes=num_bytes, chunk_bytes=chunk_bytes)

    def _both(self, op: str, num_bytes: int = 0, **arguments: int | str) -> Moved:
        if num_bytes:
            arguments["num_bytes"] = num_bytes
        for peer in (self._decode, self._prefill):
            peer.tell(op, **arguments)
        received, sent = self._decode.answer(), self._prefill.answer()
        return Moved(num_bytes, sent.get("wall_s", 0.0), sent.get("cpu_s", 0.0) + received.get("cpu_s", 0.0))


def run(quick: bool) -> Report:
    num_rounds, total_bytes = (3, 200_000_000) if quick else (9, 750_000_000)
    with (
        tempfile.TemporaryDirectory() as folder,
        Peer("tests.bench.handover_peer", "decode") as decode,
        Peer("tests.bench.handover_peer", "prefill") as prefill,
    ):
        pair = Pair(prefill, decode, Path(folder))
        return Report("handover", [_end_to_end(pair, num_rounds, total_bytes), _link(pair, num_rounds, total_bytes)])


def _end_to_end(pair: Pair, num_rounds: int, total_bytes: int) -> Table:
    table = Table(
        f"KV hand-over, two processes, SmolLM2-135M's KV in {BLOCK_TOKENS}-token blocks, {num_rounds} rounds",
        ("", "GB/s", "of raw TCP", "CPU-s/GB", "ms a prompt"),
        note="Gates of the design: at least 0.5 of raw TCP (goal 0.8), at most 1.2 CPU-s/GB.",
    )
    for num_tokens in NUM_TOKENS:
        num_bytes = num_tokens * TOKEN_BYTES
        repeats = max(1, total_bytes // num_bytes)

        def once(arm: str, num_tokens: int = num_tokens, num_bytes: int = num_bytes) -> Moved:
            if arm == "raw TCP":
                return pair.raw_flat(num_bytes)
            return pair.hand_over(num_tokens, arm.removeprefix("checksum "))

        found = _measure(once, ARMS, num_rounds, repeats)
        for arm in ARMS:
            moved = found[arm]
            table.rows.append(
                (
                    f"{num_tokens} tokens ({num_bytes / 1e6:.0f} MB), {arm}",
                    spread([m.gb_per_s for m in moved]),
                    ratio([m.gb_per_s for m in moved], [m.gb_per_s for m in found["raw TCP"]]),
                    spread([m.cpu_s_per_gb for m in moved]),
                    spread([m.wall_s * 1e3 / repeats for m in moved]),
                )
            )
    return table


def _link(pair: Pair, num_rounds: int, total_bytes: int) -> Table:
    table = Table(
        f"The link alone: a gloo pair, 4 messages in flight, {num_rounds} rounds",
        ("", "gloo GB/s", "raw TCP GB/s", "ratio", "gloo CPU-s/GB", "raw TCP CPU-s/GB"),
        note="Gates of the design: at least 0.75 of raw TCP, at most 0.7 CPU-s/GB.",
    )
    for mib in LINK_MIB:
        chunk_bytes = mib * 2**20
        num_bytes = total_bytes // chunk_bytes * chunk_bytes

        def once(arm: str, num_bytes: int = num_bytes, chunk_bytes: int = chunk_bytes) -> Moved:
            return (pair.gloo if arm == "gloo" else pair.raw_flat)(num_bytes, chunk_bytes)

        found = _measure(once, ("gloo", "raw"), num_rounds, 1)
        rates = [[m.gb_per_s for m in found[arm]] for arm in ("gloo", "raw")]
        cpu = [spread([m.cpu_s_per_gb for m in found[arm]]) for arm in ("gloo", "raw")]
        table.rows.append((f"{mib} MiB", *(spread(values) for values in rates), ratio(*rates), *cpu))
    return table


def _measure(
    once: Callable[[str], Moved], arms: tuple[str, ...], num_rounds: int, repeats: int
) -> dict[str, list[Moved]]:
    for arm in arms:
        once(arm)  # warm up: opens pairs, touches memory
    found: dict[str, list[Moved]] = {arm: [] for arm in arms}
    for arm in interleaved(arms, num_rounds):
        moved = [once(arm) for _ in range(repeats)]
        found[arm].append(
            Moved(sum(m.num_bytes for m in moved), sum(m.wall_s for m in moved), sum(m.cpu_s for m in moved))
        )
    return found

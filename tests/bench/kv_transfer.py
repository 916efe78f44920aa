"""The KV transfer between two processes against a raw TCP socket that moves as many bytes between the same two.

The KV transfer is whole: gather from scattered blocks, checksum, the transport, verify, scatter, commit. Offer and
grant pass before, as they do while a prompt waits for its turn. The socket does `sendall` and `recv_into` of one flat
buffer: what the machine can do, not what would serve.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench.kv_transfer_peer import TLS, TRANSPORTS
from tests.bench.peer import Peer
from tests.bench.report import Report, Table
from tests.bench.stats import interleaved, ratio, spread
from tests.support.certificates import Authority

TOKEN_BYTES = 46_080
BLOCK_TOKENS = 16
NUM_TOKENS = (512, 2000)
ARMS = ("raw TCP", *(f"{transport}, checksum {checksum}" for transport in TRANSPORTS for checksum in ("full", "off")))
LAYER_S = 0.01


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


class TransferPair:
    """A prefill and a decode process with everything open between them."""

    def __init__(self, prefill: Peer, decode: Peer) -> None:
        self._prefill = prefill
        self._decode = decode
        port = decode.ask("listen")["port"]
        decode.tell("accept")
        prefill.ask("open_raw", port=port)
        decode.answer()

    def kv_transfer(self, num_tokens: int, mode: str) -> Moved:
        return self._transfer("kv_transfer", num_tokens, mode)

    def kv_transfer_layers(self, num_tokens: int, mode: str, streamed: bool) -> Moved:
        return self._transfer("kv_transfer_layers", num_tokens, mode, layer_s=LAYER_S, streamed=streamed)

    def raw_flat(self, num_bytes: int) -> Moved:
        for peer in (self._decode, self._prefill):
            peer.tell("raw_flat", num_bytes=num_bytes, chunk_bytes=num_bytes)
        received, sent = self._decode.answer(), self._prefill.answer()
        return Moved(num_bytes, sent["wall_s"], sent["cpu_s"] + received["cpu_s"])

    def _transfer(self, op: str, num_tokens: int, mode: str, **how: float | bool) -> Moved:
        ticket = self._decode.ask("expect", mode=mode, num_tokens=num_tokens)["ticket"]
        sent = self._prefill.ask(op, mode=mode, num_tokens=num_tokens, ticket=ticket, **how)
        settled = self._decode.ask("settle")
        return Moved(sent["num_bytes"], sent["wall_s"], sent["cpu_s"] + settled["cpu_s"])


def run(quick: bool) -> Report:
    num_rounds, total_bytes = (3, 200_000_000) if quick else (9, 750_000_000)
    with (
        tempfile.TemporaryDirectory() as folder,
        kv_transfer_peer("decode", Path(folder)) as decode,
        kv_transfer_peer("prefill", Path(folder)) as prefill,
    ):
        pair = TransferPair(prefill, decode)
        tables = [_end_to_end(pair, num_rounds, total_bytes), _tail(pair, num_rounds)]
        return Report("kv_transfer", [*tables, _tls(pair, num_rounds, total_bytes)])


def kv_transfer_peer(role: str, folder: Path) -> Peer:
    """One end, with the certificates of that folder, which are made where it has none."""
    if not (folder / "member.crt").exists():
        Authority.make(folder).sign("member")
    return Peer("tests.bench.kv_transfer_peer", role, str(folder))


def _end_to_end(pair: TransferPair, num_rounds: int, total_bytes: int) -> Table:
    table = Table(
        f"KV transfer, two processes, SmolLM2-135M's KV in {BLOCK_TOKENS}-token blocks, {num_rounds} rounds",
        ("", "GB/s", "of raw TCP", "CPU-s/GB", "ms a prompt"),
        note="Gates: tcp at least 0.8 of raw TCP, shm at least 2.",
    )
    for num_tokens in NUM_TOKENS:
        num_bytes = num_tokens * TOKEN_BYTES
        repeats = max(1, total_bytes // num_bytes)

        def once(arm: str, num_tokens: int = num_tokens, num_bytes: int = num_bytes) -> Moved:
            return pair.raw_flat(num_bytes) if arm == "raw TCP" else pair.kv_transfer(num_tokens, arm)

        found = measure(once, ARMS, num_rounds, repeats)
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


def _tls(pair: TransferPair, num_rounds: int, total_bytes: int) -> Table:
    """Plain and encrypted alone beside each other: where other arms lie between, the machine has changed."""
    table = Table(
        f"KV over tcp with TLS against tcp without, {num_rounds} rounds",
        ("", "tcp, GB/s", "tcp with TLS, GB/s", "ratio", "CPU-s/GB with TLS", "ratio"),
        note="Gate: at least 0.5.",
    )
    for num_tokens in NUM_TOKENS:
        repeats = max(1, total_bytes // (num_tokens * TOKEN_BYTES))
        for checksum in ("full", "off"):
            arms = (f"tcp, checksum {checksum}", f"{TLS}, checksum {checksum}")

            def once(arm: str, num_tokens: int = num_tokens) -> Moved:
                return pair.kv_transfer(num_tokens, arm)

            plain, tls = measure(once, arms, num_rounds, repeats).values()
            speeds, costs = (
                [[getattr(moved, name) for moved in arm] for arm in (tls, plain)]
                for name in ("gb_per_s", "cpu_s_per_gb")
            )
            table.rows.append(
                (
                    f"{num_tokens} tokens, checksum {checksum}",
                    spread(speeds[1]),
                    spread(speeds[0]),
                    ratio(*speeds),
                    spread(costs[0]),
                    ratio(*costs),
                )
            )
    return table


def _tail(pair: TransferPair, num_rounds: int) -> Table:
    table = Table(
        f"After the last layer: 30 layers, one every {LAYER_S * 1e3:.0f} ms, 2,000 tokens, {num_rounds} rounds",
        ("", "streamed, ms to the commit", "all at the end, ms", "ratio"),
        note="Gate: at most 0.1.",
    )
    for mode in ("tcp, checksum full", "shm, checksum full"):

        def once(arm: str, mode: str = mode) -> Moved:
            return pair.kv_transfer_layers(2000, mode, streamed=arm == "streamed")

        found = measure(once, ("streamed", "at the end"), num_rounds, 1)
        ms = [[m.wall_s * 1e3 for m in found[arm]] for arm in ("streamed", "at the end")]
        table.rows.append((mode, *(spread(values) for values in ms), ratio(*ms)))
    return table


def measure(
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

"""Our hand-over against NIXL and mooncake's transfer engine, and all of them against a raw TCP socket.

The work is the hand-over benchmark's: SmolLM2-135M's KV, from scattered blocks of a pool in one process to scattered
blocks of a pool in another. The engines move it row by row, a row being a block of a layer; each is used as vLLM's
connector for it does. They are told where everything is beforehand and check nothing; ours offers, reserves, verifies
a checksum and commits. Time is from the call that moves until the receiver knows that it has everything.

An engine has an environment of its own, and is left out if it has none (mooncake also needs Debian's libibverbs1):

    python -m venv nixl && nixl/bin/pip install numpy && nixl/bin/pip install --no-deps nixl-cu12
    python -m venv mooncake && mooncake/bin/pip install numpy mooncake-transfer-engine-non-cuda
    NIXL_PYTHON=nixl/bin/python MOONCAKE_PYTHON=mooncake/bin/python python -m tests.bench --only transfer_engines
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from deploy.processes import die_with_parent
from tests.bench.handover import BLOCK_TOKENS, NUM_TOKENS, TOKEN_BYTES, HandoverPair, Moved, measure
from tests.bench.peer import Peer
from tests.bench.report import Report, Table
from tests.bench.stats import ratio, spread
from tests.bench.transfer_engine_peer import NUM_BLOCKS

RAW = "raw TCP"
OURS = ("gloo, checksum full", "tcp, checksum full", "shm, checksum full")
INTERPRETERS = {"nixl": "NIXL_PYTHON", "nixl-polled": "NIXL_PYTHON", "mooncake": "MOONCAKE_PYTHON"}
TCP = {"UCX_TLS": "tcp"}
"""Otherwise UCX lets one process read the other's memory."""
QUEUES = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535", "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535"}
"""mooncake 0.3.13's default of 1,024 refuses a prompt of 3,750 rows; later versions have these."""
ENGINES: dict[str, tuple[str, dict[str, str]]] = {
    "NIXL": ("nixl", {}),
    "NIXL, no progress thread": ("nixl-polled", {}),
    "NIXL, UCX_TLS=tcp": ("nixl", TCP),
    "NIXL, UCX_TLS=tcp, no progress thread": ("nixl-polled", TCP),
    "mooncake, tcp": ("mooncake", QUEUES),
}


class EnginePeer(Peer):
    """An end that another Python runs. It can be stopped while nothing is asked of it: NIXL polls even then."""

    def __init__(self, interpreter: str, engine: str, role: str, settings: dict[str, str]) -> None:
        script = Path(__file__).with_name("transfer_engine_peer.py")
        inherited = {name: value for name, value in os.environ.items() if name != "UCX_TLS"}
        self._process = subprocess.Popen(
            [interpreter, "-I", script, engine, role],
            env={"NIXL_LOG_LEVEL": "WARN", "MC_LOG_LEVEL": "WARNING", **inherited, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent(),
        )

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


class EnginePair:
    """Two ends of one engine that know each other. Stopped except while they move something."""

    def __init__(self, source: EnginePeer, destination: EnginePeer, source_acts: bool) -> None:
        self._source, self._destination = source, destination
        self._source_acts = source_acts
        self._num_moved = 0
        descriptions = [peer.ask("describe") for peer in (source, destination)]
        source.ask("connect", **descriptions[1])
        destination.ask("connect", **descriptions[0])
        self._signal(signal.SIGSTOP)

    def move(self, num_tokens: int) -> Moved:
        """From scattered blocks to scattered blocks, every row's arrival checked afterwards."""
        with self._awake():
            return self._move(num_tokens)

    def verify(self, num_tokens: int) -> None:
        """Moves, and compares all bytes."""
        with self._awake():
            self._move(num_tokens)
            ends = zip((self._source, self._destination), _block_ids(num_tokens), strict=True)
            if len({peer.ask("digest", block_ids=block_ids)["digest"] for peer, block_ids in ends}) != 1:
                raise RuntimeError("the destination's bytes are not the source's")

    def close(self) -> None:
        """Lets the ends notice that they are no longer needed."""
        self._signal(signal.SIGCONT)

    def _move(self, num_tokens: int) -> Moved:
        self._num_moved += 1
        ids = _block_ids(num_tokens)
        self._source.ask("stamp", number=self._num_moved)
        if self._source_acts:
            acts, waits, local, remote = self._source, self._destination, *ids
        else:
            acts, waits, remote, local = self._destination, self._source, *ids
        waits.ask("begin")
        waits.tell("finish")
        acted, waited = acts.ask("move", local=local, remote=remote), waits.answer()
        if num_missing := self._destination.ask("check", block_ids=ids[1], number=self._num_moved)["num_missing"]:
            raise RuntimeError(f"{num_missing} rows came after the destination was told that all had come")
        wall_s = (waited if self._source_acts else acted)["end_s"] - acted["start_s"]
        return Moved(num_tokens * TOKEN_BYTES, wall_s, acted["cpu_s"] + waited["cpu_s"])

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for peer in (self._source, self._destination):
            peer.signal(number)


def run(quick: bool) -> Report:
    num_rounds, total_bytes = (3, 200_000_000) if quick else (9, 750_000_000)
    with contextlib.ExitStack() as stack:
        decode, prefill = (
            stack.enter_context(Peer("tests.bench.handover_peer", role)) for role in ("decode", "prefill")
        )
        ours = HandoverPair(prefill, decode)
        engines = {
            name: _open(stack, engine, settings)
            for name, (engine, settings) in ENGINES.items()
            if os.environ.get(INTERPRETERS[engine])
        }
        return Report("transfer_engines", [_compare(ours, engines, num_rounds, total_bytes)])


def _open(stack: contextlib.ExitStack, engine: str, settings: dict[str, str]) -> EnginePair:
    interpreter = os.environ[INTERPRETERS[engine]]
    source, destination = (EnginePeer(interpreter, engine, role, settings) for role in ("source", "destination"))
    stack.enter_context(source)
    stack.enter_context(destination)
    pair = EnginePair(source, destination, source_acts=engine == "mooncake")
    stack.callback(pair.close)
    for num_tokens in NUM_TOKENS:
        pair.verify(num_tokens)
    return pair


def _compare(ours: HandoverPair, engines: dict[str, EnginePair], num_rounds: int, total_bytes: int) -> Table:
    arms = (RAW, *OURS, *engines)
    table = Table(
        f"KV hand-over and transfer engines, SmolLM2-135M's KV in {BLOCK_TOKENS}-token blocks, {num_rounds} rounds",
        ("", "GB/s", "of raw TCP", "CPU-s/GB", "ms a prompt"),
        note=_note(),
    )
    for num_tokens in NUM_TOKENS:
        num_bytes = num_tokens * TOKEN_BYTES
        repeats = max(1, total_bytes // num_bytes)

        def once(arm: str, num_tokens: int = num_tokens, num_bytes: int = num_bytes) -> Moved:
            if arm == RAW:
                return ours.raw_flat(num_bytes)
            return ours.hand_over(num_tokens, arm) if arm in OURS else engines[arm].move(num_tokens)

        found = measure(once, arms, num_rounds, repeats)
        for arm in arms:
            moved = found[arm]
            table.rows.append(
                (
                    f"{num_tokens} tokens ({num_bytes / 1e6:.0f} MB), {f'baton, {arm}' if arm in OURS else arm}",
                    spread([m.gb_per_s for m in moved]),
                    ratio([m.gb_per_s for m in moved], [m.gb_per_s for m in found[RAW]]),
                    spread([m.cpu_s_per_gb for m in moved]),
                    spread([m.wall_s * 1e3 / repeats for m in moved]),
                )
            )
    return table


def _note() -> str:
    missing = sorted({name for name in INTERPRETERS.values() if not os.environ.get(name)})
    left_out = f" BlockCopier are left out because these are not set: {', '.join(missing)}." if missing else ""
    return (
        "The engines check nothing and agree on nothing; ours does both, with a checksum over all bytes. "
        f"NIXL's progress thread, its default, polls a core in each process.{left_out}"
    )


def _block_ids(num_tokens: int) -> tuple[list[int], list[int]]:
    """The source's and the destination's: scattered, as pools that have been in use give them out."""
    num_blocks = -(-num_tokens // BLOCK_TOKENS)
    source, destination = (random.Random(seed).sample(range(NUM_BLOCKS), num_blocks) for seed in (5, 6))
    return source, destination

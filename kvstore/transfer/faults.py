"""Faults on purpose, for tests: what the sender does to a payload after its checksum is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from kvstore.transfer.plan import Chunk


@dataclass(frozen=True, slots=True)
class Faults:
    """Each: every Nth chunk of a pair; 0 is never."""

    corrupt_chunk: int = 0
    """Flip the top bit of every byte of one block row."""
    drop_chunk: int = 0
    """Send zeros instead."""
    swap_blocks: int = 0
    """Exchange the first and the last block row, of different layers where a chunk has several: attention does not mind
    the order of a sequence's blocks within one layer. Chunks of a single row do not count."""


def parse_faults(spec: str) -> Faults:
    """From `FaultsConfig.spec`, such as `corrupt_chunk=3,drop_chunk=10`.

    Raises:
        ConfigError: an unknown fault, or a count that is not a positive number.
    """
    counts: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in spec.split(","))):
        name, _, count = item.partition("=")
        if name not in Faults.__slots__ or not count.isdigit() or not int(count):
            raise ConfigError(f"faults.spec: {item!r} is not one of {', '.join(Faults.__slots__)} with =N")
        counts[name] = int(count)
    return Faults(**counts)


class FaultInjector:
    """Counts one pair's chunks."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._num_chunks = 0
        self._num_swappable = 0

    def spoil(self, chunk: Chunk, payload: torch.Tensor) -> None:
        num_rows = (chunk.layer_hi - chunk.layer_lo) * (chunk.unit_hi - chunk.unit_lo)
        self._num_chunks += 1
        if _every(self._faults.corrupt_chunk, self._num_chunks):
            # Of every byte: a float changes its sign and its exponent.
            payload.view(max(1, num_rows), -1)[num_rows // 2] ^= 0x80
        if _every(self._faults.drop_chunk, self._num_chunks):
            payload.zero_()
        if num_rows < 2:
            return
        self._num_swappable += 1
        if _every(self._faults.swap_blocks, self._num_swappable):
            rows = payload.view(num_rows, -1)
            rows[[0, -1]] = rows[[-1, 0]]


def _every(nth: int, count: int) -> bool:
    return bool(nth) and count % nth == 0

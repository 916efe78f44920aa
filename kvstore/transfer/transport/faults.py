"""Faults on purpose, for tests: to a payload after its checksum is taken, and to the link itself.

Those of the link are `faulty`'s; here they are named and parsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from kvstore.transfer.protocol.plan import Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Each: every Nth chunk of a pair; 0 is never. Those of the link also take a probability, between 0 and 1."""

    corrupt_chunk: int = 0
    """Flip the top bit of every byte of one block row."""
    drop_chunk: int = 0
    """Send zeros instead."""
    swap_blocks: int = 0
    """Exchange the first and the last block row, of different layers where a chunk has several: attention does not mind
    the order of a sequence's blocks within one layer. Chunks of a single row do not count."""
    link_drop: float = 0
    """The chunk is not sent."""
    link_duplicate: float = 0
    """It is sent twice."""
    link_reorder: float = 0
    """The next chunk is sent before it, if that comes before a signal and before anybody waits for this one."""
    link_truncate: float = 0
    """The second half of its payload is not sent; what the receiver finds there is of no meaning."""
    link_flip: float = 0
    """One bit of its header or its payload changes."""
    link_stall: float = 0
    """From this chunk on nothing is sent, and who waits for it waits until the link is aborted."""
    link_kill: float = 0
    """The link is closed while the chunk is under way."""
    link_delay_ms: int = 0
    """Wait so long before each chunk."""

    @property
    def on_link(self) -> bool:
        """Whether there are any that a `FaultyTransport` injects."""
        return any(getattr(self, name) for name in self.__slots__ if name.startswith("link_"))


_PROBABILITY = re.compile(r"0?\.\d*[1-9]\d*")


def parse_faults(spec: str) -> Faults:
    """From `FaultsConfig.spec`, such as `corrupt_chunk=3,link_drop=0.01,link_delay_ms=5`.

    Raises:
        ConfigError: an unknown fault, or a count that is not a positive number.
    """
    counts: dict[str, float] = {}
    for item in filter(None, (part.strip() for part in spec.split(","))):
        name, _, count = item.partition("=")
        if name in Faults.__slots__ and count.isdigit() and int(count):
            counts[name] = int(count)
        elif name in _MAY_BE_RANDOM and _PROBABILITY.fullmatch(count):
            counts[name] = float(count)
        else:
            raise ConfigError(
                f"faults.spec: {item!r} is not one of {', '.join(Faults.__slots__)} with =N, "
                f"or of {', '.join(sorted(_MAY_BE_RANDOM))} with a probability below 1"
            )
    return Faults(**counts)  # type: ignore[arg-type]


_MAY_BE_RANDOM = {name for name in Faults.__slots__ if name.startswith("link_")} - {"link_delay_ms"}


class FaultInjector:
    """Counts one pair's chunks."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._num_chunks = 0
        self._num_swappable = 0

    def spoil(self, chunk: Chunk, payload: torch.Tensor) -> None:
        num_rows = (chunk.layer_hi - chunk.layer_lo) * (chunk.unit_hi - chunk.unit_lo)
        self._num_chunks += 1
        if every(self._faults.corrupt_chunk, self._num_chunks):
            # Of every byte: a float changes its sign and its exponent.
            payload.view(max(1, num_rows), -1)[num_rows // 2] ^= 0x80
        if every(self._faults.drop_chunk, self._num_chunks):
            payload.zero_()
        if num_rows < 2:
            return
        self._num_swappable += 1
        if every(self._faults.swap_blocks, self._num_swappable):
            rows = payload.view(num_rows, -1)
            rows[[0, -1]] = rows[[-1, 0]]


def every(nth: float, count: int) -> bool:
    """Whether a fault of every `nth` chunk happens at chunk `count`, counted from 1; 0 is never."""
    return bool(nth) and count % nth == 0

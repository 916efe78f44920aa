"""Settings of the project's own tests: the arithmetic model, injected faults, modes of NCCL.

`Config.testing` is not listed: the settings' documentation, the chart's values and errors leave it out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from baton.config.section import Float, OneOf, String, Switch, section
from baton.errors import ConfigError

NCCL_MODES = ("nonblocking-eager", "nonblocking-lazy", "blocking-eager", "blocking-lazy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Frequency of each fault: at every Nth chunk of a connection; 0 is never.

    The faults of the transport also take a probability between 0 and 1.
    """

    corrupt_chunk: int = 0
    """Flip the top bit of every byte of one block row."""
    drop_chunk: int = 0
    """Send zeros instead."""
    swap_blocks: int = 0
    """Exchange the first and the last block row, of different layers if a chunk has several.

    Within one layer, attention ignores the order of a sequence's blocks. Chunks of a single row do not count.
    """
    link_drop: float = 0
    """Do not send the chunk."""
    link_duplicate: float = 0
    """Send it twice."""
    link_reorder: float = 0
    """Send the next chunk first, if that comes before a signal and before the owner waits for this one."""
    link_truncate: float = 0
    """Omit the second half of its payload; the receiver finds undefined bytes there."""
    link_flip: float = 0
    """Change one bit of its header or its payload."""
    link_stall: float = 0
    """Send nothing from this chunk on; a wait for it lasts until the transport is aborted."""
    link_kill: float = 0
    """Close the transport while the chunk is being sent."""
    link_delay_ms: int = 0
    """Wait this long before each chunk."""


_PROBABILITY = re.compile(r"0?\.\d*[1-9]\d*")
_MAY_BE_RANDOM = {name for name in Faults.__slots__ if name.startswith("link_")} - {"link_delay_ms"}


def parse_faults(spec: str) -> Faults:
    """Parse `TestingConfig.faults`, such as `corrupt_chunk=3,link_drop=0.01,link_delay_ms=5`.

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
                f"testing.faults: {item!r} is not one of {', '.join(Faults.__slots__)} with =N, "
                f"or of {', '.join(sorted(_MAY_BE_RANDOM))} with a probability below 1"
            )
    return Faults(**counts)  # type: ignore[arg-type]


@section("testing")
class TestingConfig:
    """Tests of Baton itself. Not for clusters that serve."""

    __test__ = False
    """pytest collects no tests from it."""

    arithmetic: Switch = False
    """Workers compute the arithmetic model (`engine.testing`), whose output can be computed by hand."""
    step_ms: Float = 0.0
    """Minimum duration of a step of the arithmetic model, in milliseconds; the model sleeps to reach it."""
    token_ms: Float = 0.0
    """Additional minimum duration for each token in a step of the arithmetic model, in milliseconds."""
    faults: String = ""
    """Comma-separated NAME=N: inject the fault into every Nth chunk of a KV transfer. The names are the fields of
    `Faults`."""
    pins_by_request: Switch = False
    """Workers with vLLM pin a prefix by a request, not by references on its blocks, as with a vLLM whose block pool
    lacks the methods for it."""
    nccl_mode: Annotated[str, OneOf(*NCCL_MODES)] = "nonblocking-eager"
    """Mode in which nccl transports create and use their communicators, for debugging hangs; it must be the same on all
    workers. blocking: a call into NCCL returns when it has finished. lazy: the first message creates the
    communicator."""

    def __post_init__(self) -> None:
        parse_faults(self.faults)
        for name in ("step_ms", "token_ms"):
            if getattr(self, name) and not self.arithmetic:
                raise ConfigError(f"testing.{name} needs testing.arithmetic")

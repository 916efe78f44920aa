"""What every benchmark shares: interleaving, medians with their spread, pairwise ratios, and who else used the CPUs."""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import psutil

NUM_TRIES = 5
QUIET_CORES = 0.2
"""Most that other processes may use while something is measured that decides anything."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and how far the rounds lay apart."""

    median: float
    low: float
    high: float
    num_rounds: int


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Of values taken in the same round: noise that lasts longer than a round cancels out."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def difference(minuends: Sequence[float], subtrahends: Sequence[float]) -> Spread:
    """Of values taken in the same round."""
    return spread([a - b for a, b in zip(minuends, subtrahends, strict=True)])


def interleaved(arms: Sequence[str], num_rounds: int) -> Iterator[str]:
    """The arms to run, one after the other: A B, B A, A B, ... so that neither always has the warmer machine."""
    for number in range(num_rounds):
        yield from arms if number % 2 == 0 else reversed(arms)


class OtherWork:
    """How many cores other processes kept busy while the block was entered.

    What the system was busy with, less what this process and its children used, those that live on and those that have
    ended. Interrupt work that the kernel charges to nobody counts as others', and so do the workers that Ray runs.
    """

    cores: float = 0.0
    """Mean over the block; valid once it is left."""

    def __enter__(self) -> OtherWork:
        self._start = (time.monotonic(), _busy_s(), _own_s())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        wall_s, busy_s, own_s = (
            now - then for now, then in zip((time.monotonic(), _busy_s(), _own_s()), self._start, strict=True)
        )
        self.cores = max(0.0, (busy_s - own_s) / wall_s)


def until_quiet(num_tries: int) -> Iterator[OtherWork]:
    """Yields what each try is to be measured in, until others were quiet during one, or all are used up."""
    for _ in range(num_tries):
        others = OtherWork()
        yield others
        if others.cores <= QUIET_CORES:
            return


def describe_load(cores: float, num_tries: int) -> str:
    """Says how busy others were during the try that counts, and whether it decides anything."""
    tries = f", {num_tries} tries" if num_tries > 1 else ""
    return f"{cores:.2f}{tries}{'' if cores <= QUIET_CORES else ', not decided'}"


def verdict(is_kept: bool, cores: float) -> str:
    """Says whether a gate is kept, on a machine whose others may have been too busy."""
    return ("yes" if is_kept else "no") if cores <= QUIET_CORES else "not decided"


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))


def _own_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used) + sum(map(_child_s, psutil.Process().children(True)))


def _child_s(child: psutil.Process) -> float:
    """Returns the CPU seconds of a child that still runs, with those of its own children that have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return float(sum(child.cpu_times()[:4]))
    return 0.0


def machine() -> str:
    """This machine in a line."""
    with open("/proc/cpuinfo", encoding="ascii") as file:  # noqa: PTH123 - not a file of ours
        models = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    memory_gib = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} x {models[0] if models else 'unknown CPU'}, {memory_gib:.0f} GiB"

"""How much memory is free, and how much of it KV pools may take.

    free ── other processes that are about to start ──┐
         ── for each pool: weights and its process ──── the rest: `auto` takes a share of it, a larger pool is refused

Nothing here imports torch: `baton up` asks before it starts anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import ConfigError, ModelLoadError
from baton.weights_files import SUFFIX, loaded_files, read_header

if TYPE_CHECKING:
    from baton.config import GibOrAuto

GIB = 2**30
GPU_SHARE = 0.85
"""Share of a GPU's memory beside the weights and what transfers may take; the rest is for activations."""
MEASURED_SHARE = 0.9
"""Largest share of what weights and the largest step leave of a GPU's memory. Transfers have what they may take."""
CONTEXT_BYTES = 3 * GIB // 4
"""Memory of a process on a GPU beside what torch allocates: the context, its modules and libraries' workspaces."""
CPU_SHARE = 0.5
"""Share of a machine's memory beside the weights. It leaves room for other programs, or as many workers again."""
CPU_MOST_GIB = 2.0
"""Limit on an automatic pool on a CPU, unless weights and process are larger: a CPU takes minutes to fill more, and the
memory is taken at once."""
FITS = 0.95
"""Largest share of the remaining memory that a pool may have, since other needs are only estimated."""
ADVISED = 0.9
"""Share that a refusal recommends: less than `FITS`, so that it still fits a moment later."""
PROCESS_BYTES = 3 * GIB // 4
"""Memory of a rank's process on a CPU beside weights and pool: torch, transformers, activations, slots."""
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory that the KV pools of a few ranks share: a machine's, or one GPU's. All sizes are in bytes."""

    free: int
    num_pools: int
    needed: int
    """Need of each rank beside its pool: its weights and its process."""
    others: int = 0
    """Need of other processes that are about to start."""
    on_gpu: bool = False
    set_aside: int = 0
    """What transfers may take beside each pool later."""
    is_measured: bool = False
    """Whether `needed` is what a GPU has said, and not an estimate."""

    def pool_gib(self, asked: GibOrAuto) -> float:
        """The size of each pool in GiB: the one asked for, or a share of the room.

        Raises:
            ConfigError: there is no room for it; the message says how much there would be.
        """
        needed = self.needed + self.set_aside
        left_gib = ((self.free - self.others) / self.num_pools - self.needed) / GIB
        if (most_gib := left_gib - self.set_aside / GIB) <= 0:
            raise ConfigError(
                f"there is no room for KV: of the {self.free / GIB:.1f} GiB that are free, weights and processes of "
                f"{_pools(self.num_pools, 'rank')} want {(needed * self.num_pools + self.others) / GIB:.1f}"
                f"{self._for}; take a smaller model, a narrower model.dtype or fewer workers"
            )
        if asked == "auto":
            if self.on_gpu:
                return min(MEASURED_SHARE * left_gib, most_gib) if self.is_measured else GPU_SHARE * most_gib
            return min(CPU_SHARE * left_gib, max(CPU_MOST_GIB, self.needed / GIB))
        if asked > min(FITS * left_gib, most_gib):
            wanted = f"{_pools(self.num_pools, 'KV pool')} of {asked:,.7g} GiB"
            most = math.floor(min(ADVISED * left_gib, most_gib) * 100) / 100
            raise ConfigError(
                f"{wanted} {'do' if self.num_pools > 1 else 'does'} not fit: {self.free / GIB:.1f} GiB are free, of "
                f"which the model and its processes leave {left_gib * self.num_pools:.1f}{self._for}; set "
                f"engine.kv_cache_gib to auto or at most {most:g}"
            )
        return asked

    @property
    def _for(self) -> str:
        aside = f"{self.set_aside / GIB:.1f} for transfers (transfer.num_slots, gpu_slot_bytes, gpu_rings_mib, links)"
        return f", of which {aside}" if self.set_aside else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """The memory of a GPU beside a model that has computed its largest step, in bytes."""

    total: int
    free: int
    """Memory that no process has."""
    held: int
    """Memory that this process's allocator has, in use or not."""
    peak: int
    """The most of it that was in use during the step."""

    def room(self, share: float, set_aside: int = 0) -> Room:
        """Returns the room for this process's pool.

        What neighbours on the GPU use of their shares does not reduce it: they may be about to load.

        Args:
            share: of the GPU's memory that this process may have.
            set_aside: bytes of it that its transfers may take.
        """
        most = int(share * self.total) - CONTEXT_BYTES
        free = min(self.free + self.held, most)
        return Room(free=free, num_pools=1, needed=self.peak, on_gpu=True, set_aside=set_aside, is_measured=True)


def _pools(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def weights_bytes(folder: Path, dtype: str = "") -> int:
    """Bytes that the weights of a model's folder take in memory.

    Args:
        dtype: the type in which they are kept, float32, bfloat16, float16 or fp8, of which it is the least, since
            embeddings have a wider one; empty: as they are stored.
    """
    return sum(_file_bytes(path, SIZES.get(dtype)) for path in _weights_files(folder))


def _weights_files(folder: Path) -> list[Path]:
    try:
        return [path for path in loaded_files(folder) if path.is_file()]
    except ModelLoadError:
        return sorted(folder.glob(f"*{SUFFIX}"))


def _file_bytes(path: Path, itemsize: int | None) -> int:
    """Bytes of the tensors in a safetensors file's header; without such a header, the size of the file."""
    try:
        heads = read_header(path).values()
    except (OSError, ValueError):
        return path.stat().st_size
    return sum(head.num_bytes if itemsize is None else head.num_elements * itemsize for head in heads)


def available_memory(
    share: float = 1.0,
    machine: tuple[int, int] | None = None,
    cgroups: Path = Path("/sys/fs/cgroup"),
    own: Path = Path("/proc/self/cgroup"),
) -> int:
    """Bytes that this process can still get: the machine's, or less where one of its cgroups has a limit.

    Cached files of a cgroup count as free: the kernel reclaims them when memory is needed.

    Args:
        share: limit, as a share of all memory, used or not. What neighbours use of their shares does not reduce it.
        machine: the machine's free and total memory; None: as the system reports it.
        cgroups: the folder where cgroups are mounted.
        own: the kernel's list of the cgroups of this process.
    """
    if machine is None:
        import psutil  # tests on a bare GPU machine do without it

        reported = psutil.virtual_memory()
        machine = reported.available, reported.total
    limits = [machine, *_cgroups_limits(cgroups, own)]
    return min(min(left for left, _ in limits), int(share * min(most for _, most in limits)))


def _cgroups_limits(cgroups: Path, own: Path) -> list[tuple[int, int]]:
    """What each limit leaves, and the limit, for v2 and v1. In a container its own cgroup is mounted as the root."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        lines = []
    found = []
    v2, v1 = [cgroups], [cgroups / "memory"]
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if not controllers:
            v2 += _with_parents(cgroups, path)
        elif "memory" in controllers.split(","):
            v1 += _with_parents(cgroups / "memory", path)
    for folders, limit, used, prefix in (
        (v2, "memory.max", "memory.current", ""),
        (v1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        for folder in dict.fromkeys(folders):
            try:
                most = (folder / limit).read_text().strip()
                files = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                kept = sum(int(files.get(f"{prefix}{name}_file", 0)) for name in ("inactive", "active"))
                if most != "max":
                    found.append((max(0, int(most) - int((folder / used).read_text()) + kept), int(most)))
            except (OSError, ValueError):
                continue
    return found


def _with_parents(root: Path, path: str) -> list[Path]:
    folder = root / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]

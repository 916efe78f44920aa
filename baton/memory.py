"""Free memory, and the share of it that KV pools may use.

    free ── other processes that are about to start ──┐
         ── for each pool: weights and its process ──── the rest: `auto` uses a share of it, a larger pool is rejected

Nothing here imports torch: `baton up` calls this before it starts anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.errors import ConfigError, ModelLoadError
from baton.model_files import of_text, read_json
from baton.weights_files import SUFFIX, TensorHead, loaded_files, read_header

if TYPE_CHECKING:
    from baton.config import GibOrAuto

GIB = 2**30
GPU_SHARE = 0.85
"""KV pool's share of a GPU's memory after the weights and the limit of transfers; the rest is for activations."""
MEASURED_SHARE = 0.9
"""Largest share of a GPU's memory after weights and the largest step. The limit of transfers stays reserved."""
CONTEXT_BYTES = 3 * GIB // 4
"""GPU memory of a process outside torch's allocator: the context, its modules and libraries' workspaces."""
CPU_SHARE = 0.5
"""KV pools' share of a machine's memory after the weights. The rest is for other programs, or as many more workers."""
CPU_MOST_GIB = 2.0
"""Limit of an automatic pool on a CPU, unless weights and process are larger.

A CPU takes minutes to fill more, and the memory is allocated at once.
"""
FITS = 0.95
"""Largest share of the remaining memory that a pool may have, since other needs are only estimates."""
ADVISED = 0.9
"""Share that an error recommends: less than `FITS`, so that it still fits a moment later."""
PROCESS_BYTES = 3 * GIB // 4
"""Memory of a rank's process on a CPU in addition to weights and pool: torch, transformers, activations, slots."""
VLLM_PROCESS_BYTES = 2 * GIB
"""Memory of a rank's process of vLLM on a CPU in addition to weights and pool: 1.9 GiB with vLLM 0.32."""
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory that the KV pools of a few ranks share: a machine's, or one GPU's. All sizes are in bytes."""

    free: int
    num_pools: int
    needed: int
    """Need of each rank in addition to its pool: its weights and its process."""
    others: int = 0
    """Need of other processes that are about to start."""
    on_gpu: bool = False
    set_aside: int = 0
    """Memory that transfers may take later in addition to each pool."""
    is_measured: bool = False
    """True if `needed` was measured on a GPU, not estimated."""

    def pool_gib(self, asked: GibOrAuto) -> float:
        """Return the size of each pool in GiB: the requested size, or a share of the available memory.

        Raises:
            ConfigError: the memory is not sufficient; the message says how much would be available.
        """
        needed = self.needed + self.set_aside
        left_gib = ((self.free - self.others) / self.num_pools - self.needed) / GIB
        if (most_gib := left_gib - self.set_aside / GIB) <= 0:
            raise ConfigError(
                f"there is no room for KV: of the {self.free / GIB:.1f} GiB that are free, weights and processes of "
                f"{_pools(self.num_pools, 'rank')} need {(needed * self.num_pools + self.others) / GIB:.1f}"
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
        aside = (
            f"{self.set_aside / GIB:.1f} for transfers (transfer.num_slots, gpu_slot_bytes, gpu_rings_mib, transports)"
        )
        return f", of which {aside}" if self.set_aside else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Memory of a GPU next to a model that has computed its largest step, in bytes."""

    total: int
    free: int
    """Memory that no process has allocated."""
    held: int
    """Memory that this process's allocator has reserved, in use or not."""
    peak: int
    """Peak of its use during the step."""

    def room(self, share: float, set_aside: int = 0) -> Room:
        """Return the memory for this process's pool.

        Neighbours' use of their shares of the GPU does not reduce it: they may be about to load.

        Args:
            share: the share of the GPU's memory that this process may have.
            set_aside: bytes of it that its transfers may take.
        """
        most = int(share * self.total) - CONTEXT_BYTES
        free = min(self.free + self.held, most)
        return Room(free=free, num_pools=1, needed=self.peak, on_gpu=True, set_aside=set_aside, is_measured=True)


def _pools(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


ADAPTERLESS = frozenset({"embed_tokens", "experts", "kv_b_proj", "lm_head"})
"""Parts of the names of matrices that no adapter changes, of which the large ones matter here."""
OF_PACKED, PACKED = "_blocks", 2
"""End of the names of tensors of mxfp4 checkpoints, and the numbers in each of their bytes; loading unpacks them."""


def weights_bytes(folder: Path, dtype: str = "") -> int:
    """Return the bytes that the weights of a model's folder take in memory.

    Args:
        dtype: the type in which they are kept: float32, bfloat16, float16 or fp8. For fp8 this is a lower bound, since
            embeddings have a wider type. Empty: as they are stored.
    """
    return sum(_file_bytes(path, SIZES.get(dtype)) for path in _weights_files(folder))


def bytes_of_vllm(folder: Path, dtype: str) -> int:
    """Return the bytes that the weights take in vLLM, which keeps quantized ones as they are stored.

    Args:
        dtype: see `weights_bytes`.
    """
    config = read_json(folder / "config.json")
    is_quantized = of_text(config, "quantization_config") or of_text(config, "compression_config")
    return weights_bytes(folder, "" if is_quantized else dtype)


def adapters_bytes(folder: Path, number: int, rank: int, dtype: str) -> int:
    """Return about how many bytes the matrices of adapters take next to a model's weights.

    Args:
        number: how many adapters.
        rank: their rank.
        dtype: see `weights_bytes`.
    """
    if not number:
        return 0
    width = 0
    for path in _weights_files(folder):
        try:
            heads = read_header(path)
        except (OSError, ValueError):
            continue  # loading names it
        width += sum(sum(head.shape) for name, head in heads.items() if _may_have_adapters(name, head))
    return number * rank * SIZES[dtype] * width


def _may_have_adapters(name: str, head: TensorHead) -> bool:
    parts = name.split(".")
    return len(head.shape) == 2 and parts[-1] == "weight" and not ADAPTERLESS.intersection(parts)


def _weights_files(folder: Path) -> list[Path]:
    try:
        return [path for path in loaded_files(folder) if path.is_file()]
    except ModelLoadError:
        return sorted(folder.glob(f"*{SUFFIX}"))


def _file_bytes(path: Path, itemsize: int | None) -> int:
    """Return the bytes of the tensors in a safetensors file's header; without such a header, the size of the file."""
    try:
        heads = read_header(path)
    except (OSError, ValueError):
        return path.stat().st_size
    if itemsize is None:
        return sum(head.num_bytes for head in heads.values())
    counts = ((PACKED if name.endswith(OF_PACKED) else 1) * head.num_elements for name, head in heads.items())
    return itemsize * sum(counts)


def available_memory(
    share: float = 1.0,
    machine: tuple[int, int] | None = None,
    cgroups: Path = Path("/sys/fs/cgroup"),
    own: Path = Path("/proc/self/cgroup"),
) -> int:
    """Return the bytes that this process can still allocate: the machine's, or less if one of its cgroups has a limit.

    Cached files of a cgroup count as free: the kernel reclaims them when memory is needed.

    Args:
        share: limit, as a share of all memory, used or not. Neighbours' use of their shares does not reduce it.
        machine: the machine's free and total memory; None: as the system reports it.
        cgroups: the folder where cgroups are mounted.
        own: the kernel's list of the cgroups of this process.
    """
    if machine is None:
        import psutil  # tests on a bare GPU machine run without it

        reported = psutil.virtual_memory()
        machine = reported.available, reported.total
    limits = [machine, *_cgroups_limits(cgroups, own)]
    return min(min(left for left, _ in limits), int(share * min(most for _, most in limits)))


def _cgroups_limits(cgroups: Path, own: Path) -> list[tuple[int, int]]:
    """Return the rest of each limit, and the limit, for v2 and v1. A container's own cgroup is mounted as the root."""
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

"""What a GPU says of its memory: the seam behind which the size of a pool is decided without one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.memory import GpuMemory

MEASURED_DEVICES = frozenset({"cuda"})
"""Types of devices whose pool is made after the weights are loaded and the largest step is computed."""


def measured(device: torch.device, work: Callable[[], object]) -> GpuMemory:
    """Returns what a GPU's memory is like after some work, the most that was in use meanwhile included."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total=total, free=free, held=torch.cuda.memory_reserved(device), peak=peak)

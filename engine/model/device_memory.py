"""Measurement of a GPU's memory, as a seam: the size of a pool can be computed without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.memory import GpuMemory

MEASURED_DEVICES = frozenset({"cuda"})
"""Device types whose pool is created after the weights are loaded and the largest step is computed."""


def taken_by(device: torch.device, work: Callable[[], object]) -> int:
    """Return by how many bytes some work raises the memory in use on a GPU while it runs."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def measured(device: torch.device, work: Callable[[], object]) -> GpuMemory:
    """Return a GPU's memory figures after some work, including the peak use during the work."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total=total, free=free, held=torch.cuda.memory_reserved(device), peak=peak)

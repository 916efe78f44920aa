"""Choice of the copy implementation on a GPU: Triton kernels if they run and pass a test, torch otherwise."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Any

import torch

from baton.errors import in_one_line
from kvstore.transfer.copy.checksum import word_sum

if TYPE_CHECKING:
    from types import ModuleType

logger = logging.getLogger(__name__)
OLDEST = (8, 0)
"""Minimum compute capability; from this one on, a test compiles the kernels."""

CHOSEN: dict[torch.device, ModuleType | None] = {}
"""`kvstore.transfer.copy.kernels` or None, by device. Tests put theirs here."""


def kernels_of(device: torch.device) -> ModuleType | None:
    """Return the module with the kernels that were chosen for a cache's device; None: torch copies."""
    return CHOSEN.get(device)


def choose_kernels(device: torch.device, least_run_words: int) -> None:
    """Choose the copy implementation for a cache on a device, once, and log the choice and its reason.

    This compiles, loads and tests the kernels, which may take seconds. Kernels must not be loaded into a GPU while a
    kernel on it waits for another GPU, so call this when the process starts, before any connection is opened.

    Args:
        least_run_words: number of 8-byte words that divides the length of every run. A run is a contiguous stretch of
            a cache row that is copied as a unit.
    """
    if device not in CHOSEN:
        CHOSEN[device] = _choose(device, least_run_words)


def _choose(device: torch.device, least_run_words: int) -> ModuleType | None:
    if device.type == "cpu":
        return None
    if (reason := why_not_kernels(device)) is not None:
        logger.info("chunks are copied by torch: %s", reason)
        return None
    try:
        from kvstore.transfer.copy import kernels

        with torch.cuda.device(device):
            is_right = are_right(kernels, device, least_run_words)
    except Exception as error:  # an error of a compiler or a driver
        logger.warning("chunks are copied by torch: the kernels do not run here: %s", in_one_line(error))
        return None
    if not is_right:
        logger.warning("chunks are copied by torch: the kernels failed their self-test")
        return None
    logger.info("chunks are copied and summed by the project's own kernels")
    return kernels


def why_not_kernels(device: torch.device) -> str | None:
    """Return why the kernels cannot be used; None if they can, provided that they run."""
    if not torch.cuda.is_available():
        return "the device is no NVIDIA GPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if (capability := torch.cuda.get_device_capability(device)) < OLDEST:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, less than {OLDEST[0]}.{OLDEST[1]}"
    return None


def are_right(kernels: Any, device: torch.device, least_run_words: int) -> bool:
    """Return whether the kernels copy some runs back and forth correctly, and compute the same sum as `word_sum`.

    They are compiled for each power of two that divides a run, up to a tile, and all of these are tested.
    """
    run_words = min(least_run_words & -least_run_words, kernels.TILE)
    lengths = []
    while run_words <= kernels.TILE:
        lengths.append(run_words)
        run_words *= 2
    return all(_is_right(kernels, device, length) for length in lengths)


def _is_right(kernels: Any, device: torch.device, run_words: int) -> bool:
    num_layers, num_rows, row_words, num_runs = 3, 6, 2 * run_words, 4
    is_on_gpu = device.type != "cpu"
    shape = (num_layers, num_rows, row_words)
    pages = torch.randint(-(2**62), 2**62, shape, dtype=torch.int64, device=device)
    index = torch.tensor([9, 5, 0, 3, 8], device=device)
    payload = torch.empty(2 * num_runs * row_words // 2, dtype=torch.int64, device=device)
    sums = [torch.zeros(kernels.NUM_SUMS, dtype=torch.int64, pin_memory=is_on_gpu) for _ in range(2)]
    span = kernels.ChunkRuns(pages, 4 * row_words, index, 1, num_runs, 1)
    num_sums = kernels.launch(kernels.gather, span, payload, sums[0])
    wanted = pages.view(num_layers, -1, row_words // 2)[1:, index[1:]]
    back = torch.zeros_like(pages)
    kernels.launch(kernels.scatter, span._replace(pages=back), payload, sums[1])
    if is_on_gpu:
        torch.cuda.current_stream(device).synchronize()
    total = int(word_sum(payload.view(torch.uint8)).item())
    moved = back.view(num_layers, -1, row_words // 2)[1:, index[1:]]
    is_same = payload.view(wanted.shape).equal(wanted) and moved.equal(wanted)
    return is_same and all(int(found[:num_sums].sum().item()) == total for found in sums)

"""What a machine shows of NVIDIA GPUs to a process that has no torch, or whose torch cannot use them.

The kernel's driver is no sign of a GPU: `/proc/driver/nvidia` is seen in every container of a machine, also in those
that were given none of its GPUs. Device files and the driver's tool are only in those that were.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from baton.errors import ModelLoadError


def sign_of_gpu(environ: Mapping[str, str], devices: Path = Path("/dev")) -> str:
    """What shows that this process was given GPUs, a device file or nvidia-smi; empty: nothing does.

    It is empty, too, where CUDA_VISIBLE_DEVICES hides them all: then a CPU is what is wanted.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return ""
    if found := sorted(devices.glob("nvidia[0-9]*")):
        return str(found[0])
    return shutil.which("nvidia-smi", path=environ.get("PATH")) or ""


def refuse_silent_cpu(device: str, is_cuda_available: bool, sign: str) -> None:
    """Refuses to compute on a CPU beside a GPU that cannot be used: it would be far slower, and say nothing.

    Args:
        device: `model.device`.
        is_cuda_available: whether torch can use a GPU.
        sign: as from `sign_of_gpu`.

    Raises:
        ModelLoadError: `device` is auto, and there is such a GPU; the message says what to change.
    """
    if device == "auto" and sign and not is_cuda_available:
        raise ModelLoadError(
            f"there is a GPU here ({sign}), and torch cannot use it: `baton doctor` says why (a driver that is too "
            "old, a CPU build of torch); set model.device to cpu to compute on the CPU"
        )

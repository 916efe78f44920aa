"""Detection of NVIDIA GPUs without torch, or with a torch that cannot use them.

The kernel's driver does not indicate a GPU: `/proc/driver/nvidia` is visible in every container of a machine, also in
containers without a GPU. Device files and the driver's tool are only in containers with GPUs.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from baton.errors import ModelLoadError


def sign_of_gpu(environ: Mapping[str, str], devices: Path = Path("/dev")) -> str:
    """Return the evidence that this process was given GPUs, a device file or nvidia-smi; empty: there is none.

    It is also empty if CUDA_VISIBLE_DEVICES hides all GPUs: then the user wants a CPU.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return ""
    if found := sorted(devices.glob("nvidia[0-9]*")):
        return str(found[0])
    return shutil.which("nvidia-smi", path=environ.get("PATH")) or ""


def refuse_silent_cpu(device: str, is_cuda_available: bool, sign: str) -> None:
    """Refuse to compute on a CPU if there is a GPU that cannot be used: it would be far slower without any message.

    Args:
        device: `model.device`.
        is_cuda_available: whether torch can use a GPU.
        sign: as from `sign_of_gpu`.

    Raises:
        ModelLoadError: `device` is auto, and there is such a GPU; the message says how to fix it.
    """
    if device == "auto" and sign and not is_cuda_available:
        raise ModelLoadError(
            f"torch cannot use the GPU of this machine ({sign}); run `baton doctor` to find the reason (such as an "
            "old driver or a CPU build of torch), or set model.device to cpu to compute on the CPU"
        )

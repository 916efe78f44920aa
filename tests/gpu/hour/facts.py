"""What is here, and whether torch still has the names that Baton uses."""

from __future__ import annotations

import mmap
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvstore.transfer.device import gpu_of
from kvstore.transfer.transport.nccl_env import PINNED
from kvstore.transfer.transport.streams import streams_of
from tests.gpu.hour.checks import Found, judged

PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "numpy",
    "xxhash",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "flashinfer-python",
)
OPTIONS = ("blocking", "cga_cluster_size", "max_ctas", "min_ctas")
CALLS = ("send", "recv", "abort", "eager_connect_single_device", "Options")


def _installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _nvidia_smi() -> str:
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,pcie.link.gen.current",
        "--format=csv,noheader",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no answer: {error!r}"
    return " | ".join(done.stdout.split("\n")).strip(" |")


def machine() -> Found:
    """Versions, and one product whose answer is known."""
    versions: Any = torch
    properties = torch.cuda.get_device_properties(0)
    ours = torch.arange(64.0, device="cuda").view(8, 8)
    product = (ours @ ours).cpu()
    nccl: Any = dist.ProcessGroupNCCL if dist.is_nccl_available() else None
    figures = {
        "packages": _installed(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": versions.backends.cudnn.version(),
        "nccl": ".".join(map(str, versions.cuda.nccl.version())) if nccl is not None else "none",
        "nvidia_smi": _nvidia_smi(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "uuid": str(properties.uuid),
        "processors": properties.multi_processor_count,
    }
    is_right = product.equal(ours.cpu() @ ours.cpu()) and nccl is not None
    return judged(is_right, "it computes wrongly, or torch has no NCCL", **figures)


def names() -> Found:
    """The private names of torch: of NCCL's process group, its options, and their being no copies."""
    nccl: Any = dist.ProcessGroupNCCL
    missing = [name for name in CALLS if not hasattr(nccl, name)]
    options = nccl.Options(is_high_priority_stream=True)
    missing += [f"config.{name}" for name in OPTIONS if not hasattr(options.config, name)]
    options.config.max_ctas = 3
    if options.config.max_ctas != 3:
        missing.append("config is a copy")
    missing += [name for name in ("_timeout",) if not hasattr(options, name)]
    missing += [
        f"cuda {name}" for name in ("OutOfMemoryError", "get_device_properties") if not hasattr(torch.cuda, name)
    ]
    missing += [name for name in ("AcceleratorError", "OutOfMemoryError") if not hasattr(torch, name)]
    return judged(not missing, "torch lacks names", missing=missing, torch=torch.__version__)


def environment() -> Found:
    """The variables that Baton pins are known to the libraries that read them."""
    folder = Path(torch.__file__).parent / "lib"
    unknown = {name for name in PINNED if name.startswith("TORCH_")}
    for path in sorted(folder.glob("libtorch*.so")):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            unknown -= {name for name in unknown if text.find(name.encode()) >= 0}
    return judged(not unknown, "torch knows these names no more", unknown=sorted(unknown))


def streams() -> Found:
    """torch's streams: 32 of a priority, in turn, and three priorities at least."""
    gpu = gpu_of(torch.device("cuda", 0))
    assert gpu is not None
    pools = streams_of(gpu)
    found = {
        "copies": len(pools.copies.streams),
        "communicators": len(pools.communicators.streams),
        "launches_apart": pools.launches is not pools.copies,
        "highest_priority": gpu.highest_priority,
    }
    handles = [stream.cuda_stream for pool in (pools.copies, pools.communicators) for stream in pool.streams]
    is_right = found["copies"] == found["communicators"] == 32 and len(set(handles)) == len(handles)
    return judged(is_right, "streams are given out in another way", **found)

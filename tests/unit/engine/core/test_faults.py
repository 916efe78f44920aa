from __future__ import annotations

import pytest
import torch

from engine.core.faults import Fault, fault_of

HINT = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call.\nCompile with `TORCH_USE_CUDA_DSA`"
)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered{HINT}"),
        torch.AcceleratorError(f"CUDA error: device-side assert triggered{HINT}"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        torch.AcceleratorError("CUDA error: unspecified launch failure"),
        torch.AcceleratorError("CUDA error: the launch timed out and was terminated"),
        torch.AcceleratorError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"),
        RuntimeError("Triton Error [CUDA]: misaligned address"),
        RuntimeError("CUDA error: an illegal instruction was encountered"),
        RuntimeError("cudaMemcpyAsync: an illegal memory access was encountered"),
        RuntimeError("NCCL error\nLast error:\nCuda failure 700 'an illegal memory access was encountered'"),
    ],
    ids=lambda error: str(error).split("\n")[0],
)
def test_some_errors_of_a_gpu_are_for_good(error: Exception) -> None:
    assert fault_of(error) is Fault.DEVICE_LOST


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.60 GiB."),
        torch.OutOfMemoryError("Allocation on device"),
        torch.AcceleratorError(f"CUDA error: out of memory{HINT}"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=str,
)
def test_a_full_memory_is_no_lost_device(error: Exception) -> None:
    assert fault_of(error) is Fault.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of memory"),
        torch.AcceleratorError(f"CUDA error: invalid argument{HINT}"),
        torch.AcceleratorError(f"CUDA error: no kernel image is available for execution on the device{HINT}"),
        ValueError("an illegal memory access"),
        AssertionError(),
    ],
    ids=str,
)
def test_the_device_itself_is_asked_about_all_others(error: Exception) -> None:
    assert fault_of(error) is Fault.TRANSIENT


def test_what_an_error_comes_of_counts() -> None:
    error = ValueError("the model's own words")
    error.__cause__ = torch.AcceleratorError("CUDA error: device-side assert triggered")
    assert fault_of(error) is Fault.DEVICE_LOST

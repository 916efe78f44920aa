"""Classification of step errors by their effect on later steps. Pure: uses names and texts, and does not need torch.

After one of the `FATAL` errors, a CUDA context returns the same error from every call until its process ends (CUDA
Runtime API, `cudaError_t`). Other texts do not decide it, and the device itself is tested (`Runner.recover`).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

FATAL = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
    "launch timed out",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "invalid access of peer GPU memory",
    "hardware stack error",
    "illegal instruction",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "context is destroyed",
    "driver shutting down",
)
"""Parts of the texts of CUDA errors after which a process cannot compute on the device any more."""
EXHAUSTED = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""Parts of the texts of errors after which the device still works."""
OUT_OF_MEMORY_CLASS = "OutOfMemoryError"
"""Name of torch's exception class, on any device."""


class Fault(StrEnum):
    """Extent of the damage after a failed step."""

    TRANSIENT = "transient"
    """Only the step, as far as the error shows."""
    OUT_OF_MEMORY = "out of memory"
    """The step needed more memory than its device has."""
    DEVICE_LOST = "device lost"
    """The device cannot compute in this process any more."""


def fault_of(error: BaseException) -> Fault:
    """Return the fault that an error, or one of its causes, indicates."""
    found = {_fault_of_one(each) for each in _causes(error)}
    return next((fault for fault in (Fault.DEVICE_LOST, Fault.OUT_OF_MEMORY) if fault in found), Fault.TRANSIENT)


def _fault_of_one(error: BaseException) -> Fault:
    if any(cls.__name__ == OUT_OF_MEMORY_CLASS for cls in type(error).__mro__):
        return Fault.OUT_OF_MEMORY
    text = str(error)
    if "cuda" not in text.lower():  # CUDA error (torch), cudaMemcpyAsync (the runtime), Cuda failure (NCCL)
        return Fault.TRANSIENT
    if any(phrase.lower() in text.lower() for phrase in FATAL):
        return Fault.DEVICE_LOST
    return Fault.OUT_OF_MEMORY if any(phrase in text for phrase in EXHAUSTED) else Fault.TRANSIENT


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__

"""What must be in a worker's environment before torch is imported, so that a broken transport ends no process."""

from __future__ import annotations


def nccl_environment() -> dict[str, str]:
    """Returns the environment of a CUDA worker, which the process that starts the worker sets.

    By default torch tears the process down when a communicator fails or stalls; here only the transport ends.
    A nonblocking communicator whose peer hangs while it is made would hold the GPU's turns for half an hour.
    That sends of an eager communicator queue behind each other, of which torch warns, is what a transport wants.
    """
    return {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "10",
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
    }

"""Environment that a worker needs before torch is imported, so that a broken transport ends no process."""

from __future__ import annotations

import os
from typing import Final

from baton.errors import TransferError

PINNED: Final = {
    # By default torch tears the process down when a communicator fails or stalls; here only the transport ends.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_DISTRIBUTED_DEBUG": "OFF",
    # After a failed operation torch's watchdog sleeps four times this long with its lock held, and the end of the
    # communicator waits for it: a minute by default.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # The flight recorder notes the Python stack of every operation.
    "TORCH_FR_BUFFER_SIZE": "0",
    # torch warns that sends of an eager communicator queue behind each other; a transport wants exactly this.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
    "NCCL_RAS_ENABLE": "0",
    # The first launch of a kernel that is loaded lazily may wait for a receive that spins.
    "CUDA_MODULE_LOADING": "EAGER",
}
"""Environment of a CUDA worker that transports depend on; the process that starts the worker sets it.

It holds for every communicator of the process, also for those of a tensor-parallel model. So a property that a
communicator can have individually, such as whether its calls block, is not here but in the options of its group.
"""


def require_environment() -> None:
    """Raise TransferError if the process does not run in the environment of a CUDA worker."""
    wrong = [name for name, value in PINNED.items() if os.environ.get(name) != value]
    if wrong:
        raise TransferError(f"this process was not started for nccl transports: {', '.join(wrong)} must be set")

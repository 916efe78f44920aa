"""Scheduling, block ownership and the engine loop, without tensors.

Nothing here imports torch: the simulator runs this code in virtual time, and a worker whose model runs elsewhere needs
no more. A runner (`runner.Runner`) computes the steps.
"""

__all__ = [
    "adapters",
    "beams",
    "block_pool",
    "draft_model",
    "draft_runner",
    "drafting",
    "engine",
    "faults",
    "group_pool",
    "image_store",
    "loop",
    "ngrams",
    "outputs",
    "pool_sizes",
    "runner",
    "scheduler",
    "sequence",
    "serving",
    "step_threads",
]

"""Scheduling, block ownership and the engine loop, without tensors.

Nothing here imports torch: the simulator runs this code in virtual time, and a worker whose model runs elsewhere needs
no more. A runner (`runner.Runner`) computes the steps.
"""

__all__ = [
    "ahead",
    "beams",
    "block_pool",
    "draft_model",
    "draft_price",
    "draft_runner",
    "drafting",
    "engine",
    "eviction",
    "faults",
    "group_pool",
    "image_store",
    "kv_spec",
    "loop",
    "ngrams",
    "outputs",
    "pins",
    "plan",
    "pool_sizes",
    "requirements",
    "runner",
    "scheduler",
    "sequence",
    "sequence_blocks",
    "serving",
    "step_fit",
    "step_threads",
    "urgency",
]

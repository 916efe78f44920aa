"""A GPU and NCCL on a CPU: what the KV transfer's order of work on a GPU depends on, and nothing else of one."""

"""Transports: they carry bytes from one rank of a worker to one of another, and know nothing of KV.

`base` has the Protocols and `select` the table of transports: TCP, shared memory (of a host, or of its GPUs: `ipc`)
and NCCL. `staging` owns the slots, `exports` the rings on a GPU, `streams` its streams, `packets` what says which
slot of a ring has what; `rendezvous` exchanges what two ends must know, `seal` encrypts.
"""

__all__ = [
    "base",
    "exports",
    "ipc",
    "nccl",
    "nccl_counts",
    "nccl_env",
    "nccl_log",
    "nccl_turns",
    "packets",
    "rendezvous",
    "seal",
    "select",
    "shm",
    "socket_end",
    "staging",
    "streams",
    "tcp",
]

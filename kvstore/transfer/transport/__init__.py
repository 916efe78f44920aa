"""Transports: they carry bytes from one rank of a worker to one of another, and know nothing of KV.

`base` has the Protocols and `select` the table of transports: TCP, shared memory, gloo and NCCL. `staging` owns the
slots, `streams` the streams of a GPU, `rendezvous` exchanges what two ends must know, `faults` breaks a transport on
purpose for tests.
"""

__all__ = [
    "base",
    "faults",
    "gloo",
    "nccl",
    "nccl_env",
    "nccl_log",
    "nccl_turns",
    "rendezvous",
    "select",
    "shm",
    "socket_end",
    "staging",
    "streams",
    "tcp",
]

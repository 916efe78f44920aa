"""The process of a worker: an engine, its KV endpoint, a lease in Redis and the RPC handlers of both roles.

process   starts and ends it: `python -m worker`
member    makes the engine and the KV endpoint, holds the lease and publishes what the cache has
ahead     which workers a prefill worker connects to before a KV transfer needs them
calls     the worker's end of the stream that each router has to it
control   the controller's and operators' orders: drain, change the role
log       the latest lines of its log, for routers
kernel_caches  where compiled kernels are kept

The threads of the process; everything but the steps themselves and the bytes of KV happens on the event loop:

    event loop        RPC handlers, scheduler, block pool, lease, index, control streams
      | step   ^ outputs and progress, posted to the loop
    engine thread     Runner.execute: one step at a time; with several ranks a child process for each other rank
      | ready  ^ chunks sent or received, posted to the loop
    transport threads one for each end of a transport: gathers and sends, or receives and scatters
    gRPC's pool       bytes of the streams
"""

__all__ = [
    "ahead",
    "calls",
    "control",
    "kernel_caches",
    "log",
    "member",
    "process",
]

"""Worker process: an engine, its KV endpoint, a lease in Redis and the RPC handlers of both roles.

process   starts and stops it: `python -m worker`
member    creates the engine and the KV endpoint, holds the lease and publishes the cached blocks
ahead     chooses the workers to which a prefill worker connects before a KV transfer needs them
calls     the worker's side of the stream from each router
adapters  checks of adapters' folders, for routers
control   orders of the controller and of operators: drain, change the role
log       the latest lines of its log, for routers
kernel_caches  folders of compiled kernels

The threads of the process; everything except the steps themselves and the bytes of KV happens on the event loop:

    event loop        RPC handlers, scheduler, block pool, lease, index, control streams
      | step   ^ outputs and progress, posted to the loop
    engine thread     Runner.execute: one step at a time; with several ranks a child process for each other rank
      | ready  ^ chunks sent or received, posted to the loop
    transport threads one for each side of a transport: gathers and sends, or receives and scatters
    gRPC's pool       bytes of the streams
"""

__all__ = [
    "adapters",
    "ahead",
    "calls",
    "control",
    "kernel_caches",
    "log",
    "member",
    "process",
]

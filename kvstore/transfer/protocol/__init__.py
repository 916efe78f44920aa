"""Transfer protocol of two workers: what both must agree on, and block ownership. Pure: no I/O, no threads, no clock.

`plan` maps heads to ranks and bytes to chunks, `chunk_header` precedes each message. `send_state` and
`receive_state` are the two state machines, with the shared types of `machine`.
"""

__all__ = ["chunk_header", "machine", "plan", "receive_state", "send_state"]

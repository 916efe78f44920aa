"""What two workers agree on, and who owns which blocks at each moment. Pure: no I/O, no threads, no clock.

`layout` says which rank has which heads, `plan` which bytes travel in which chunk, `chunk_header` what precedes each
message. `send_state` and `receive_state` are the two state machines, on the terms of `machine`.
"""

__all__ = ["chunk_header", "layout", "machine", "plan", "receive_state", "send_state"]

"""The thread that owns one end of a transport, and the loops that run on it.

`thread` opens the transport and ends with it; `send_loop` sends the chunks that are ready, `receive_loop` receives the
announced ones. `under_way` has what was sent and not waited for, `driven` lets the event loop and these threads share
one state machine.
"""

__all__ = ["driven", "receive_loop", "send_loop", "thread", "under_way"]

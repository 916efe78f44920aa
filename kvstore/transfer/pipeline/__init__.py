"""The thread that owns one end of a transport, and the loops that run on it.

`thread` opens and closes the transport. `send_loop` sends the chunks that are ready, `receive_loop` receives the
announced ones. `driven` lets the event loop and these threads share one state machine.
"""

__all__ = ["driven", "receive_loop", "send_loop", "thread"]

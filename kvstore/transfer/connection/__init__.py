"""Connections: one rank of a worker to one rank of another, each a control stream and a transport.

`outgoing` offers KV and sends it, `incoming` receives, `reservations` keeps the blocks that wait for it, `pool` finds
or opens the connection to a peer, and `ahead` those that will be needed, with `pauses` between failures. The stream
itself, its pings and the rendezvous are in `control_stream`.
"""

__all__ = ["ahead", "control_stream", "incoming", "outgoing", "pauses", "pool", "reservations"]

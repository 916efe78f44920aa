"""Connections from one rank of a worker to one rank of another; each is a control stream and a transport.

`outgoing` offers KV and sends it, and `incoming` receives it. `reservations` keeps the blocks that wait for it. `pool`
finds or opens the connection to a peer, also before it is needed, and spaces the retries. The stream itself, its pings
and the rendezvous are in `control_stream`.
"""

__all__ = ["control_stream", "incoming", "outgoing", "pool", "reservations"]

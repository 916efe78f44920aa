"""The thread that owns one end of a transport, and the loops that run on it."""

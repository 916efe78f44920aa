"""Transports: they carry bytes from one rank of a worker to one of another, and know nothing of KV."""

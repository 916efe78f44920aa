"""Connections: one rank of a worker to one rank of another, each a control stream and a transport."""

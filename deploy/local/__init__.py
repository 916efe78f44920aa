"""A cluster's parts on this machine: all of them (`baton up`), or one (`baton run`).

up          starts the parts in order, restarts those that die, ends them
folder      where `up` keeps what is gone when it ends
child       one child process: start, readiness, restart
parts       one part in the foreground, as containers run it
keys        files of keys for the members of a cluster
leave       the workers of this machine leave the cluster
"""

__all__ = ["child", "folder", "keys", "leave", "part", "parts", "up"]

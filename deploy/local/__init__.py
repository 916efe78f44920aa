"""A cluster's parts on this machine: all of them (`baton up`), or one (`baton run`).

up          starts the parts in order, restarts those that die, ends them
child       one child process: start, readiness, restart
ray_cluster Ray and the controller among those processes
child_log   what a child writes: into a file, and to the terminal
parts       one part in the foreground, as containers run it
keys        files of keys for the members of a cluster
leave       the workers of this machine leave the cluster
log_files   what the parts on this machine have written
"""

__all__ = ["child", "child_log", "keys", "leave", "log_files", "part", "parts", "ray_cluster", "up"]

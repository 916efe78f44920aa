"""Parts of a cluster on this machine: all of them (`baton up`), or one (`baton run`).

up          starts the parts in order, restarts parts that die, stops them
child       one child process: start, readiness, restart
ray_cluster Ray, and the controllers of the models
models      configuration of each model
controller_child  the controller of one model
child_log   output of a child: to a file, and to the terminal
part        names of the parts
parts       one part in the foreground, as containers run it
keys        key files for the members of a cluster
leave       drains the workers of this machine
log_files   log files of the parts on this machine
"""

__all__ = [
    "child",
    "child_log",
    "controller_child",
    "keys",
    "leave",
    "log_files",
    "models",
    "part",
    "parts",
    "ray_cluster",
    "up",
]

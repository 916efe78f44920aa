"""Workers as Ray actors: Ray places each worker on a node with room, and the node process there runs it.

actor        the actor, which orders the start and the end of its worker's process
actors       the controller's view of all actors
gpus         the share of the GPUs that each worker requests
head         a Ray cluster on this machine only
lean_node    its node, without unused processes
node         the node process of a Ray node: workers, their output, probes, and Ray itself in a container
node_link    an actor's connection to it
raylet       the health of Ray's process on a node
supervisor   the processes of a node's workers, which serve on when Ray fails
drain_node   stops Ray from placing more work on a node
ray_import   Ray, imported with the settings that it reads at import
turns        the turns in which the workers of one node load their models
"""

__all__ = [
    "actor",
    "actors",
    "drain_node",
    "gpus",
    "head",
    "lean_node",
    "node",
    "node_link",
    "ray_import",
    "raylet",
    "supervisor",
    "turns",
]

"""Workers as Ray actors: Ray places each worker on a node with room, and reports its death.

actor        the actor, which runs the worker's process
actors       the controller's view of all actors
gpus         the share of the GPUs that each worker requests
head         a Ray cluster on this machine only
lean_node    its node, without unused processes
node         the first process of a container that is a Ray node: workers' output, and probes
node_link    an actor's reports to it
drain_node   stops Ray from placing more work on a node
ray_import   Ray, imported with the settings that it reads at import
turns        the turns in which the workers of one node load their models
"""

__all__ = ["actor", "actors", "drain_node", "gpus", "head", "lean_node", "node", "node_link", "ray_import", "turns"]

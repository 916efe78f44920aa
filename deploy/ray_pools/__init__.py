"""Workers as Ray actors: Ray decides which node has room for one, and reports when one has died.

actor        the actor, which keeps the worker's process
actors       the controller's view of all actors
gpus         the part of the GPUs that each worker asks for
head         a Ray cluster of this machine alone
lean_node    its node, without what nobody needs
node         the first process of a container that is a Ray node: workers' output, and what probes ask
node_link    what an actor says to it
drain_node   has Ray place nothing more on a node
ray_import   Ray, imported with the settings that it reads at import
"""

__all__ = ["actor", "actors", "drain_node", "gpus", "head", "lean_node", "node", "node_link", "ray_import"]

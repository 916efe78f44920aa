"""The router's place in the cluster: its picture of the other processes, and whether it should be sent requests."""

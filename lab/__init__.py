"""Experiments, over the same traces of requests: the simulator and the benchmark. No code that serves imports this.

`simulate` replays a trace in virtual time on the production engine, `bench` in real time on a running cluster; both
print the same figures. `traces` reads, generates and shapes what they replay.
"""

__all__ = ["bench", "simulate", "traces"]

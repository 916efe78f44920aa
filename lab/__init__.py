"""Experiments over traces of requests: the simulator and the benchmark. No serving code imports this package.

`simulate` replays a trace in virtual time on the production engine, `bench` in real time on a running cluster; both
print the same figures. `traces` reads, generates and shapes the traces.
"""

__all__ = ["bench", "simulate", "traces"]

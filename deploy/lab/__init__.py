"""Experiments: the simulator and the benchmark, over the same traces. No code that serves imports this."""

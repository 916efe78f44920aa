"""The benchmarks' own logic."""

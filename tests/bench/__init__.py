"""Benchmarks: ratios in one run on this machine. `README.md` says how each is measured."""

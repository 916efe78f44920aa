"""The checks of `tests/gpu/first_hour.py`; they need torch, transformers, numpy, xxhash and pyyaml, and no more."""

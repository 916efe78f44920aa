"""The checks of `tests/gpu/first_hour.py`. Nothing here needs more than torch, transformers, numpy, xxhash and pyyaml."""

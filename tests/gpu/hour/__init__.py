"""The checks of `tests/gpu/first_hour.py`; they need the six packages that `tests/gpu/README.md` names, and no more."""

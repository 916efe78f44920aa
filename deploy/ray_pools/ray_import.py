"""Ray, imported with the settings that have to be there before it is."""

from __future__ import annotations

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # keeps it from calling home
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # else it advertises that it leaves lines out
os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # else its prefix of a worker's line is coloured, in files, too

import ray
import ray.exceptions
import ray.util

__all__ = ["ray"]

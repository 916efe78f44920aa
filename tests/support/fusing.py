"""Fused modules on a CPU, where Triton's interpreter computes them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from engine.model import fused_model


def fuse_here(model: Any) -> list[str]:
    """Fuses a model, also on a CPU, and returns what the log says."""
    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("engine.model.fused_model")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_model, "why_not_fused", lambda *args: None)
        fused_model.fuse(model, 1)
    logger.removeHandler(handler)
    return words

"""The parts of a cluster, by name."""

from __future__ import annotations

from enum import StrEnum


class Part(StrEnum):
    MODEL = "model"
    ROUTER = "router"
    CONTROLLER = "controller"

"""The parts of a cluster, by name."""

from __future__ import annotations

from enum import StrEnum


class ClusterPart(StrEnum):
    MODEL = "model"
    ROUTER = "router"
    CONTROLLER = "controller"

"""What a process loads. Each test asks a fresh interpreter, since this one has loaded everything already."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

HEAVY = ("torch", "transformers", "ray", "numpy")
CORE = ("engine", "group_pool", "kv_spec", "loop", "outputs", "runner", "scheduler", "sequence", "serving", "step_fit")
WATCHED: Mapping[str, tuple[str, ...]] = {
    # The vocabulary and the engine's core.
    "baton.api, baton.blocks, baton.cluster, baton.config, baton.errors, baton.messages, baton.sampling": (
        *HEAVY, "grpc", "google.protobuf", "redis",
    ),
    ", ".join(f"baton.engine.core.{module}" for module in CORE): (*HEAVY, "grpc", "baton.v1"),
    # The router, and what others share with it.
    "kvstore.index": HEAVY,
    "kvstore.leases": HEAVY,
    "router": HEAVY,
    "router.server": HEAVY,
    "router.process": HEAVY,
    # What is refused before anything starts is refused without imports that take seconds; so is the simulator's.
    "deploy.lab.simulate.run, deploy.lab.simulate.command": ("torch", "transformers", "ray"),
    "deploy.cli.app, deploy.local.up": ("torch", "transformers", "ray"),
}  # fmt: skip
"""Modules, and what must not be there when they are: each after those above it, which may load less."""


def loaded_by(watched: Mapping[str, tuple[str, ...]]) -> dict[str, set[str]]:
    """What of the watched is there once modules are, which one interpreter imports in their order."""
    code = (
        "import importlib, json, sys\n"
        "found = {}\n"
        "for modules, watched in json.loads(sys.argv[1]).items():\n"
        "    for module in modules.split(', '):\n"
        "        importlib.import_module(module)\n"
        "    found[modules] = [name for name in watched if name in sys.modules]\n"
        "print(json.dumps(found))"
    )
    command = [sys.executable, "-c", code, json.dumps(watched)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return {modules: set(found) for modules, found in json.loads(done.stdout).items()}


def test_vocabulary_core_router_and_commands_load_nothing_heavy() -> None:
    assert loaded_by(WATCHED) == {modules: set() for modules in WATCHED}


def test_the_first_hour_on_a_gpu_needs_nothing_of_a_cluster() -> None:
    modules = ", ".join(
        f"tests.gpu.hour.{name}" for name in ("churn", "deaths", "engine", "facts", "handover", "speed")
    )
    absent = ("grpc", "google.protobuf", "redis", "ray", "pytest", "baton.config", "baton.v1")
    assert loaded_by({modules: (*absent, "torch")}) == {modules: {"torch"}}, "what is loaded is seen"

"""What a process loads. Each test asks a fresh interpreter, since this one has loaded everything already."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "ray", "numpy")


def loaded_by(modules: str, watched: tuple[str, ...]) -> set[str]:
    code = f"import sys, {modules}; print(*(m for m in {watched!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["router", "router.server", "router.__main__", "kvstore.index", "kvstore.leases"])
def test_the_router_runs_without_torch_transformers_and_ray(module: str) -> None:
    assert loaded_by(module, HEAVY) == set()


def test_the_watch_sees_what_is_loaded() -> None:
    assert loaded_by("torch", HEAVY) >= {"torch"}


def test_the_vocabulary_needs_no_grpc() -> None:
    modules = "baton.api, baton.blocks, baton.cluster, baton.config, baton.errors, baton.messages, baton.sampling"
    assert loaded_by(modules, (*HEAVY, "grpc", "google.protobuf", "redis")) == set()


CORE = ("engine", "group_pool", "kv_spec", "loop", "outputs", "runner", "scheduler", "sequence", "serving", "step_fit")


def test_the_engines_core_needs_no_torch() -> None:
    modules = ", ".join(f"baton.engine.core.{module}" for module in CORE)
    assert loaded_by(modules, (*HEAVY, "grpc", "baton.v1")) == set()


def test_the_simulator_needs_no_torch() -> None:
    assert loaded_by("deploy.lab.simulate.run, deploy.lab.simulate.command", ("torch", "transformers", "ray")) == set()


def test_what_can_be_refused_before_anything_starts_is_refused_without_their_imports() -> None:
    """They take seconds."""
    assert loaded_by("deploy.cli.app, deploy.local.up", ("torch", "transformers", "ray")) == set()


def test_the_first_hour_on_a_gpu_needs_nothing_of_a_cluster() -> None:
    modules = ", ".join(
        f"tests.gpu.hour.{name}" for name in ("churn", "deaths", "engine", "facts", "handover", "speed")
    )
    absent = ("grpc", "google.protobuf", "redis", "ray", "pytest", "baton.config", "baton.v1")
    assert loaded_by(modules, absent) == set()

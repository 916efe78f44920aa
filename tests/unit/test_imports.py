"""What a process loads. Each test asks a fresh interpreter, since this one has loaded everything already."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.cases import chosen

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "ray", "numpy")
CORE = ("engine", "group_pool", "loop", "outputs", "runner", "scheduler", "sequence", "serving")
WATCHED: Mapping[str, tuple[str, ...]] = {
    # The vocabulary and the engine's core.
    "baton.api, baton.blocks, baton.cluster, baton.config, baton.errors, baton.messages, baton.sampling": (
        *HEAVY, "grpc", "google.protobuf", "redis",
    ),
    ", ".join(f"engine.core.{module}" for module in CORE): (*HEAVY, "grpc", "baton.v1"),
    # The router, and what others share with it.
    "kvstore.index": HEAVY,
    "kvstore.leases": HEAVY,
    "router": HEAVY,
    "router.server": HEAVY,
    "router.process": HEAVY,
    # What is refused before anything starts is refused without imports that take seconds; so is the simulator's.
    "lab.simulate.run, lab.simulate.command": ("torch", "transformers", "ray"),
    "deploy.cli.app, deploy.local.up": ("torch", "transformers", "ray"),
}  # fmt: skip
"""Modules, and what must not be there when they are: each after those above it, which may load less."""


TRANSPORT = ("grpc", "google.protobuf", "redis", "baton.config", "baton.messages")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "--version": (*HEAVY, *TRANSPORT, "pydantic", "rich", "baton.api"),
    "--help": (*HEAVY, *TRANSPORT, "pydantic", "baton.api", "deploy.operator.client", "lab", "deploy.local"),
    "status --help": (*HEAVY, *TRANSPORT, "deploy.operator.client"),
    "generate --help": (*HEAVY, *TRANSPORT, "deploy.operator.client"),
    "up --help": (*HEAVY, *TRANSPORT, "deploy.local"),
    "chat --help": (*HEAVY, *TRANSPORT),
    "doctor --help": (*HEAVY, *TRANSPORT, "deploy.doctor"),
    "bench --help": (*HEAVY, *TRANSPORT),
    # It finds no router. What it needs in order to ask one has no settings, and nothing of the processes that serve.
    "status --address 127.0.0.1:1": (*HEAVY, "redis", "baton.config", "router", "kvstore", "cryptography.x509"),
}
"""Commands, and what must not be there when they end. Typer's options need pydantic and its help rich."""


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


CHECKED = ("--version", "--help", "up --help", "status --address 127.0.0.1:1")
"""An interpreter starts for each."""


@pytest.mark.parametrize("words", chosen(COMMANDS, pytest.mark.slow, *CHECKED))
def test_a_command_loads_what_it_needs_alone(words: str) -> None:
    code = (
        "import json, sys\nfrom deploy.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert "deploy.cli.app" in loaded
    assert loaded & set(COMMANDS[words]) == set()


@pytest.mark.full
@pytest.mark.timeout(260)
def test_the_first_hour_on_a_gpu_needs_six_packages_and_theirs() -> None:
    """By an interpreter that finds nothing else; a list of what must not be there would miss what is new."""
    modules = [f"tests.gpu.hour.{path.stem}" for path in sorted((ROOT / "tests/gpu/hour").glob("[a-z]*.py"))]
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/support/bare"), str(ROOT)])}
    command = [sys.executable, "-c", code, "tests.gpu.first_hour", *modules]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_the_readme_of_the_gpu_names_the_six_packages() -> None:
    (command,) = re.findall(r"^pip install (.+)$", (ROOT / "tests/gpu/README.md").read_text(), re.MULTILINE)
    tree = ast.parse((ROOT / "tests/support/bare/sitecustomize.py").read_text())
    (packages,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES"
    )
    assert command.split() == list(packages)
    assert len(packages) == 6

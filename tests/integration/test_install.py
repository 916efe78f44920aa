"""`make install` with indexes of our own: which build of torch it takes. pip's configuration here is left out."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.integration import stub_packages
from tests.integration.stub_packages import wheel

ROOT = Path(__file__).parents[2]
VERSION = importlib.metadata.version("torch").partition("+")[0]
CPU, CUDA = f"torch {VERSION}+cpu", f"torch {VERSION}"
NOT_INSTALLED_HERE = {"served 1", f"pip {importlib.metadata.version('pip')}"}
NOWHERE = "http://127.0.0.1:1"
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "stub_packages"\nbackend-path = ["."]\n'


class Project:
    """The repository's Makefile with a project of nothing but requirements, and a virtual environment with pip."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
        (self._packages,) = (folder / ".venv").glob("lib/*/site-packages")
        pip = importlib.metadata.distribution("pip")
        for name in ("pip", f"pip-{pip.version}.dist-info"):
            (self._packages / name).symlink_to(str(pip.locate_file(name)))
        shutil.copy(ROOT / "Makefile", folder)
        (folder / "constraints.txt").write_text(f"torch=={VERSION}\nneedstorch==1\n")
        shutil.copy(stub_packages.__file__, folder)
        (folder / "pyproject.toml").write_text(PROJECT)
        (folder / "requirements.txt").write_text(f"torch>={VERSION}\nneedstorch\n")

    def install(self, **variables: str) -> set[str]:
        """What there is after `make install`."""
        for found in self._packages.glob("*.dist-info"):
            if not found.is_symlink():
                shutil.rmtree(found)
        (self.folder / ".venv" / ".installed").unlink(missing_ok=True)
        command = ["make", "install", *(f"{name}={value}" for name, value in variables.items())]
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return {info.stem.replace("-", " ") for info in self._packages.glob("*.dist-info")} - NOT_INSTALLED_HERE


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def publish(index: Path, name: str, version: str, *needed: str) -> None:
    """On a simple index: a folder a package, which the server lists as links."""
    (index / name).mkdir(parents=True, exist_ok=True)
    wheel(index / name, name, version, *(f"Requires-Dist: {each}" for each in needed))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its parts: `pypi`, where torch brings CUDA, `cpu` with the other build, `both`."""
    folder = tmp_path_factory.mktemp("index")
    for name in ("pypi", "both"):
        publish(folder / name, "torch", VERSION, "nvidia_cublas")
        publish(folder / name, "nvidia_cublas", "1")
        (folder / name / "nvidia_cublas").rename(folder / name / "nvidia-cublas")
        publish(folder / name, "needstorch", "1", "torch>=2")
        publish(folder / name, "needstorch", "2", "torch>=2")  # newer than the constraints allow
    for name in ("cpu", "both"):
        publish(folder / name, "torch", f"{VERSION}+cpu")
    publish(folder / "cpu", "needstorch", "1", "torch>=2")
    with serving(folder) as url:
        yield url


@pytest.fixture
def project(index: str, tmp_path: Path) -> Project:
    """With pip's configuration as on a machine where nobody has made one, but for its index."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{index}/pypi", "PIP_NO_CACHE_DIR": "1"}
    folder = tmp_path / "project"
    folder.mkdir()
    return Project(folder, environment | own)


@pytest.mark.chaos
def test_the_build_of_torch_is_that_of_the_machine(project: Project, index: str, tmp_path: Path) -> None:
    cpu, cuda = {CPU, "needstorch 1"}, {CUDA, "nvidia_cublas 1", "needstorch 1"}
    assert project.install(NVIDIA="", TORCH_CPU_INDEX=f"{index}/cpu") == cpu, "no driver"
    assert project.install(NVIDIA="", TORCH_CPU_INDEX=NOWHERE) == cuda, "what there is will do"
    (tmp_path / "nvidia-smi").touch(0o755)
    project.environment["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    assert project.install(TORCH_CPU_INDEX=f"{index}/cpu") == cuda, "a driver"


def test_beside_a_driver_the_cpu_build_is_not_taken_for_its_higher_version(project: Project, index: str) -> None:
    project.environment["PIP_INDEX_URL"] = f"{index}/both"
    assert CUDA in project.install(NVIDIA="yes", TORCH_CPU_INDEX=NOWHERE)


@pytest.mark.chaos
def test_beside_a_driver_a_cpu_build_is_better_than_none(project: Project, index: str) -> None:
    project.environment["PIP_INDEX_URL"] = f"{index}/cpu"
    assert project.install(NVIDIA="yes") == {CPU, "needstorch 1"}

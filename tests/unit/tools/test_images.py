"""What `make images` asks docker or buildah for; the images themselves are built by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools import images


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH, but for the shell's programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}")
    return folder


def add(folder: Path, name: str, body: str = "") -> Path:
    """Adds a program that writes its arguments to a file, which is returned."""
    calls = folder.parent / f"{name}.calls"
    program = folder / name
    program.write_text(f'#!/bin/sh\necho "$*" >> {calls}\n{body}\n')
    program.chmod(0o755)
    return calls


def test_buildah_is_told_every_stage_by_name(programs: Path, tmp_path: Path) -> None:
    """Version 1.28 takes `FROM build-${VARIANT}` for the name of an image, if VARIANT has its default."""
    calls = add(programs, "buildah")
    asked = ["--no-trial", "--base", "localhost/python:3.11.7", "--find-links", str(tmp_path)]
    assert images.main([*asked, "--torch-index", "https://mirror/whl"]) == 0
    router, worker = calls.read_text().splitlines()
    for call in (router, worker):
        assert call.startswith("bud --isolation=chroot ")
        assert f"--volume={tmp_path}:{tmp_path}:ro" in call
        assert "--build-arg=PYTHON_IMAGE=localhost/python --build-arg=PYTHON=3.11.7" in call
        assert f"--build-arg=PIP_FIND_LINKS={tmp_path}" in call
    assert "router.Dockerfile --tag=baton-router:" in router
    assert "VARIANT" not in router
    assert "--build-arg=VARIANT=cpu --build-arg=CUDA=cu130" in worker
    assert "--build-arg=TORCH_INDEX=https://mirror/whl" in worker


def test_docker_is_taken_if_its_daemon_answers(programs: Path) -> None:
    docker, buildah = add(programs, "docker"), add(programs, "buildah")
    assert images.main(["--no-trial"]) == 0
    assert [call.split()[0] for call in docker.read_text().splitlines()] == ["info", "build", "build"]
    assert not buildah.exists()
    assert "PYTHON" not in docker.read_text(), "what is not given is left to the Dockerfiles"


def test_buildah_is_taken_if_dockers_daemon_does_not_answer(programs: Path) -> None:
    add(programs, "docker", "exit 1")
    buildah = add(programs, "buildah")
    assert images.main(["--no-trial"]) == 0
    assert len(buildah.read_text().splitlines()) == 2


def test_what_fails_is_said(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert images.main(["--no-trial"]) == 1
    assert "neither docker, with a daemon that answers, nor buildah is there" in capsys.readouterr().err
    add(programs, "buildah", "exit 3")
    assert images.main(["--no-trial"]) == 1
    assert "buildah bud --isolation=chroot ... ended with status 3" in capsys.readouterr().err


def test_a_container_that_ends_fails_the_trial(programs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here the one that gets the model."""
    add(programs, "buildah", 'case "$1" in from) echo made;; run) exit 7;; esac')
    assert images.main(["--no-build"]) == 1
    assert "ended with status 7" in capsys.readouterr().err
    assert os.environ["PATH"] == str(programs)

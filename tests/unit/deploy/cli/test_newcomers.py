"""A newcomer's mistake gets one sentence that names the fix, before anything starts, wherever the command is run.

Every one is tried in this process; `make chaos` tries each as a user does, too: a process of its own, from an empty
folder and from one with a `router.py`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.telemetry import logs
from deploy.cli import app
from deploy.doctor import preflight
from tests.integration.cluster import free_port
from tests.support.members import secret_file
from tests.unit.deploy.cli.newcomers import MISTAKES, Mistake, broken_models, write_files

PATIENCE_S = 120.0
"""A busy machine takes many times what a quiet one does."""
QUIET_S = 5.0


@pytest.fixture(scope="module")
def taken() -> Iterator[int]:
    """The port of an HTTP server, which takes nothing else."""

    def answer() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # closed
            with connection:
                connection.recv(1024)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    broken_models(folder)
    return folder


@pytest.fixture(params=["empty", "router.py"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where the command is run."""
    if request.param == "router.py":
        for name in ("router", "kvstore", "engine", "json"):
            (tmp_path / f"{name}.py").write_text(f"raise SystemExit('this is my own {name}.py')\n")
    write_files(tmp_path)
    return tmp_path


class Typed:
    """A mistake, with ports and folders of this run."""

    def __init__(self, mistake: Mistake, taken: int, models: Path) -> None:
        places = {"taken": taken, "free": free_port(), "models": models, "secret": secret_file()}
        self.words = [word.format(**places) for word in mistake.words.split()]
        self.sentence = mistake.sentence.format(**places)
        ports = {"grpc_port": str(free_port()), "http_port": str(free_port())}
        given = {name: value.format(**places) for name, value in mistake.settings.items()}
        self.environment = {f"BATON_{name.upper()}": value for name, value in {**ports, **given}.items()}
        self.environment["CUDA_VISIBLE_DEVICES"] = ""
        self.status = mistake.status

    def check(self, status: int | str | None, errors: str) -> None:
        """Checks what the command left on the terminal, and its exit status."""
        said = [line for line in errors.splitlines() if not line.startswith("==> Model ")]
        assert status == self.status, errors
        assert len(said) == 1, errors
        assert said[0].startswith("error: ")
        assert self.sentence in said[0]


def clean(environ: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in environ.items() if not k.startswith("BATON_") or k == "BATON_CACHE"}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_sentence_and_starts_nothing(
    name: str,
    request: pytest.FixtureRequest,
    taken: int,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if MISTAKES[name].needs_model:
        request.getfixturevalue("model_dir")
    write_files(tmp_path)
    typed = Typed(MISTAKES[name], taken, models)
    for variable in set(os.environ) - set(clean(dict(os.environ))):
        monkeypatch.delenv(variable)
    for variable, value in typed.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["baton", *typed.words])
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.setattr(preflight, "ANSWER_S", QUIET_S)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(SystemExit) as ended:
        app.main()
    typed.check(ended.value.code, capsys.readouterr().err)
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.chaos
@pytest.mark.parametrize("name", MISTAKES)
def test_so_it_is_for_a_user_wherever_the_command_is_run(
    name: str, request: pytest.FixtureRequest, taken: int, models: Path, folder: Path
) -> None:
    if MISTAKES[name].needs_model:
        request.getfixturevalue("model_dir")
    typed = Typed(MISTAKES[name], taken, models)
    command = [sys.executable, "-P", "-m", "deploy.cli", *typed.words]
    done = subprocess.run(
        command,
        env=clean(dict(os.environ)) | typed.environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert not done.stdout
    typed.check(done.returncode, done.stderr)
    assert not [
        p for p in psutil.Process().children(recursive=True) if p.is_running() and "deploy" in " ".join(p.cmdline())
    ]


def test_there_are_at_least_thirty() -> None:
    assert len(MISTAKES) >= 30
